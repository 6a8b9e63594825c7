"""`SPARKSCHED_VERIFY` in vLLM's real engine: what is planted is found, either side can go on."""

import itertools
import logging
import os
import pkgutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from sparksched import _core
from sparksched.scheduler import SparkScheduler
from sparksched.trace.events import Difference, End, Update
from sparksched.trace.file import FileFullError, TraceFile
from sparksched.trace.read import History, Trace
from sparksched.trace.replay import Replay
from sparksched.trace.settings import UnrecordableError
from sparksched.verify import reproducer
from sparksched.verify.events import NotedEvents
from sparksched.verify.report import SchedulersDifferError, VerificationFailedError
from sparksched.verify.scheduler import VerifyingScheduler
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import EventPublisher, EventPublisherFactory
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import FinishReason
from vllm.v1.request import Request, RequestStatus

from testkit.device import UNRULY
from testkit.executor import engine_config

from .harness import (
    ASYNC_SCHEDULING,
    GRAMMAR_TIMEOUT_S,
    Choice,
    DrivenEngine,
    Record,
    run_both,
    running_engine,
)
from .test_engine_core import add_long_requests, arriving_in_turn, mixed_requests
from .test_structured_output import REGEX, SCHEMA, structured_request

pytestmark = pytest.mark.release

PLANTED_STEP = 8


@pytest.fixture(autouse=True)
def reproducers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder for what is recorded of differences."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    # Wait longer for the disk than a busy machine can take.
    monkeypatch.setattr("sparksched.trace.record.write._CLOSE_S", 60.0)
    return tmp_path


@pytest.fixture
def messages(model_directory: Path) -> Iterator[list[str]]:
    """Collect what sparksched logs."""
    # vLLM's loggers get new handlers with the first configuration of the process.
    engine_config(model_directory, async_scheduling=False)
    messages: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            cause = record.exc_info and record.exc_info[1]
            because = f" {cause!r}" if cause else ""
            messages.append(f"{record.levelname}: {record.getMessage()}{because}")

    handler = Collector(logging.INFO)
    logger = logging.getLogger("vllm.sparksched")
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


# ----------------------------------------------------------------------------------------
# No false alarm
# ----------------------------------------------------------------------------------------


def disturbed(engine: DrivenEngine) -> None:
    """Let requests with and without grammars be aborted, preempted and paused."""
    engine.add(structured_request("regex", [1] * 20, regex=REGEX))
    add_long_requests(engine, "stays", "aborted", "in-flight")
    engine.step(3)
    engine.add(structured_request("json", [4] * 60, json=SCHEMA))
    engine.core.abort_requests(["aborted", "unknown"])
    engine.step(2)
    engine.core.aborts_queue.put_nowait(["in-flight", "stays", "in-flight"])
    engine.step()
    engine.note(engine.core.reset_prefix_cache(reset_running_requests=True))
    engine.core.pause_scheduler(mode="keep")
    engine.step(2)
    engine.core.resume_scheduler()
    for request in mixed_requests(8):
        engine.add(request)
    engine.run()


@ASYNC_SCHEDULING
@pytest.mark.parametrize("scenario", [arriving_in_turn, disturbed])
def test_engines_that_agree(
    scenario: Callable[[DrivenEngine], None],
    async_scheduling: bool,
    model_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    messages: list[str],
) -> None:
    monkeypatch.setenv("SPARKSCHED_VERIFY", "stop")
    run_both(
        scenario,
        model_directory,
        async_scheduling=async_scheduling,
        num_gpu_blocks_override=48,
        scheduler_reserve_full_isl=False,
        strict=True,
    )
    assert any("verifies each step" in message for message in messages)
    assert any("steps verified, no difference" in message for message in messages)


@pytest.mark.parametrize("ids", [lambda it: it.keys(), lambda it: iter(list(it))])
def test_ids_that_can_be_read_once(
    ids: Callable[[dict[str, Request]], Any], model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARKSCHED_VERIFY", "stop")
    with running_engine(Choice.PLUGIN, model_directory, async_scheduling=True) as engine:
        add_long_requests(engine, "first", "second")
        engine.step(3)
        scheduler = engine.core.scheduler
        ended = scheduler.finish_requests(ids(scheduler.requests), RequestStatus.FINISHED_ABORTED)
        assert {request.request_id for request in ended} == {"first", "second"}
        engine.run()


# ----------------------------------------------------------------------------------------
# Planted differences
# ----------------------------------------------------------------------------------------


class PlantedCore:
    """A core that decides as the one it holds, but for one step."""

    def __init__(
        self,
        core: Any,
        plant: Callable[["PlantedCore", Any], Any],
        call: str,
        step: int = PLANTED_STEP,
    ) -> None:
        self.core = core
        self._step = step
        self._plant = plant
        self._call = call
        self._num_calls = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.core, name)
        if name != self._call:
            return method

        def planted(*arguments: Any) -> Any:
            self._num_calls += 1
            result = method(*arguments)
            return self._plant(self, result) if self._num_calls == self._step else result

        return planted


def other_block(_: PlantedCore, output: SchedulerOutput) -> SchedulerOutput:
    output.scheduled_new_reqs[0].block_ids[0][0] += 1
    return output


def fewer_tokens(_: PlantedCore, output: SchedulerOutput) -> SchedulerOutput:
    output.num_scheduled_tokens[next(reversed(output.num_scheduled_tokens))] -= 1
    return output


def failure(_: PlantedCore, output: SchedulerOutput) -> SchedulerOutput:
    raise RuntimeError("the core is broken")


def other_token(_: PlantedCore, outputs: dict[int, Any]) -> dict[int, Any]:
    outputs[0].outputs[0].new_token_ids[0] ^= 1
    return outputs


def earlier_end(_: PlantedCore, outputs: dict[int, Any]) -> dict[int, Any]:
    outputs[0].outputs[0].finish_reason = FinishReason.STOP
    return outputs


def lost_statistics(_: PlantedCore, outputs: dict[int, Any]) -> dict[int, Any]:
    outputs[0].scheduler_stats.num_running_reqs += 1
    return outputs


def forgotten_abort(_: PlantedCore, ended: list[Request]) -> list[Request]:
    return ended[1:]


PLANTS: dict[str, tuple[Any, str, str]] = {
    "block": (other_block, "schedule", "scheduled_new_reqs[0].block_ids[0][0]"),
    "tokens": (fewer_tokens, "schedule", "schedule().num_scheduled_tokens['request-"),
    "failure": (failure, "schedule", "error of schedule()"),
    "token": (other_token, "update_from_output", "outputs[0].new_token_ids[0]"),
    "end": (earlier_end, "update_from_output", "outputs[0].finish_reason"),
    "statistics": (lost_statistics, "update_from_output", "scheduler_stats.num_running_reqs"),
    "abort": (forgotten_abort, "finish_requests", "finish_requests()"),
}
EACH_PLANT = pytest.mark.parametrize("plant", PLANTS)


def with_aborts(engine: DrivenEngine) -> None:
    """Add a few requests at each step, some of which are aborted."""
    requests = mixed_requests()
    engine.add(structured_request("regex", [1] * 20, regex=REGEX))
    for number in range(0, len(requests), 2):
        for request in requests[number : number + 2]:
            engine.add(request)
        engine.core.abort_requests([f"request-{number}", f"request-{number + 1}"][: number % 3])
        engine.step()
    engine.run()


def run_with_plant(
    plant: str,
    goes_on: str,
    model_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    **settings: Any,
) -> Record:
    monkeypatch.setenv("SPARKSCHED_VERIFY", goes_on)
    change, call, _ = PLANTS[plant]
    with running_engine(Choice.PLUGIN, model_directory, strict=True, **settings) as engine:
        scheduler = engine.core.scheduler
        assert type(scheduler) is VerifyingScheduler
        scheduler._core = PlantedCore(scheduler._core, change, call)
        try:
            with_aborts(engine)
        finally:
            # What the real core holds is what is closed.
            scheduler._core = scheduler._core.core
    return engine.record


def differences_in(messages: list[str]) -> list[str]:
    return [message for message in messages if message.startswith("ERROR: ")]


@EACH_PLANT
@ASYNC_SCHEDULING
def test_the_engine_stops(
    plant: str,
    async_scheduling: bool,
    model_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    messages: list[str],
) -> None:
    with pytest.raises(SchedulersDifferError) as error:
        run_with_plant(
            plant, "stop", model_directory, monkeypatch, async_scheduling=async_scheduling
        )
    assert PLANTS[plant][2] in str(error.value)
    (message,) = differences_in(messages)
    assert str(error.value).split(" (SPARKSCHED")[0] in message
    assert not any("no difference" in message for message in messages)


@EACH_PLANT
@ASYNC_SCHEDULING
def test_vllm_goes_on(
    plant: str,
    async_scheduling: bool,
    model_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    messages: list[str],
) -> None:
    """Nobody notices: it is as if vLLM's scheduler had decided from the beginning."""
    record = run_with_plant(
        plant, "vllm", model_directory, monkeypatch, async_scheduling=async_scheduling
    )
    with running_engine(Choice.STOCK, model_directory, async_scheduling=async_scheduling) as stock:
        with_aborts(stock)
    assert record.tokens == stock.record.tokens
    assert record.steps == stock.record.steps
    assert record.bitmasks == stock.record.bitmasks
    assert record.outputs == stock.record.outputs
    (message,) = differences_in(messages)
    assert PLANTS[plant][2] in message
    assert message.endswith("going on with vLLM's own scheduler.")
    assert any("nobody looks any more whether the queue moves" in it for it in messages)


class BrokenCore:
    """A core after a panic: it takes no calls."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name}: the core is broken")


@ASYNC_SCHEDULING
def test_vllm_goes_on_without_ours(
    async_scheduling: bool, model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARKSCHED_VERIFY", "vllm")
    with running_engine(
        Choice.PLUGIN, model_directory, async_scheduling=async_scheduling
    ) as engine:
        add_long_requests(engine, "first")
        engine.step(3)
        scheduler = engine.core.scheduler
        core, scheduler._core = scheduler._core, BrokenCore()
        disturbed(engine)
        scheduler.encode_outputs_for(0)
        scheduler.make_stats()
        scheduler.reset_encoder_cache()
        assert (scheduler.requests, scheduler.running, scheduler.waiting) == ({}, [], [])
        assert not scheduler.has_request("first")
        scheduler._core = core
    assert engine.record.finish_reasons["first"] == FinishReason.LENGTH
    assert engine.record.finish_reasons["regex"] == FinishReason.STOP


@pytest.mark.parametrize("goes_on", ["vllm", "sparksched"])
def test_metrics_say_who_goes_on(
    goes_on: str, model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARKSCHED_VERIFY", goes_on)
    meters = _core.EngineMeters(1)
    reader = _core.MeterReader(pid=os.getpid(), fd=meters.fileno(), id=1)
    with running_engine(Choice.PLUGIN, model_directory, async_scheduling=False) as engine:
        engine.core.scheduler.report_to(meters)
        add_long_requests(engine, "first")
        engine.step(3)
        assert reader.steps()["num_running"] == 1
        assert not reader.steps_have_ended()
        # From here on the schedulers differ.
        SparkScheduler.set_pause_state(engine.core.scheduler, PauseState.PAUSED_ALL)
        engine.step(2)
        found = reader.steps_have_ended(), reader.steps() is None
        engine.core.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert found == (goes_on == "vllm", goes_on == "vllm")


@ASYNC_SCHEDULING
@pytest.mark.parametrize("goes_on", ["1", "sparksched"])
def test_ours_goes_on(
    goes_on: str,
    async_scheduling: bool,
    model_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    messages: list[str],
) -> None:
    """The executor's model looks at no block."""
    record = run_with_plant(
        "block", goes_on, model_directory, monkeypatch, async_scheduling=async_scheduling
    )
    with running_engine(Choice.STOCK, model_directory, async_scheduling=async_scheduling) as stock:
        with_aborts(stock)
    assert record.outputs == stock.record.outputs
    differing = [
        number
        for number, (ours, theirs) in enumerate(
            zip(record.steps, stock.record.steps, strict=True), start=1
        )
        if ours != theirs
    ]
    assert differing == [PLANTED_STEP]
    (message,) = differences_in(messages)
    first = record.steps[PLANTED_STEP - 1].scheduled_new_reqs[0]
    block_id = first.block_ids[0][0]
    assert f"in step {PLANTED_STEP - 1} at schedule()" in message
    assert f"(request {first.req_id!r})" in message
    assert f"vLLM's has {block_id - 1}, sparksched's {block_id};" in message
    assert message.endswith("going on with sparksched's scheduler, without verification.")


@ASYNC_SCHEDULING
@pytest.mark.parametrize("goes_on", ["1", "vllm"])
def test_what_reproduces_a_difference(
    goes_on: str,
    async_scheduling: bool,
    model_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    messages: list[str],
    reproducers: Path,
) -> None:
    run_with_plant(
        "block", goes_on, model_directory, monkeypatch, async_scheduling=async_scheduling
    )
    monkeypatch.delenv("SPARKSCHED_VERIFY")
    (message,) = differences_in(messages)
    (path,) = reproducers.glob("sparksched-verify-*.trace")
    assert f"its recording will be at {path};" in message
    assert any(it.endswith(f"to see it again: sparksched replay {path}") for it in messages)
    assert path.stat().st_mode & 0o777 == 0o600
    (difference,) = [event for event in Trace(path).events() if isinstance(event, Difference)]
    assert difference.text in message
    for scheduler in ("vllm", "sparksched"):  # neither decides what was planted
        assert step_that_differs(path, scheduler) == PLANTED_STEP - 1


# ----------------------------------------------------------------------------------------
# What verification itself does wrong
# ----------------------------------------------------------------------------------------

OF_NEITHER_SCHEDULER = [
    "scheduler.difference_of_outputs",
    "scheduler.first_difference",
    "scheduler.copy_of_runner_output",
    "shadow.copy_of_request",
    "shadow.take_over_changes",
    "shadow.Shadow.pair",
    "report.note_progress",
]
EACH_OF_THESE = pytest.mark.parametrize("broken", OF_NEITHER_SCHEDULER)


def break_later(monkeypatch: pytest.MonkeyPatch, function: str, call: int = 5) -> None:
    """Have a function of verification fail from one call on."""
    path = f"sparksched.verify.{function}"
    works, numbers = pkgutil.resolve_name(path), itertools.count(1)

    def break_down(*arguments: Any, **settings: Any) -> Any:
        if next(numbers) >= call:
            raise RecursionError("broken")
        return works(*arguments, **settings)

    monkeypatch.setattr(path, break_down)


@EACH_OF_THESE
@pytest.mark.parametrize("goes_on", ["1", "vllm"])
def test_ours_goes_on_without_verification(
    goes_on: str,
    broken: str,
    model_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    messages: list[str],
    reproducers: Path,
) -> None:
    with running_engine(Choice.STOCK, model_directory, async_scheduling=True) as stock:
        disturbed(stock)
    monkeypatch.setenv("SPARKSCHED_VERIFY", goes_on)
    with running_engine(Choice.PLUGIN, model_directory, async_scheduling=True) as engine:
        break_later(monkeypatch, broken)
        disturbed(engine)
        assert engine.core.scheduler._shadow is None
    assert engine.record.outputs == stock.record.outputs
    (message,) = differences_in(messages)
    assert "verification has failed: going on with sparksched's scheduler" in message
    assert not any("no difference" in it for it in messages)
    assert list(reproducers.iterdir()) == []


@EACH_OF_THESE
def test_an_engine_stops_that_can_not_be_verified(
    broken: str, model_directory: Path, monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    monkeypatch.setenv("SPARKSCHED_VERIFY", "stop")
    with running_engine(Choice.PLUGIN, model_directory, async_scheduling=True) as engine:
        break_later(monkeypatch, broken)
        with pytest.raises(VerificationFailedError):
            disturbed(engine)
    (message,) = differences_in(messages)
    assert "verification has failed: stopping the engine" in message


@pytest.mark.parametrize("broken", ["report.describe", "reproducer.Reproducer.keep"])
def test_a_difference_that_can_not_be_told(
    broken: str, model_directory: Path, monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    """It was found nevertheless."""
    break_later(monkeypatch, broken, call=1)
    record = run_with_plant("block", "vllm", model_directory, monkeypatch, async_scheduling=False)
    with running_engine(Choice.STOCK, model_directory, async_scheduling=False) as stock:
        with_aborts(stock)
    assert record.outputs == stock.record.outputs
    failure, difference = differences_in(messages)
    assert failure.endswith("RecursionError('broken')")
    assert PLANTS["block"][2] in difference


def test_vllm_can_not_take_over(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    break_later(monkeypatch, "shadow.Shadow.take_over", call=1)
    record = run_with_plant("block", "vllm", model_directory, monkeypatch, async_scheduling=False)
    assert record.finish_reasons
    (message,) = differences_in(messages)
    assert "verification has failed: going on with sparksched's scheduler" in message


Batch = tuple[Any, ...]


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """Collect the KV cache events that leave an engine."""
    batches: list[Batch] = []

    def publish(batch: Any) -> None:
        batches.append(tuple(batch.events))

    publisher = mock.Mock(spec=EventPublisher)
    publisher.publish.side_effect = publish
    monkeypatch.setattr(EventPublisherFactory, "create", lambda *_: publisher)
    return batches


@pytest.mark.parametrize("plant", [None, "block"])
@pytest.mark.parametrize("goes_on", ["vllm", "sparksched"])
def test_events_are_of_the_side_that_is_followed(
    goes_on: str,
    plant: str | None,
    model_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    published: list[Batch],
) -> None:
    """Also in the call that differs, and each is published once."""
    config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    settings: Any = {"async_scheduling": False, "kv_events_config": config}
    with running_engine(Choice.STOCK, model_directory, **settings) as stock:
        with_aborts(stock)
    expected, published[:] = list(published), []
    monkeypatch.setenv("SPARKSCHED_VERIFY", goes_on)
    with running_engine(Choice.PLUGIN, model_directory, **settings) as engine:
        scheduler = engine.core.scheduler
        if plant is not None:
            lose_events(scheduler, batch=PLANTED_STEP)
        with_aborts(engine)
        assert scheduler._is_over == (plant is not None)
    if plant is not None and goes_on == "sparksched":
        expected[PLANTED_STEP - 1] = ()
    assert published == expected


def lose_events(scheduler: Any, batch: int) -> None:
    """Have our side publish nothing of what one batch should have."""
    noted, numbers = scheduler._events, itertools.count(1)

    def publish(events: Any) -> None:
        if next(numbers) == batch:
            events.events = []
        NotedEvents.publish(noted, events)

    noted.publish = publish


@pytest.fixture
def hung_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Have the recorder's thread wait for the disk until the event."""
    goes_on = threading.Event()
    write = os.write

    def write_late(descriptor: int, content: bytes) -> int:
        if threading.current_thread().name == "sparksched-recorder":
            goes_on.wait()
        return write(descriptor, content)

    monkeypatch.setattr(os, "write", write_late)
    yield goes_on
    goes_on.set()


def test_a_disk_that_hangs(
    hung_disk: threading.Event,
    model_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    messages: list[str],
    reproducers: Path,
) -> None:
    """The engine serves on; the recording is there once the disk is."""
    monkeypatch.setenv("SPARKSCHED_VERIFY", "vllm")
    with running_engine(Choice.PLUGIN, model_directory, async_scheduling=False) as engine:
        scheduler = engine.core.scheduler
        core = scheduler._core
        scheduler._core = PlantedCore(core, other_block, "schedule")
        with_aborts(engine)
        scheduler._core = core
        (message,) = differences_in(messages)
        assert "its recording will be at" in message
        assert list(reproducers.iterdir()) == []
        hung_disk.set()
    monkeypatch.delenv("SPARKSCHED_VERIFY")
    (path,) = reproducers.iterdir()
    assert step_that_differs(path, "vllm") == PLANTED_STEP - 1


def step_that_differs(path: Path, scheduler: str) -> int | None:
    """Replay a recording on a scheduler; return the first step that it decides differently."""
    trace = Trace(path)
    replay = Replay(scheduler, trace.settings, History(trace.settings, trace.events()))
    for event in trace.events():
        if not replay.is_over:
            replay.play(event)
    replay.shutdown()
    return replay.outcome.mismatch and replay.outcome.mismatch.step


def test_nothing_is_left_without_a_difference(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, reproducers: Path
) -> None:
    monkeypatch.setenv("SPARKSCHED_VERIFY", "1")
    with running_engine(Choice.PLUGIN, model_directory, async_scheduling=False) as engine:
        arriving_in_turn(engine)
        # Nor while the engine runs, which may be killed.
        assert list(reproducers.iterdir()) == []
    assert list(reproducers.iterdir()) == []


def test_ours_goes_on_and_nothing_is_kept(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARKSCHED_VERIFY", "1")
    with running_engine(Choice.PLUGIN, model_directory, async_scheduling=False) as engine:
        scheduler = engine.core.scheduler
        scheduler._core = PlantedCore(scheduler._core, other_block, "schedule", step=1)
        disturbed(engine)
        assert scheduler._shadow is None
        assert not scheduler.structured_output_manager.answers
        scheduler._core = scheduler._core.core


def test_one_recording_is_enough(
    model_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    messages: list[str],
    reproducers: Path,
) -> None:
    path = reproducers / "asked-for.trace"
    monkeypatch.setenv("SPARKSCHED_VERIFY", "1")
    monkeypatch.setenv("SPARKSCHED_RECORD", str(path))
    with running_engine(Choice.PLUGIN, model_directory, async_scheduling=True) as engine:
        disturbed(engine)
    monkeypatch.delenv("SPARKSCHED_VERIFY")
    assert not differences_in(messages)
    assert list(reproducers.iterdir()) == [path]
    for scheduler in ("vllm", "sparksched"):
        assert step_that_differs(path, scheduler) is None


def test_a_recording_goes_on_with_vllm(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, reproducers: Path
) -> None:
    """What grammars answer vLLM's scheduler is in it, and so is its end, before executors end."""
    path = reproducers / "asked-for.trace"
    monkeypatch.setenv("SPARKSCHED_VERIFY", "vllm")
    monkeypatch.setenv("SPARKSCHED_RECORD", str(path))
    with running_engine(Choice.PLUGIN, model_directory, async_scheduling=True) as engine:
        scheduler = engine.core.scheduler
        core = scheduler._core
        scheduler._core = PlantedCore(core, fewer_tokens, "schedule", step=2)
        add_long_requests(engine, "stays")
        engine.step(4)
        assert scheduler._vllm_decides
        engine.add(structured_request("unruly", [UNRULY] * 20, regex=REGEX))
        engine.run()
        scheduler._core = core
        scheduler.sparksched_at_the_end()
        assert isinstance([*Trace(path).events()][-1], End)
    monkeypatch.delenv("SPARKSCHED_VERIFY")
    assert any(event.rejected for event in Trace(path).events() if isinstance(event, Update))
    assert step_that_differs(path, "vllm") is None


def test_a_recording_that_is_full(
    model_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    messages: list[str],
    reproducers: Path,
) -> None:
    """Verification goes on, and finds the difference; there is no file that lacks it."""
    monkeypatch.setattr("sparksched.trace.file.TraceFile.flush", full_file)
    record = run_with_plant("block", "vllm", model_directory, monkeypatch, async_scheduling=False)
    assert record.finish_reasons
    assert len(differences_in(messages)) == 1
    assert (
        "WARNING: sparksched: the recording of the difference is lost: "
        "the file has reached its size"
    ) in messages
    assert list(reproducers.iterdir()) == []


def full_file(_file: TraceFile) -> None:
    raise FileFullError("the file has reached its size")


def test_a_grammar_that_is_compiled_between_two_looks(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours looks first, and vLLM's believes that."""
    monkeypatch.setenv("SPARKSCHED_VERIFY", "stop")
    # A recording would hide it until the next step.
    monkeypatch.setattr(reproducer, "Recorder", mock.Mock(side_effect=UnrecordableError))
    with running_engine(Choice.PLUGIN, model_directory, async_scheduling=False) as engine:
        late = add_with_pending_grammar(engine, "late")
        add_long_requests(engine, "free")
        scheduler = engine.core.scheduler

        def compile_grammar(_: PlantedCore, output: SchedulerOutput) -> SchedulerOutput:
            late()
            return output

        scheduler._core = PlantedCore(scheduler._core, compile_grammar, "schedule")
        engine.run()
    assert engine.record.finish_reasons["late"] == FinishReason.STOP


def add_with_pending_grammar(engine: DrivenEngine, name: str) -> Callable[[], None]:
    """Add a request whose grammar is compiled when the function that is returned is called."""
    request, wave = engine.core.preprocess_add_request(
        structured_request(name, [len(name)] * 20, regex=REGEX)
    )
    structured = request.structured_output_request
    wait([structured._grammar], timeout=GRAMMAR_TIMEOUT_S)
    pending: Future[Any] = Future()
    compiled, structured._grammar = structured._grammar.result(), pending
    engine.core.add_request(request, wave)
    return lambda: pending.set_result(compiled)


def test_grammars_that_are_compiled_after_a_difference(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recording, which hides them until the next step, is over."""
    monkeypatch.setenv("SPARKSCHED_VERIFY", "vllm")
    with running_engine(Choice.PLUGIN, model_directory, async_scheduling=False) as engine:
        compile_grammar = add_with_pending_grammar(engine, "late")
        add_long_requests(engine, "free")
        engine.step(2)
        scheduler = engine.core.scheduler
        # From here on the schedulers differ.
        SparkScheduler.set_pause_state(scheduler, PauseState.PAUSED_ALL)
        engine.step(2)
        compile_grammar()
        engine.run()
    assert engine.record.finish_reasons["late"] == FinishReason.STOP


def test_a_grammar_that_went_on_without_vllm(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    """It can't go back: its request ends with an error, others go on."""
    monkeypatch.setenv("SPARKSCHED_VERIFY", "vllm")
    with running_engine(
        Choice.PLUGIN, model_directory, async_scheduling=False, strict=True
    ) as engine:
        engine.add(structured_request("astray", [1] * 20, regex=REGEX))
        engine.step(2)
        engine.add(structured_request("regex", [2] * 20, regex=REGEX))
        engine.step(2)
        scheduler = engine.core.scheduler
        request = SparkScheduler.requests.fget(scheduler)["astray"]
        scheduler.structured_output_manager.accept_tokens(request, [66])
        engine.run()
    assert engine.record.finish_reasons == {
        "astray": FinishReason.ERROR,
        "regex": FinishReason.STOP,
    }
    (message,) = differences_in(messages)
    assert "question to a grammar in" in message
