"""Adapters, pooling, priorities, recurrent states in real engines: all comes out as from vLLM's.

Both schedulers get the requests in the same order, and so compose the same steps: what the models
compute is equal to the last bit, and so is what vLLM takes the work for.
"""

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from testkit import tiny_gpt_oss, tiny_hybrid, tiny_llama
from testkit.server import CPU_ENVIRONMENT, SPARKSCHED_LINE, start, stop

from .offline_program import (
    ADAPTERS,
    ALL_HYBRIDS,
    CACHED,
    ENGINE,
    FEW_HYBRIDS,
    NUM_ORDINARY,
    NUM_PROMPTS,
    NUM_URGENT,
    NUM_WAVES,
    NUM_WITH_STATES,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

OURS = {"VLLM_SCHEDULER": "sparksched", "SPARKSCHED_STRICT": "1"}


@dataclass(frozen=True)
class Observed:
    """What came of the program."""

    streams: list[list[int]]
    vectors: list[list[float]]
    order: list[int]
    states: dict[str, dict[str, Any]]
    work: dict[str, int]
    log: str = field(repr=False)


@dataclass(frozen=True)
class Models:
    """Folders."""

    llama: Path
    adapters: Path
    gpt_oss: Path
    hybrids: Path


@pytest.fixture(scope="module", name="models")
def _models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    adapters = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(ADAPTERS):
        tiny_llama.write_adapter(adapters / name, seed)
    hybrids = tmp_path_factory.mktemp("hybrids")
    for architecture in tiny_hybrid.CONFIGURATIONS:
        tiny_hybrid.write_model(hybrids / architecture, architecture)
    return Models(
        tiny_llama.write_model(tmp_path_factory.mktemp("llama")),
        adapters,
        tiny_gpt_oss.write_model(tmp_path_factory.mktemp("gpt-oss")),
        hybrids,
    )


@pytest.fixture(scope="module", name="stock")
def _stock(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Observed:
    return run_program(models, tmp_path_factory.mktemp("stock"), {})


@pytest.fixture(scope="module", name="ours")
def _ours(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Observed:
    return run_program(models, tmp_path_factory.mktemp("ours"), OURS)


def run_program(models: Models, folder: Path, environment: dict[str, str]) -> Observed:
    """Run the program with the engine in its own process; fail with what it printed."""
    log, result = folder / "log", folder / "result.json"
    folders = (models.llama, models.adapters, models.gpt_oss, models.hybrids)
    inherited = {name: value for name, value in os.environ.items() if name != "VLLM_SCHEDULER"}
    in_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    imported = {"PYTHONPATH": os.pathsep.join(sys.path)}
    environment = inherited | CPU_ENVIRONMENT | in_process | imported | environment
    arguments = [*map(str, folders), str(result)]
    program = start("e2e.offline_program", arguments, log, environment, is_preloaded=True)
    try:
        status = program.wait()
    finally:
        stop(program)
    printed = log.read_text(errors="replace")
    assert status == 0, printed[-4000:]
    return Observed(**json.loads(result.read_text()), log=printed)


def test_ours_schedules_in_rust(stock: Observed, ours: Observed) -> None:
    assert stock.log.count(SPARKSCHED_LINE) == 0
    assert ours.log.count(SPARKSCHED_LINE) == 3 + len(ours.states)


def test_streams_with_adapters_are_equal(stock: Observed, ours: Observed) -> None:
    assert ours.streams == stock.streams


def test_adapters_make_a_difference(stock: Observed) -> None:
    num_requests = NUM_PROMPTS * len(ADAPTERS)
    assert len(stock.streams) == NUM_WAVES * num_requests
    assert len(set(map(tuple, stock.streams[:num_requests]))) == num_requests


def test_vectors_are_equal(stock: Observed, ours: Observed) -> None:
    assert ours.vectors == stock.vectors


def test_vectors_tell_prompts_apart(stock: Observed) -> None:
    in_a_wave = stock.vectors[: len(stock.vectors) // 2]
    assert len({tuple(round(it, 3) for it in vector) for vector in in_a_wave}) == len(in_a_wave)


def test_requests_are_scheduled_in_the_same_order(stock: Observed, ours: Observed) -> None:
    assert ours.order == stock.order


def test_urgent_requests_overtake(ours: Observed) -> None:
    urgent = range(NUM_ORDINARY, NUM_ORDINARY + NUM_URGENT)
    assert set(urgent) < set(ours.order[: ENGINE["max_num_seqs"]])


@pytest.mark.parametrize(
    "name",
    [pytest.param(it, marks=() if it in FEW_HYBRIDS else pytest.mark.full) for it in ALL_HYBRIDS],
)
def test_streams_of_a_model_with_states_are_equal(
    name: str, stock: Observed, ours: Observed
) -> None:
    expected = stock.states[name]
    assert ours.states[name] == expected
    assert len(expected["streams"]) == NUM_WAVES * NUM_WITH_STATES
    assert len(set(map(tuple, expected["streams"][:NUM_WITH_STATES]))) == NUM_WITH_STATES
    assert expected["num_preemptions"] > 0
    assert (expected["num_cached"] > 0) == name.endswith(CACHED)


def test_the_same_work_is_estimated(stock: Observed, ours: Observed) -> None:
    assert ours.work == stock.work
    assert len(ours.work) == 3
    assert all(it > 0 for it in ours.work.values())
