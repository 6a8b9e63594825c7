"""What changes in vLLM's clients: `vllm/v1/engine/core_client.py`."""

import functools
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

from sparksched.api_server.async_channel import Waiting
from sparksched.api_server.channel import EngineBusyError
from sparksched.api_server.connection import connect_all
from sparksched.compat import patching
from sparksched.shared.offer import read_offer

if TYPE_CHECKING:
    from vllm.v1.engine.core_client import (
        AsyncMPClient,
        BackgroundResources,
        DPLBAsyncMPClient,
        MPClient,
        SyncMPClient,
    )


def _remembering_offers(original: patching.Function) -> patching.Function:
    @functools.wraps(original)
    def apply_ready_response(self: "MPClient", payload: bytes) -> None:
        original(self, payload)
        if not hasattr(self, "sparksched_offers"):
            self.sparksched_offers = {}
        if payload:
            rank, offer = read_offer(payload)
            self.sparksched_offers[rank.to_bytes(2, "little")] = offer

    return apply_ready_response


def _connecting(original: patching.Function) -> patching.Function:
    @functools.wraps(original)
    def init(self: "MPClient", *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        try:
            self.resources.sparksched_rings = connect_all(self)
            self.resources.sparksched_rings.show_metrics_of(self)
            self.resources.sparksched_rings.start_reading(self)
        except BaseException:
            self.shutdown()
            raise

    return init


def _closing_rings(original: patching.Function) -> patching.Function:
    @functools.wraps(original)
    def clean_up(self: "BackgroundResources") -> None:
        # First, because vLLM's clean-up has a task report a dead engine to another one, which is
        # cancelled next: time in between would make an error in the log of each orderly exit.
        try:
            rings = getattr(self, "sparksched_rings", None)
            if rings is not None:
                rings.close()
        finally:
            original(self)

    return clean_up


def _reading_rings(original: patching.Function) -> patching.Function:
    @functools.wraps(original)
    def ensure_output_queue_task(self: "AsyncMPClient") -> None:
        original(self)
        rings = getattr(self.resources, "sparksched_rings", None)
        if rings is not None:  # vLLM calls this in the constructor, too
            rings.start_reading(self)

    return ensure_output_queue_task


def _sending_async(original: patching.Function) -> patching.Function:
    @functools.wraps(original)
    def send_input_message(
        self: "AsyncMPClient", message: tuple[Any, ...], engine: bytes
    ) -> Awaitable[Any]:
        channel = self.resources.sparksched_rings.channels.get(engine)
        if channel is None:
            result: Awaitable[Any] = original(self, message, engine)
            return result
        self.ensure_alive()
        # Room is made known to the reader: it must be there before somebody waits for room.
        channel.start_reading(self)
        request_type, *frames = message
        sent: Awaitable[Any] = channel.send(request_type[0], frames)
        return sent

    return send_input_message


def _noting_new_requests(original: patching.Function) -> patching.Function:
    """Tell the request that a load-balancing client counts from a session's later input."""

    @functools.wraps(original)
    def get_core_engine_for_request(self: "DPLBAsyncMPClient", request: Any) -> bytes:
        is_new = request.request_id not in self.reqs_in_flight
        engine: bytes = original(self, request)
        # It is sent next, before anything else can be.
        self.sparksched_new_request = request.request_id if is_new else None
        return engine

    return get_core_engine_for_request


def _undoing_refused_requests(original: patching.Function) -> patching.Function:
    """Have a load-balancing client forget a request that no engine will ever report.

    A session whose later input is refused stays: its engine has it, and is told of its end.
    """

    @functools.wraps(original)
    def send_input(
        self: "AsyncMPClient", request_type: Any, request: Any, *args: Any, **kwargs: Any
    ) -> Awaitable[Any]:
        new_request = getattr(self, "sparksched_new_request", None)
        is_new = new_request == getattr(request, "request_id", "")
        try:
            sent: Awaitable[Any] = original(self, request_type, request, *args, **kwargs)
        except EngineBusyError:
            if is_new:
                _forget_in_balancer(self, request)
            raise
        if is_new and isinstance(sent, Waiting):
            sent.on_taken_back = functools.partial(_forget_in_balancer, self, request)
        return sent

    return send_input


def _forget_in_balancer(client: Any, request: Any) -> None:
    """Undo what `DPLBAsyncMPClient.get_core_engine_for_request` has noted."""
    engine = client.reqs_in_flight.pop(request.request_id, None)
    if engine is not None:
        client.engine_inflight[engine] -= 1


def _sending_sync(original: patching.Function) -> patching.Function:
    @functools.wraps(original)
    def send_input(self: "SyncMPClient", request_type: Any, request: Any) -> None:
        channel = self.resources.sparksched_rings.channels.get(self.core_engine)
        if channel is None:
            original(self, request_type, request)
            return
        self.ensure_alive()
        channel.send(request_type.value[0], self.encoder.encode(request))

    return send_input
