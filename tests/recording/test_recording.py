"""What surrounds a recorder: grammars that other threads compile, and what is refused by name."""

from __future__ import annotations

import gc
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from engine.conftest import warnings_of_sparksched
from engine.harness import restored_replacements
from sparksched.trace.build import RequestBuilder, build_player
from sparksched.trace.events import Arrive, Difference, End, Event, Ready, Step, Update
from sparksched.trace.file import TraceFile
from sparksched.trace.read import History, Trace
from sparksched.trace.record.attach import attach, record
from sparksched.trace.record.copy_calls import Recorder
from sparksched.trace.settings import UnrecordableError
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from testkit.worlds.draw import draw_configuration
from testkit.worlds.world import build_world, vllm_environment

from .mutations import frames
from .samples import arrival, settings
from .scenarios import events, record_scenario, replay

__all__ = ["warnings_of_sparksched"]


def record_player(path: Path) -> tuple[Any, Recorder]:
    """Return vLLM's scheduler with a recorder."""
    player = build_player("vllm", settings())
    config = player.scheduler.vllm_config
    recorder = Recorder(path, config, player.scheduler.kv_cache_config, 4, scheduler="Scheduler")
    return player.scheduler, recorder


def request(number: int = 0, **changed: Any) -> Any:
    arrivals = [arrival(it, 9, False, **changed) for it in range(number + 1)]
    return RequestBuilder(settings(), History(settings(), arrivals)).build(number)


def test_a_grammar_that_is_compiled_in_the_middle_of_a_step(tmp_path: Path) -> None:
    """Scheduler and recorder see it from the same step on."""
    scheduler, recorder = record_player(tmp_path / "trace")
    compiling: Future[object] = Future()
    schedule = scheduler.schedule

    def schedule_while_it_is_compiled(throttle_prefills: bool = False) -> Any:
        if not compiling.done():
            compiling.set_result(object())
        return schedule(throttle_prefills)

    scheduler.schedule = schedule_while_it_is_compiled
    attach(recorder, scheduler)
    structured = request(has_grammar=True)
    structured.structured_output_request.grammar = compiling
    scheduler.add_request(structured)
    sizes = [len(scheduler.schedule().num_scheduled_tokens) for _ in range(2)]
    scheduler.shutdown()
    assert sizes == [0, 1]
    kinds = [type(event) for event in events(tmp_path / "trace")]
    assert kinds == [Arrive, Step, Ready, Step, End]
    assert replay(tmp_path / "trace", "sparksched").mismatch is None


def test_drafts_that_the_model_runner_has_dropped(tmp_path: Path) -> None:
    """It may do so before drafts come for the rest of the step."""
    _, recorder = record_player(tmp_path / "trace")
    step = SchedulerOutput.make_empty()
    for number in range(2):
        recorder.add_request(request(number))
        step.num_scheduled_tokens[f"request-{number}"] = 2
        step.scheduled_spec_decode_tokens[f"request-{number}"] = [-1]
    recorder.schedule(step, 0.0)
    del step.scheduled_spec_decode_tokens["request-1"]
    recorder.update_draft_token_ids_in_output(DraftTokenIds(["request-0"], [[5]]), step)
    ids = list(step.num_scheduled_tokens)
    rows = {request_id: row for row, request_id in enumerate(ids)}
    recorder.update_from_output(step, ModelRunnerOutput(ids, rows, [[6], [6]]))
    recorder.close()
    (update,) = [event for event in events(tmp_path / "trace") if isinstance(event, Update)]
    assert update.num_drafts == [1, 0]


def prompted(number: int, prompt: list[int]) -> Any:
    """Return a request that generates ten tokens."""
    fields = {"prompt": prompt, "max_tokens": 10}
    arrivals = [arrival(it, len(prompt), True, **fields) for it in range(number + 1)]
    history = History(settings(has_tokens=True), arrivals)
    return RequestBuilder(settings(has_tokens=True), history).build(number)


def serve(scheduler: Any, served: Any) -> None:
    """Serve a request alone."""
    scheduler.add_request(served)
    while not served.is_finished():
        step = scheduler.schedule()
        ids = list(step.num_scheduled_tokens)
        rows = {request_id: row for row, request_id in enumerate(ids)}
        tokens = [[served.num_tokens] for _ in ids]
        scheduler.update_from_output(step, ModelRunnerOutput(ids, rows, tokens))


def test_a_file_that_ends_behind_any_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step depends on what comes later, such as the keys of outputs that a prompt contains."""
    monkeypatch.setattr("sparksched.trace.file._WRITTEN_FRAME_BYTES", 1)
    path = tmp_path / "trace"
    scheduler, recorder = record_player(path)
    attach(recorder, scheduler)
    first = prompted(0, [1] * 9)
    serve(scheduler, first)
    serve(scheduler, prompted(1, list(first.all_token_ids)))
    scheduler.shutdown()
    steps = [event for event in events(path) if isinstance(event, Step)]
    assert [hit for step in steps for _, hit, _ in step.new] == [0, 16]
    content = path.read_bytes()
    ends = [position for position, _ in frames(content)]
    assert len(ends) > len(steps)
    for end in ends[1:]:
        path.write_bytes(content[:end])
        assert replay(path, "vllm", lacks_end=True).mismatch is None, end


def test_a_difference_is_kept(tmp_path: Path) -> None:
    _, recorder = record_player(tmp_path / "trace")
    recorder.difference("one block more")
    recorder.close()
    (difference, end) = events(tmp_path / "trace")
    assert isinstance(difference, Difference)
    assert difference.text == "one block more"
    assert isinstance(end, End)
    assert stat.S_IMODE((tmp_path / "trace").stat().st_mode) == 0o600


def test_nothing_is_left_of_a_recorder_that_was_closed(tmp_path: Path) -> None:
    scheduler, recorder = record_player(tmp_path / "trace")
    attach(recorder, scheduler)
    scheduler.add_request(request())
    scheduler.schedule()
    recorder.close()
    assert "sparksched-recorder" not in {thread.name for thread in threading.enumerate()}
    size = (tmp_path / "trace").stat().st_size
    # The scheduler goes on, and so does whoever calls it.
    assert not recorder.is_recording
    scheduler.schedule()
    scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    assert (tmp_path / "trace").stat().st_size == size


def test_a_scheduler_that_nobody_shuts_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its recording ends when it is gone, or with the program that has it in its own process."""
    monkeypatch.setenv("SPARKSCHED_RECORD", str(tmp_path / "trace"))
    scheduler = build_player("vllm", settings()).scheduler
    with restored_replacements():
        record(scheduler, scheduler.vllm_config, scheduler.kv_cache_config, 4)
    scheduler.schedule()
    del scheduler
    gc.collect()
    assert [type(event) for event in events(tmp_path / "trace")] == [Step, End]


class HungDisk:
    """A disk that the writer's thread waits for."""

    def __init__(self) -> None:
        self.is_waited_for = threading.Event()
        self.goes_on = threading.Event()

    def flush(self, file: TraceFile, flush: Callable[[TraceFile], None]) -> None:
        self.is_waited_for.set()
        self.goes_on.wait()
        flush(file)


@pytest.fixture(name="disk")
def _disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[HungDisk]:
    disk, flush = HungDisk(), TraceFile.flush
    # The first turn of the thread goes to the disk.
    monkeypatch.setattr("sparksched.trace.record.write._FRAME_S", 0.0)
    monkeypatch.setattr(TraceFile, "flush", lambda file: disk.flush(file, flush))
    yield disk
    disk.goes_on.set()


def arrivals(num_tokens: int) -> Callable[[Recorder], None]:
    def arrive(recorder: Recorder) -> None:
        recorder.add_request(request(num_prompt_tokens=num_tokens))

    return arrive


def large_steps(recorder: Recorder) -> None:
    step = SchedulerOutput.make_empty()
    ids = [f"request-{number}" for number in range(20_000)]
    step.num_scheduled_tokens = dict.fromkeys(ids, 1)
    recorder.schedule(step, 0.0)


def steps_of_many_blocks(recorder: Recorder) -> None:
    step = SchedulerOutput.make_empty()
    step.scheduled_cached_reqs.new_block_ids = [(list(range(60_000)),)]
    recorder.schedule(step, 0.0)


def large_drafts(recorder: Recorder) -> None:
    recorder.update_draft_token_ids(DraftTokenIds(["request-0"], [[1] * 60_000]))


@pytest.mark.parametrize(
    ("call", "most"),
    [
        (lambda it: it.set_pause_state(0), 600),
        (arrivals(9), 600),
        (arrivals(20_000), 8),
        (large_steps, 8),
        (steps_of_many_blocks, 8),
        (large_drafts, 8),
    ],
    ids=["calls", "requests", "long prompts", "steps", "blocks", "drafts"],
)
def test_more_than_the_disk_takes(
    call: Callable[[Recorder], None],
    most: int,
    disk: HungDisk,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    warnings_of_sparksched: list[str],
) -> None:
    """What waits for the disk is bounded, in bytes, and gone with the recording."""
    monkeypatch.setattr("sparksched.trace.record.write._MAX_BACKLOG_BYTES", 1 << 20)
    _, recorder = record_player(tmp_path / "trace")
    disk.is_waited_for.wait()
    num_calls = 0
    while recorder.is_recording:
        call(recorder)
        num_calls += 1
        assert num_calls <= most
    assert not recorder._writer._notes
    call(recorder)
    assert not recorder._writer._notes
    reason = "the disk takes less than the engine gives"
    assert recorder.problem == reason
    (warning,) = warnings_of_sparksched
    assert warning.endswith(f"serving goes on: {reason}")
    disk.goes_on.set()
    recorder.close()
    end = events(tmp_path / "trace")[-1]
    assert end == End(end.time, reason)  # type: ignore[union-attr]


def test_what_the_disk_takes_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparksched.trace.record.write._MAX_BACKLOG_BYTES", 1 << 20)
    _, recorder = record_player(tmp_path / "trace")
    for _ in range(20):
        for _ in range(100):
            recorder.set_pause_state(0)
        while recorder._writer._notes:
            time.sleep(0.001)
    recorder.close()
    assert recorder.problem is None
    assert len(events(tmp_path / "trace")) == 2001


@pytest.mark.parametrize(
    ("name", "feature"),
    [
        ("sync-connector", "a KV connector"),
        ("offloading", "a KV connector"),
        ("ec-connector", "an EC connector"),
    ],
)
def test_configurations_without_words(name: str, feature: str, tmp_path: Path) -> None:
    configuration = draw_configuration(name, 0)
    with vllm_environment(configuration):
        world = build_world(configuration)
        with pytest.raises(UnrecordableError, match=f"{feature} takes part in scheduling"):
            Recorder(tmp_path / "trace", world.vllm_config, world.kv_cache_config, 16)
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
    found: list[Event] = events(path)
    assert isinstance(found[-1], End)
    assert found[-1].reason.endswith(f"can't be recorded: {reason}")
    assert Trace(path).settings.scheduler == "SparkScheduler"
    assert replay(path, "sparksched").mismatch is None
