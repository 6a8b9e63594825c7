"""A panic in Rust is a `RuntimeError` that says where, and a scheduler that it broke stops."""

import re
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from bare_core import (
    NONE_HASH,
    assert_goes_on,
    build_core,
    build_request,
    runner_output,
    structured_request,
)
from sparksched import _core
from vllm.v1.request import RequestStatus

from testkit.panics import TEXT, Panicking

ABORTED = RequestStatus.FINISHED_ABORTED


def expect_panic(entry: str, call: Callable[[], object]) -> None:
    text = f"^sparksched found itself in an impossible state in {entry}: {re.escape(TEXT)}"
    with pytest.raises(RuntimeError, match=text):
        call()


def add(core: Any) -> None:
    request = build_request("b")
    request.sampling_params = Panicking()
    core.add_request(request, 1.0)


def schedule(core: Any) -> None:
    request = structured_request("b")
    core.add_request(request, 1.0)
    request.structured_output_request = Panicking()
    core.schedule(False, 1.0)


def update(core: Any) -> None:
    scheduled = core.schedule(False, 1.0)
    output = runner_output(scheduled)
    output.logprobs = Panicking()
    core.update_from_output(scheduled, output)


@pytest.mark.parametrize(
    ("entry", "call"),
    [("add_request", add), ("schedule", schedule), ("update_from_output", update)],
)
def test_the_scheduler_stops(entry: str, call: Callable[[Any], None]) -> None:
    """It answers every further call with the cause, and still ends requests."""
    core = build_core()
    core.add_request(build_request("a"), 1.0)
    expect_panic(f"SchedulerCore.{entry}", lambda: call(core))
    for further in (core.has_requests, lambda: core.schedule(False, 1.0)):
        with pytest.raises(
            RuntimeError, match="can't go on: RuntimeError: sparksched found itself"
        ):
            further()
    ended = core.finish_requests(None, ABORTED)
    assert "a" in {request.request_id for request in ended}


class Unhashable(Panicking):
    def __hash__(self) -> int:
        return bool(self)


def test_the_scheduler_goes_on_where_nothing_changes() -> None:
    core = build_core()
    core.add_request(build_request("a"), 1.0)
    expect_panic(
        "SchedulerCore.is_waiting_for_input", lambda: core.is_waiting_for_input(Unhashable())
    )
    assert_goes_on(core, "a")


def test_a_function_and_a_hasher() -> None:
    def extra_keys(_request: Any) -> Any:
        return bool(Panicking())

    request = build_request(cache_salt="salt")
    expect_panic("read_prompt", lambda: _core.read_prompt(request, extra_keys=extra_keys))
    hasher = _core.NativeBlockHasher("sha256", 4, NONE_HASH, extra_keys=extra_keys)
    request = build_request(cache_salt="salt")
    expect_panic("NativeBlockHasher.__call__", lambda: hasher(request))


def test_a_client_hangs_up() -> None:
    """Nobody knows what it has left in the rings."""
    limits = {"max_idle_backlog_bytes": 1 << 20, "max_backlog_bytes": 1 << 20}
    engine = _core.EngineRings(
        f"panics-{uuid.uuid4()}", num_clients=1, ring_bytes=4096, stuck_after_s=10.0, **limits
    )
    client = _core.ClientRings(engine.name, client_index=0, stuck_after_s=10.0)
    expect_panic("ClientRings.send", lambda: client.send(0, Panicking()))
    assert any(isinstance(event, _core.RingEnd) for event in client.receive())
    engine.close()
