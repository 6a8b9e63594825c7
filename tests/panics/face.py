"""Calls each entry point of the extension, by itself, while it panics: in a child process."""

import contextlib
import functools
import os
import re
import uuid
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
from sparksched import _core
from sparksched.engine.encoder import PartEncoder
from unit.bare_core import (
    NONE_HASH,
    build_core,
    build_request,
    callbacks,
    core_config,
    runner_output,
)
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.request import RequestStatus

ABORTED = RequestStatus.FINISHED_ABORTED

SCHEDULER_CALLS: dict[str, Callable[[Any], object]] = {
    "__new__": lambda core: _core.SchedulerCore(core_config(), **callbacks()),
    "set_none_hash": lambda core: core.set_none_hash(NONE_HASH),
    "add_request": lambda core: core.add_request(build_request("b"), 1.0),
    "is_waiting_for_input": lambda core: core.is_waiting_for_input("a"),
    "continue_session": lambda core: core.continue_session("a", lambda *_: None),
    "pace": lambda core: core.pace(0.15, 0.5, 512, None),
    "warm_up_pacing": lambda core: core.warm_up_pacing(True),
    "set_pacing_time": lambda core: core.set_pacing_time(1.0),
    "pacing": lambda core: core.pacing(),
    "knobs": lambda core: core.knobs(),
    "chosen_knobs": lambda core: core.chosen_knobs(),
    "schedule": lambda core: core.schedule(False, 1.0),
    "decide": lambda core: core.decide(False, 1.0),
    "update_after_schedule": lambda core: core.update_after_schedule(core.decide(False, 1.0)),
    "block_ids": lambda core: core.block_ids("a"),
    "update_from_output": lambda core: core.update_from_output(
        step := core.schedule(False, 1.0), runner_output(step)
    ),
    "update_draft_token_ids": lambda core: core.update_draft_token_ids(["a"], [[1]]),
    "valid_drafts": lambda core: core.valid_drafts("a", [1]),
    "take_expired": lambda core: core.take_expired(9.0),
    "finish_requests": lambda core: core.finish_requests(["a"], ABORTED),
    "encode_outputs_for": lambda core: core.encode_outputs_for(0),
    "preempt_running": lambda core: core.preempt_running(1.0),
    "reset_prefix_cache": lambda core: core.reset_prefix_cache(),
    "make_stats": lambda core: core.make_stats(),
    "has_requests": lambda core: core.has_requests(),
    "has_unfinished_requests": lambda core: core.has_unfinished_requests(),
    "has_finished_requests": lambda core: core.has_finished_requests(),
    "num_unfinished_requests": lambda core: core.num_unfinished_requests(),
    "request_counts": lambda core: core.request_counts(),
    "running_requests": lambda core: core.running_requests(),
    "waiting_requests": lambda core: core.waiting_requests(),
    "kv_cache_usage": lambda core: core.kv_cache_usage(),
    "num_used_blocks": lambda core: core.num_used_blocks(),
    "pause_state": lambda core: core.pause_state(),
    "set_pause_state": lambda core: core.set_pause_state(1),
    "structured_output_request_ids": lambda core: core.structured_output_request_ids({"a": 1}),
    "snapshot": lambda core: core.snapshot(),
    "check_invariants": lambda core: core.check_invariants(),
}
"""By method, on a scheduler with one request."""

READING = {
    "pacing",
    "knobs",
    "chosen_knobs",
    "__new__",
    "is_waiting_for_input",
    "block_ids",
    "has_requests",
    "has_unfinished_requests",
    "has_finished_requests",
    "num_unfinished_requests",
    "request_counts",
    "running_requests",
    "waiting_requests",
    "kv_cache_usage",
    "num_used_blocks",
    "pause_state",
    "structured_output_request_ids",
    "snapshot",
}
"""Methods of the scheduler that change nothing: it goes on after a panic in them."""

LINKS_CALLS: dict[str, Callable[[Any], object]] = {
    "is_attached": lambda rings: rings.is_attached(0),
    "is_deserted": lambda rings: rings.is_deserted,
    "send": lambda rings: rings.send(0, 0, [b"message"]),
    "send_outputs": lambda rings: rings.send_outputs(0, 0, step_outputs()),
    "backlog_bytes": lambda rings: rings.backlog_bytes(0),
    "take_back_newest": lambda rings: rings.take_back_newest(0, max_bytes=1),
    "unblock": lambda rings: rings.unblock(0),
    "close": lambda rings: rings.close(),
}
RINGS_CALLS: dict[str, Callable[[Any], object]] = {
    "__new__": lambda rings: engine_rings(),
    "name": lambda rings: rings.name,
    "receive": lambda rings: rings.receive(timeout_s=0.0),
    "interrupt": lambda rings: rings.interrupt(),
    "report_to": lambda rings: rings.report_to(_core.EngineMeters(1)),
    "is_closed": lambda rings: rings.is_closed,
    "hang_up": lambda rings: rings.hang_up(0),
}
SOCKETS_CALLS: dict[str, Callable[[Any], object]] = {
    "__new__": lambda sockets: engine_sockets(),
    "wait": lambda sockets: (sockets.close(), sockets.wait()),
}
CLIENT_CALLS: dict[str, Callable[[Any], object]] = {
    "__new__": lambda rings: client_rings("nobody"),
    "ring_bytes": lambda rings: rings.ring_bytes,
    "engine_pid": lambda rings: rings.engine_pid,
    "fileno": lambda rings: rings.fileno(),
    "receive": lambda rings: rings.receive(),
    "wait": lambda rings: rings.wait(0.0),
    "send": lambda rings: rings.send(0, [b"message"]),
    "sent_before": lambda rings: rings.sent_before(),
    "without_room_for_s": lambda rings: rings.without_room_for_s,
    "stuck_for_s": lambda rings: rings.stuck_for_s,
    "close": lambda rings: rings.close(),
}
ENDING_THE_LINK = {"receive", "wait", "send", "sent_before", "without_room_for_s", "close"}
"""What uses the rings on the client's side: nobody knows what it has left there."""

OUTPUTS_CALLS: dict[str, Callable[[Any], object]] = {
    "scheduler_stats": lambda outputs: outputs.scheduler_stats,
    "scheduler_stats=": lambda outputs: setattr(outputs, "scheduler_stats", None),
    "frames": lambda outputs: outputs.frames(),
}
METERS_CALLS: dict[str, Callable[[Any], object]] = {
    "__new__": lambda meters: _core.EngineMeters(1),
    "fileno": lambda meters: meters.fileno(),
    "time_steps": lambda meters: meters.time_steps(build_core()),
    "count_queue_timeouts": lambda meters: meters.count_queue_timeouts(1),
}
READER_CALLS: dict[str, Callable[[Any], object]] = {
    "__new__": lambda reader: meter_reader(_core.EngineMeters(1)),
    "steps": lambda reader: reader.steps(),
    "rings": lambda reader: reader.rings(),
}
OTHER_CALLS: dict[str, Callable[[], object]] = {
    "CachedBlocks.__new__": lambda: _core.CachedBlocks(),  # noqa: PLW0108 - armed when it is called
    "CachedBlocks.get_cached_block": lambda: _core.CachedBlocks().get_cached_block(b"", []),
    "NativeBlockHasher.__new__": lambda: hasher(),  # noqa: PLW0108 - defined below
    "QueueWatch.__new__": lambda: _core.QueueWatch(1.0),
    "QueueWatch.look": lambda: _core.QueueWatch(1.0).look(build_core(), 1.0),
    "read_prompt": lambda: _core.read_prompt(build_request(), extra_keys=None),
    "encode_like_scheduler": lambda: step_outputs(),  # noqa: PLW0108
    "meter_bounds_s": _core.meter_bounds_s,
    "note_fork": _core.note_fork,  # last: no rings work after it
}


def engine_rings() -> Any:
    return _core.EngineRings(
        f"panics-{uuid.uuid4()}",
        num_clients=1,
        ring_bytes=4096,
        max_idle_backlog_bytes=1 << 20,
        max_backlog_bytes=1 << 20,
        stuck_after_s=10.0,
    )


def engine_sockets() -> Any:
    return _core.EngineSockets(
        ["ipc:///nonexistent"],
        max_idle_backlog_bytes=1 << 20,
        max_backlog_bytes=1 << 20,
        stuck_after_s=10.0,
    )


def client_rings(name: str) -> Any:
    return _core.ClientRings(name, client_index=0, stuck_after_s=10.0)


def meter_reader(meters: Any) -> Any:
    return _core.MeterReader(pid=os.getpid(), fd=meters.fileno(), id=1)


def step_outputs() -> Any:
    return _core.encode_like_scheduler(EngineCoreOutputs(), PartEncoder().encode_part)[0]


def hasher() -> Any:
    return _core.NativeBlockHasher("sha256", 4, NONE_HASH, extra_keys=lambda _: ([], b""))


@contextlib.contextmanager
def armed(entry: str, at_end: bool) -> Iterator[None]:
    """Let the entry panic at its beginning or its end, as long as the block lasts."""
    _core.arm_panic(entry, at_end=at_end)
    try:
        yield
    finally:
        _core.disarm_panic()


def expect_panic(entry: str, at_end: bool, call: Callable[[], object]) -> None:
    text = f"^sparksched found itself in an impossible state in {re.escape(entry)}: a test wants"
    with armed(entry, at_end), pytest.raises(RuntimeError, match=text):
        call()


def call_all(reports: Connection) -> None:
    """Call all entry points; report their names."""
    called: set[str] = set()
    for at_end in (False, True):
        called |= call_scheduler(at_end) | call_rings(at_end)
        called |= call_outputs(at_end) | call_meters(at_end)
        request, native = build_request(), hasher()
        expect_panic("NativeBlockHasher.__call__", at_end, functools.partial(native, request))
    for name, call in OTHER_CALLS.items():
        for at_end in (False, True):
            expect_panic(name, at_end, call)
    reports.send(sorted({*called, *OTHER_CALLS, "NativeBlockHasher.__call__"}))


def call_outputs(at_end: bool) -> set[str]:
    for name, call in OUTPUTS_CALLS.items():
        expect_panic(f"StepOutputs.{name}", at_end, functools.partial(call, step_outputs()))
    return {f"StepOutputs.{name}" for name in OUTPUTS_CALLS}


def call_meters(at_end: bool) -> set[str]:
    meters = _core.EngineMeters(1)
    reader = meter_reader(meters)
    for name, call in METERS_CALLS.items():
        expect_panic(f"EngineMeters.{name}", at_end, functools.partial(call, meters))
    for name, call in READER_CALLS.items():
        expect_panic(f"MeterReader.{name}", at_end, functools.partial(call, reader))
    of_engine = {f"EngineMeters.{name}" for name in METERS_CALLS}
    return of_engine | {f"MeterReader.{name}" for name in READER_CALLS}


def call_scheduler(at_end: bool) -> set[str]:
    for name, call in SCHEDULER_CALLS.items():
        core = build_core()
        core.add_request(build_request("a"), 1.0)
        expect_panic(f"SchedulerCore.{name}", at_end, functools.partial(call, core))
        check_whether_it_goes_on(core, goes_on=name in READING)
        ended = core.finish_requests(None, ABORTED)
        assert "a" in {request.request_id for request in ended} or name == "finish_requests", name
    return {f"SchedulerCore.{name}" for name in SCHEDULER_CALLS}


def check_whether_it_goes_on(core: Any, goes_on: bool) -> None:
    """After a panic in the middle the engine's loop hears of it, whatever it does next."""
    stops = "can't go on: RuntimeError: sparksched found itself"
    for call in (core.has_requests, lambda: core.schedule(False, 1.0)):
        with contextlib.nullcontext() if goes_on else pytest.raises(RuntimeError, match=stops):
            call()


def call_rings(at_end: bool) -> set[str]:
    of_engine = {f"EngineLinks.{name}": call for name, call in LINKS_CALLS.items()}
    of_engine |= {f"EngineRings.{name}": call for name, call in RINGS_CALLS.items()}
    for name, call in of_engine.items():
        engine = engine_rings()
        client = client_rings(engine.name)
        expect_panic(name, at_end, functools.partial(call, engine))
        client.close()
        engine.close()
    for name, call in CLIENT_CALLS.items():
        engine = engine_rings()
        client = client_rings(engine.name)
        expect_panic(f"ClientRings.{name}", at_end, functools.partial(call, client))
        is_hung_up = any(isinstance(it, _core.RingEnd) for it in client.receive())
        was_closed = name == "close" and at_end
        assert is_hung_up == (name in ENDING_THE_LINK) or was_closed, name
        client.close()
        engine.close()
    for name, call in SOCKETS_CALLS.items():
        sockets = engine_sockets()
        expect_panic(f"EngineSockets.{name}", at_end, functools.partial(call, sockets))
    of_sockets = {f"EngineSockets.{name}" for name in SOCKETS_CALLS}
    return of_engine.keys() | of_sockets | {f"ClientRings.{name}" for name in CLIENT_CALLS}
