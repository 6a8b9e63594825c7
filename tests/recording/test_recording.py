"""What surrounds a recorder: grammars that other threads compile, and what is refused by name."""

from __future__ import annotations

import stat
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from differential.world import build_world, draw_configuration, vllm_environment
from sparksched.trace import rebuild, writer
from sparksched.trace.events import Arrive, Difference, End, Event, Ready, Step
from sparksched.trace.history import History
from sparksched.trace.reader import Trace
from sparksched.trace.recorder import Recorder
from sparksched.trace.recording import attach
from sparksched.trace.settings import UnrecordableError
from vllm.v1.request import RequestStatus

from .samples import arrival, settings
from .scenarios import events, record_scenario, replay


def record_player(path: Path) -> tuple[Any, Recorder]:
    """Return vLLM's scheduler with a recorder."""
    player = rebuild.build_player("vllm", settings())
    config = player.scheduler.vllm_config
    recorder = Recorder(path, config, player.scheduler.kv_cache_config, 4, scheduler="Scheduler")
    return player.scheduler, recorder


def request(**changed: Any) -> Any:
    history = History(settings(), [arrival(0, 9, False, **changed)])
    return rebuild.RequestBuilder(settings(), history).build(0)


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


def test_more_than_the_disk_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for the disk is bounded."""
    monkeypatch.setattr(writer, "_MAX_BACKLOG", 100)
    _, recorder = record_player(tmp_path / "trace")
    for _ in range(10_000):
        recorder.set_pause_state(0)
        if not recorder.is_recording:
            break
    assert not recorder.is_recording
    recorder.close()
    (*others, end) = events(tmp_path / "trace")
    assert len(others) >= 100
    assert end == End(end.time, "the disk takes less than the engine gives")  # type: ignore[union-attr]


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
