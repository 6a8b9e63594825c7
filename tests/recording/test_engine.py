"""Recordings of vLLM's real engine core, with either scheduler, and what must not disturb it."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from engine.conftest import model_directory, warnings_of_sparksched
from engine.harness import (
    ASYNC_SCHEDULING,
    Choice,
    DrivenEngine,
    Record,
    new_request,
    running_engine,
)
from sparksched.compat import configuration
from sparksched.compat.patching import MARK
from sparksched.compat.rule import Rule
from sparksched.record import recorder
from sparksched.record.events import End, Ready, Step
from sparksched.record.load import Trace
from sparksched.scheduler import SparkScheduler
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine.core import EngineCoreProc

from testkit.device import POISON, UNRULY

from .samples import ENDED
from .scenarios import replayed

__all__ = ["model_directory", "warnings_of_sparksched"]

EVERYTHING = Rule("everything", "so that vLLM's scheduler is recorded", lambda _: True)
SMALL_POOL = {"num_gpu_blocks_override": 40}


@pytest.fixture(name="path")
def _path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "trace"
    monkeypatch.setenv("SPARKSCHED_RECORD", f"{path},bytes=65536")
    return path


@pytest.fixture(name="warnings")
def _warnings(_logging_is_configured: None, warnings_of_sparksched: list[str]) -> list[str]:
    return warnings_of_sparksched


@pytest.fixture(scope="module")
def _logging_is_configured(model_directory: Path) -> None:
    """Build an engine: the first one of a process gives vLLM's loggers new handlers."""
    with running_engine(Choice.STOCK, model_directory, async_scheduling=True) as engine:
        # Nor is anything replaced, unless it is asked for.
        assert "schedule" not in vars(engine.core.scheduler)
        assert "accept_tokens" not in vars(engine.core.structured_output_manager)
        assert not hasattr(EngineCoreProc.run_busy_loop, MARK)


def serve_some(engine: DrivenEngine) -> None:
    """Serve requests of all kinds: with shared prefixes, grammars, aborts, resets and pauses."""
    for number in range(6):
        prompt = [number % 2 + 1] * 33 + [number]
        engine.add(new_request(f"plain-{number}", prompt, 60))
    structured = StructuredOutputsParams(regex="[ab]{6}")
    structured._backend = "xgrammar"
    engine.add(new_request("grammar", [3] * 20, 30, structured_outputs=structured))
    engine.add(new_request("unruly", [UNRULY] * 20, 30, structured_outputs=structured))
    engine.step(4)
    engine.core.abort_requests(["plain-1", "plain-4", "nobody"])
    engine.step(3)
    engine.core.reset_prefix_cache(reset_running_requests=True)
    engine.step(3)
    engine.core.pause_scheduler("keep", clear_cache=False)
    engine.step(1)
    engine.core.resume_scheduler()
    engine.add(new_request("turn 2", [1] * 33 + [0, *engine.record.tokens["plain-0"]], 40))
    engine.run()


def serve_many(engine: DrivenEngine) -> None:
    """Serve enough for several pieces of a file."""
    for number in range(40):
        engine.add(new_request(f"{number}", [number + 1] * 40, 60, ignore_eos=True))
        engine.step(4)
    engine.run()


def run(model: Path, scenario: Callable[[DrivenEngine], None], is_async: bool) -> Record:
    with running_engine(Choice.PLUGIN, model, async_scheduling=is_async) as engine:
        scenario(engine)
    return engine.record


@ASYNC_SCHEDULING
@pytest.mark.parametrize("fallback", [False, True], ids=["native", "fallback"])
def test_an_engine(
    fallback: bool,
    async_scheduling: bool,
    path: Path,
    model_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPARKSCHED_RECORD", str(path))
    rules = (EVERYTHING,) if fallback else configuration.CONFIG_RULES
    with (
        mock.patch.object(configuration, "CONFIG_RULES", rules),
        running_engine(
            Choice.PLUGIN, model_directory, async_scheduling=async_scheduling, **SMALL_POOL
        ) as engine,
    ):
        assert isinstance(engine.core.scheduler, SparkScheduler) == (not fallback)
        serve_some(engine)
    trace = Trace(path)
    assert trace.settings.scheduler == type(engine.core.scheduler).__name__
    found = list(trace.events())
    assert found[-1] == End(found[-1].time, ENDED)  # type: ignore[union-attr]
    assert sum(isinstance(event, Ready) for event in found) == 2
    num_steps = sum(isinstance(event, Step) for event in found)
    for scheduler in ("sparksched", "vllm"):
        outcome = replayed(path, scheduler)
        assert outcome.mismatch is None, scheduler
        assert outcome.num_steps == num_steps > 20


# ----------------------------------------------------------------------------------------
# What goes wrong
# ----------------------------------------------------------------------------------------


def test_a_file_that_is_there_is_an_error(path: Path, model_directory: Path) -> None:
    path.write_text("mine")
    with pytest.raises(RuntimeError, match=r"trace can't be created: File exists"):
        run(model_directory, serve_some, is_async=True)
    assert path.read_text() == "mine"


@pytest.mark.parametrize("room", [0, 700, 4000])
def test_a_full_disk(
    room: int,
    path: Path,
    model_directory: Path,
    warnings: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No request is lost, and what the file has replays."""
    monkeypatch.setattr("sparksched.record.write._PIECE_BYTES", 2048)
    written = 0
    write = os.write

    def write_some(descriptor: int, content: bytes) -> int:
        nonlocal written
        if os.readlink(f"/proc/self/fd/{descriptor}") != str(path):
            return write(descriptor, content)
        content = content[: room - written]
        if not content:
            raise OSError(errno.ENOSPC, "No space left on device")
        written += len(content)
        return write(descriptor, content)

    with mock.patch.object(os, "write", write_some):
        record = run(model_directory, serve_many, is_async=True)
    monkeypatch.delenv("SPARKSCHED_RECORD")
    plain = run(model_directory, serve_many, is_async=True)
    assert record.tokens == plain.tokens
    assert record.steps == plain.steps
    (warning,) = [it for it in warnings if "recording" in it]
    assert "the recording has ended, serving goes on: OSError" in warning
    assert "No space left on device" in warning
    if room >= 4000:
        trace = Trace(path)
        assert sum(isinstance(event, Step) for event in trace.events()) > 10
        assert trace.missing is not None


def test_an_engine_that_ends_in_an_error(path: Path, model_directory: Path) -> None:
    """It ends with the error that it would have ended with, and the file with what led to it."""

    def scenario(engine: DrivenEngine) -> None:
        engine.add(new_request("poisoned", [POISON] * 20, 30))
        with pytest.raises(KeyError, match="poisoned"):
            engine.run()

    run(model_directory, scenario, is_async=False)
    trace = Trace(path)
    assert sum(isinstance(event, Step) for event in trace.events()) == 2
    assert trace.missing is None


def test_an_error_of_the_recorder_ends_the_recording_alone(
    path: Path, model_directory: Path, warnings: list[str]
) -> None:
    def scenario(engine: DrivenEngine) -> None:
        engine.add(new_request("a", [1] * 20, 30))
        engine.step(2)
        with mock.patch.object(recorder, "decide", side_effect=ZeroDivisionError("sums")):
            engine.step(1)
        engine.run()

    record: Any = run(model_directory, scenario, is_async=False)
    assert record.finish_reasons.keys() == {"a"}
    (warning,) = warnings
    assert warning.endswith("serving goes on: ZeroDivisionError: sums")
    assert Trace(path).settings.scheduler == "SparkScheduler"
