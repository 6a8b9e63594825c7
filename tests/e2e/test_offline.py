"""Pooling and recurrent states in real engines: all comes out as from vLLM's.

Both schedulers get the requests in the same order, and so compose the same steps: what the models
compute is equal to the last bit.
"""

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from testkit import tiny_models
from testkit.server import CPU_ENVIRONMENT, SPARKSCHED_LINE, start, stop

from .offline_program import (
    ALL_HYBRIDS,
    CACHED,
    FEW_HYBRIDS,
    NUM_WAVES,
    NUM_WITH_STATES,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

OURS = {"VLLM_SCHEDULER": "sparksched", "SPARKSCHED_STRICT": "1"}


@dataclass(frozen=True)
class Observed:
    """What came of the program."""

    vectors: list[list[float]]
    states: dict[str, dict[str, Any]]
    log: str = field(repr=False)


@dataclass(frozen=True)
class Models:
    """Folders."""

    gpt_oss: Path
    hybrids: Path


@pytest.fixture(scope="module", name="models")
def _models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    hybrids = tmp_path_factory.mktemp("hybrids")
    for architecture in tiny_models.HYBRIDS:
        tiny_models.write_model(hybrids / architecture, architecture)
    return Models(tiny_models.write_model(tmp_path_factory.mktemp("gpt-oss")), hybrids)


@pytest.fixture(scope="module", name="stock")
def _stock(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Observed:
    return run_program(models, tmp_path_factory.mktemp("stock"), {})


@pytest.fixture(scope="module", name="ours")
def _ours(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Observed:
    return run_program(models, tmp_path_factory.mktemp("ours"), OURS)


def run_program(models: Models, folder: Path, environment: dict[str, str]) -> Observed:
    """Run the program with the engine in its own process; fail with what it printed."""
    log, result = folder / "log", folder / "result.json"
    folders = (models.gpt_oss, models.hybrids)
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
    assert ours.log.count(SPARKSCHED_LINE) == 1 + len(ours.states)


def test_vectors_are_equal(stock: Observed, ours: Observed) -> None:
    assert ours.vectors == stock.vectors
    in_a_wave = stock.vectors[: len(stock.vectors) // 2]
    assert len({tuple(round(it, 3) for it in vector) for vector in in_a_wave}) == len(in_a_wave)


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
