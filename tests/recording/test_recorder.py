"""The recorder beside an engine's loop: what it sees, what it drops, and disks that hang."""

from __future__ import annotations

import gc
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine.conftest import warnings_of_sparksched
from engine.harness import restored_replacements
from sparksched.record.build import build_request, build_scheduler
from sparksched.record.events import (
    Arrive,
    End,
    Ready,
    Step,
)
from sparksched.record.recorder import Recorder, record
from sparksched.record.settings import UnrecordableError
from sparksched.verify.copies import block_hasher_of_vllm
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput

from testkit.worlds.draw import draw_configuration
from testkit.worlds.world import build_world, vllm_environment

from .samples import BLOCK_SIZE, ENDED, arrival, settings
from .scenarios import events, record_scenario, replayed

__all__ = ["warnings_of_sparksched"]


def request(hasher: Any = None, num_tokens: int = 9, **changed: Any) -> Any:
    return build_request(arrival(0, num_tokens, **changed), [1] * num_tokens, hasher)


@pytest.mark.parametrize("error", [None, ValueError("no grammar")], ids=["compiled", "failed"])
def test_a_grammar_that_is_compiled_in_the_middle_of_a_step(
    error: ValueError | None, tmp_path: Path
) -> None:
    """Scheduler and recorder see it from the same step on, or its failure."""
    path = tmp_path / "trace"
    scheduler = build_scheduler("vllm", settings())
    compiling: Future[object] = Future()
    schedule = scheduler.schedule

    def schedule_while_it_is_compiled(throttle_prefills: bool = False) -> Any:
        if not compiling.done() and error is None:
            compiling.set_result(object())
        elif not compiling.done():
            compiling.set_exception(error)
        return schedule(throttle_prefills)

    scheduler.schedule = schedule_while_it_is_compiled
    Recorder(scheduler, path)
    structured = request(block_hasher_of_vllm(scheduler.vllm_config, BLOCK_SIZE), has_grammar=True)
    structured.structured_output_request.grammar = compiling
    scheduler.add_request(structured)
    sizes = [len(scheduler.schedule().num_scheduled_tokens) for _ in range(2)]
    scheduler.shutdown()
    assert sizes == [0, int(error is None)]
    assert [type(event) for event in events(path)] == [Arrive, Step, Ready, Step, End]
    assert replayed(path, "sparksched").mismatch is None


def test_a_scheduler_that_nobody_shuts_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its recording ends when it is gone, or with the program that has it in its own process."""
    monkeypatch.setenv("SPARKSCHED_RECORD", str(tmp_path / "trace"))
    scheduler = build_scheduler("vllm", settings())
    with restored_replacements():
        record(scheduler)
    scheduler.schedule()
    del scheduler
    gc.collect()
    assert [type(event) for event in events(tmp_path / "trace")] == [Step, End]


# ----------------------------------------------------------------------------------------
# Disks that hang
# ----------------------------------------------------------------------------------------


@pytest.fixture(name="disk")
def _disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Have the writer's thread wait for the disk, from its first turn on, until an event."""
    disk = SimpleNamespace(is_waited_for=threading.Event(), goes_on=threading.Event())
    write = os.write

    def write_late(descriptor: int, content: bytes) -> int:
        if threading.current_thread().name == "sparksched-recorder":
            disk.is_waited_for.set()
            disk.goes_on.wait()
        return write(descriptor, content)

    monkeypatch.setattr(os, "write", write_late)
    monkeypatch.setattr("sparksched.record.write._FLUSH_S", 0.0)
    yield disk
    disk.goes_on.set()


def test_the_end_of_an_engine_waits_once(
    disk: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not written by then is said, not waited for again."""
    scheduler = build_scheduler("vllm", settings())
    recorder = Recorder(scheduler, tmp_path / "trace")
    disk.is_waited_for.wait()
    monkeypatch.setattr("sparksched.record.write._CLOSE_S", 0.01)
    assert not recorder.close()
    assert recorder.writer.problem == "the disk has not taken all of it within 0.01 s"
    monkeypatch.setattr("sparksched.record.write._CLOSE_S", 1e6)
    scheduler.shutdown()
    disk.goes_on.set()
    recorder.writer._thread.join()
    assert [type(event) for event in events(tmp_path / "trace")] == [End]


def pauses(scheduler: Any) -> None:
    scheduler.set_pause_state(PauseState.UNPAUSED)


def long_prompts(scheduler: Any) -> None:
    scheduler.add_request(request(num_tokens=20_000))


def long_steps(scheduler: Any) -> None:
    scheduler.schedule()


@pytest.mark.parametrize(("call", "most"), [(pauses, 600), (long_prompts, 8), (long_steps, 8)])
def test_more_than_the_disk_takes(
    call: Callable[[Any], None],
    most: int,
    disk: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    warnings_of_sparksched: list[str],
) -> None:
    """What waits for the disk is bounded, in bytes, and gone with the recording."""
    monkeypatch.setattr("sparksched.record.write._MAX_BACKLOG_BYTES", 1 << 20)
    scheduler = build_scheduler("vllm", settings())
    steps = SchedulerOutput.make_empty(), SchedulerOutput.make_empty()
    for number, step in enumerate(steps):
        step.num_scheduled_tokens = {f"{number}-{row}": 1 for row in range(20_000)}
    turns = itertools.cycle(steps)
    scheduler.schedule = lambda *_: next(turns)
    scheduler.add_request = lambda _: None
    recorder = Recorder(scheduler, tmp_path / "trace")
    disk.is_waited_for.wait()
    num_calls = 0
    while recorder.writer.is_open:
        call(scheduler)
        num_calls += 1
        assert num_calls <= most
    call(scheduler)
    assert recorder.writer._notes.empty()
    reason = "the disk takes less than the engine gives"
    assert recorder.writer.problem == reason
    (warning,) = warnings_of_sparksched
    assert warning.endswith(f"serving goes on: {reason}")
    disk.goes_on.set()
    recorder.close()
    end = events(tmp_path / "trace")[-1]
    assert end == End(end.time, reason)  # type: ignore[union-attr]


# ----------------------------------------------------------------------------------------
# What a trace has no words for
# ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "feature"), [("offloading", "a KV connector"), ("ec-connector", "an EC connector")]
)
def test_configurations_without_words(name: str, feature: str, tmp_path: Path) -> None:
    configuration = draw_configuration(name, 0)
    with vllm_environment(configuration):
        world = build_world(configuration)
        scheduler: Any = SimpleNamespace(
            vllm_config=world.vllm_config, kv_cache_config=world.kv_cache_config
        )
        with pytest.raises(UnrecordableError, match=f"{feature} takes part in scheduling"):
            Recorder(scheduler, tmp_path / "trace")
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("sync-multimodal", "it has images or the like"),
        ("sync-sessions", "it is a session, whose input goes on"),
    ],
)
def test_requests_without_words(name: str, reason: str, tmp_path: Path) -> None:
    """What was recorded before them can be replayed."""
    path = tmp_path / "trace"
    record_scenario(path, name, 1, 60)
    end = events(path)[-1]
    assert isinstance(end, End)
    assert end.reason.endswith(f"can't be recorded: {reason}")
    assert end.reason != ENDED
    assert replayed(path, "sparksched").mismatch is None
