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
from sparksched.scheduler import SparkScheduler
from sparksched.trace.events import Arrive, End, Ready, Step
from sparksched.trace.read import Trace
from sparksched.trace.record import copy_calls
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.request import RequestStatus

from testkit.device import POISON, UNRULY

from .scenarios import events, replay

__all__ = ["model_directory", "warnings_of_sparksched"]

EVERYTHING = Rule("everything", "so that vLLM's scheduler is recorded", lambda _: True)
SMALL_POOL = {"num_gpu_blocks_override": 40}


@pytest.fixture(name="path")
def _path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "trace"
    monkeypatch.setenv("SPARKSCHED_RECORD", str(path))
    return path


@pytest.fixture(name="warnings")
def _warnings(_logging_is_configured: None, warnings_of_sparksched: list[str]) -> list[str]:
    return warnings_of_sparksched


@pytest.fixture(scope="module")
def _logging_is_configured(model_directory: Path) -> None:
    """Build an engine: the first one of a process gives vLLM's loggers new handlers."""
    with running_engine(Choice.STOCK, model_directory, async_scheduling=True):
        pass


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
    """Serve enough for several frames."""
    for number in range(40):
        engine.add(new_request(f"{number}", [number + 1] * 40, 60, ignore_eos=True))
        engine.step(4)
    engine.run()


def run(
    choice: Choice, model: Path, scenario: Callable[[DrivenEngine], None] = serve_some, **rest: Any
) -> Record:
    with running_engine(choice, model, **rest) as engine:
        scenario(engine)
    return engine.record


def assert_replays(path: Path) -> None:
    num_steps = sum(isinstance(event, Step) for event in events(path))
    for scheduler in ("sparksched", "vllm"):
        outcome = replay(path, scheduler)
        assert outcome.mismatch is None, scheduler
        assert outcome.num_steps == num_steps > 20


@ASYNC_SCHEDULING
@pytest.mark.parametrize("with_tokens", [False, True])
@pytest.mark.parametrize("fallback", [False, True], ids=["native", "fallback"])
def test_an_engine(
    fallback: bool,
    with_tokens: bool,
    async_scheduling: bool,
    path: Path,
    model_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if with_tokens:
        monkeypatch.setenv("SPARKSCHED_RECORD", f"{path},tokens")
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
    assert trace.settings.has_tokens == with_tokens
    assert trace.settings.scheduler == type(engine.core.scheduler).__name__
    found = list(trace.events())
    assert found[-1] == End(found[-1].time, "the engine was shut down")  # type: ignore[union-attr]
    assert sum(isinstance(event, Ready) for event in found) == 2
    assert_replays(path)


def test_a_second_turn_finds_the_first(path: Path, model_directory: Path) -> None:
    """What was generated is known again when it comes back as a prompt: by its keys alone."""

    def two_turns(engine: DrivenEngine) -> None:
        engine.add(new_request("first", [1] * 20, 60, ignore_eos=True))
        engine.run()
        first = engine.record.tokens["first"]
        engine.add(new_request("second", [1] * 20 + first, 30, ignore_eos=True))
        engine.run()

    keeps_all = {"prefix_cache_retention_interval": 16}
    run(Choice.PLUGIN, model_directory, two_turns, async_scheduling=True, **keeps_all)
    hits = [hit for event in events(path) if isinstance(event, Step) for _, hit, _ in event.new]
    assert hits == [0, 64]
    assert_replays(path)


@ASYNC_SCHEDULING
def test_a_recorded_engine_does_the_same(
    async_scheduling: bool,
    path: Path,
    model_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded = run(Choice.PLUGIN, model_directory, async_scheduling=async_scheduling)
    assert path.exists()
    monkeypatch.delenv("SPARKSCHED_RECORD")
    plain = run(Choice.PLUGIN, model_directory, async_scheduling=async_scheduling)
    assert recorded.tokens == plain.tokens
    assert recorded.outputs == plain.outputs
    assert recorded.steps == plain.steps


def test_nothing_is_replaced_unless_it_is_asked_for(model_directory: Path) -> None:
    with running_engine(Choice.PLUGIN, model_directory, async_scheduling=True) as engine:
        assert "schedule" not in vars(engine.core.scheduler)
        assert "accept_tokens" not in vars(engine.core.structured_output_manager)
        assert not hasattr(EngineCoreProc.run_busy_loop, MARK)


# ----------------------------------------------------------------------------------------
# What goes wrong
# ----------------------------------------------------------------------------------------


def test_a_file_that_is_there_is_an_error(path: Path, model_directory: Path) -> None:
    path.write_text("mine")
    with pytest.raises(RuntimeError, match=r"trace can't be created: File exists"):
        run(Choice.PLUGIN, model_directory, async_scheduling=True)
    assert path.read_text() == "mine"


def test_each_engine_process_may_have_a_file_of_its_own(
    path: Path,
    model_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPARKSCHED_RECORD", f"{path}-%p")
    run(Choice.PLUGIN, model_directory, async_scheduling=True)
    assert_replays(path.with_name(f"trace-{os.getpid()}"))


@pytest.mark.parametrize("room", [0, 700, 4000])
def test_a_full_disk(
    room: int,
    path: Path,
    model_directory: Path,
    warnings: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No request is lost, and what the file has replays."""
    monkeypatch.setenv("SPARKSCHED_RECORD", f"{path},bytes=65536")
    written = 0
    write = os.write

    def write_some(descriptor: int, content: bytes) -> int:
        nonlocal written
        if os.readlink(f"/proc/self/fd/{descriptor}") != str(path):
            return write(descriptor, content)
        content = content[: room + HEADER - written]
        if not content:
            raise OSError(errno.ENOSPC, "No space left on device")
        written += len(content)
        return write(descriptor, content)

    with mock.patch.object(os, "write", write_some):
        record = run(Choice.PLUGIN, model_directory, serve_many, async_scheduling=True)
    monkeypatch.delenv("SPARKSCHED_RECORD")
    plain = run(Choice.PLUGIN, model_directory, serve_many, async_scheduling=True)
    assert record.tokens == plain.tokens
    (warning,) = [it for it in warnings if "recording" in it]
    assert "the recording has ended, serving goes on: OSError" in warning
    assert "No space left on device" in warning
    if room >= 4000:
        trace = Trace(path)
        assert sum(isinstance(event, Step) for event in trace.events()) > 10
        assert trace.missing is not None
        assert "no end" in trace.missing, "a part of a frame was left"


HEADER = 10


def test_an_engine_that_ends_in_an_error(path: Path, model_directory: Path) -> None:
    """It ends with the error that it would have ended with, and the file with what led to it."""
    with running_engine(Choice.PLUGIN, model_directory, async_scheduling=False) as engine:
        engine.add(new_request("poisoned", [POISON] * 20, 30))
        with pytest.raises(KeyError, match="poisoned"):
            engine.run()
    trace = Trace(path)
    assert sum(isinstance(event, Step) for event in trace.events()) == 2
    assert trace.missing is None


def test_an_error_of_the_recorder_ends_the_recording_alone(
    path: Path,
    model_directory: Path,
    warnings: list[str],
) -> None:
    def scenario(engine: DrivenEngine) -> None:
        engine.add(new_request("a", [1] * 20, 30))
        engine.step(2)
        with mock.patch.object(copy_calls, "_num_drafts", side_effect=ZeroDivisionError("sums")):
            engine.step(1)
        engine.run()

    record = run(Choice.PLUGIN, model_directory, scenario, async_scheduling=False)
    assert record.finish_reasons.keys() == {"a"}
    (warning,) = warnings
    assert warning.endswith("serving goes on: ZeroDivisionError: sums")


UNRECORDABLE = {
    "it is a session, whose input goes on": {"resumable": True},
}


@pytest.mark.parametrize("reason", UNRECORDABLE)
def test_a_request_without_words_ends_the_recording(
    reason: str,
    path: Path,
    model_directory: Path,
    warnings: list[str],
) -> None:
    def scenario(engine: DrivenEngine) -> None:
        engine.add(new_request("plain", [1] * 20, 30, ignore_eos=True))
        engine.step(3)
        engine.add(new_request("special", [2] * 20, 3, **UNRECORDABLE[reason]))
        engine.step(8)
        engine.core.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        engine.run()

    run(Choice.PLUGIN, model_directory, scenario, async_scheduling=False)
    (warning,) = warnings
    assert f"request special can't be recorded: {reason}" in warning
    found = events(path)
    assert isinstance(found[-1], End)
    assert found[-1].reason == f"request special can't be recorded: {reason}"
    assert [event.request_id for event in found if isinstance(event, Arrive)] == ["plain"]
    assert replay(path, "vllm").mismatch is None
