"""What changes in vLLM's clients: `vllm/v1/engine/core_client.py`."""

import functools
import os
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, Final

from vllm.v1.engine import EngineCoreRequestType

from sparksched.api_server.async_channel import MAX_OUTPUTS, SENT, AsyncChannel
from sparksched.api_server.channels import connect_all
from sparksched.compat import patching
from sparksched.shared.offer import read_offer

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.core_client import (
        AsyncMPClient,
        BackgroundResources,
        MPClient,
        SyncMPClient,
    )

ADD: Final = EngineCoreRequestType.ADD
ABORT: Final = EngineCoreRequestType.ABORT

_CHUNK_SIZE: Final = "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE"
"""vLLM's variable for how many outputs it processes before it gives streams a turn."""

_TRANSFERS: Final = {"kv_transfer_params", "ec_transfer_params"}
"""What vLLM's connectors find among a request's extra arguments."""


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
            if self.resources.sparksched_rings.channels:
                _let_streams_catch_up()
        except BaseException:
            self.shutdown()
            raise

    return init


def _let_streams_catch_up() -> None:
    """Let the outputs of several steps become one of each stream, once they have piled up.

    A stream's next output costs the API server ten times what it costs to add a token to one that
    is still to be taken. vLLM's collectors add them up, but with more than 128 streams none is left
    to add to, because its loop gives streams a turn after each 128 outputs. Here they get it when
    all is processed that the rings have handed over, which `MAX_OUTPUTS` bounds. While nothing
    piles up that is one step, and each token an output of its own.

    vLLM reads the variable when it starts that loop, and what a user has set stays.
    """
    os.environ.setdefault(_CHUNK_SIZE, str(MAX_OUTPUTS))


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


def _sending_async(original: patching.Function) -> patching.Function:
    @functools.wraps(original)
    def send_input(
        self: "AsyncMPClient", request_type: Any, request: Any, engine: bytes | None = None
    ) -> Awaitable[Any]:
        channel = _channel_of(self, self.core_engine if engine is None else engine)
        if channel is None or request_type not in (ADD, ABORT):
            result: Awaitable[Any] = original(self, request_type, request, engine)
            return result
        if request_type is ABORT:
            channel.abort(request, self.encoder.encode(request))
            return SENT
        # Bound to the encoder, not to the client: nothing that waits keeps a client alive.
        encode = functools.partial(self.encoder.encode, request)
        on_dropped = None
        if hasattr(self, "reqs_in_flight"):
            on_dropped = functools.partial(_forget_in_balancer, self, channel, request)
        encode_abort = None
        if _concerns_others(request):
            encode_abort = functools.partial(self.encoder.encode, [request.request_id])
        return channel.send(ADD.value[0], encode, request.request_id, on_dropped, encode_abort)

    return send_input


def _concerns_others(request: "EngineCoreRequest") -> bool:
    """Return whether an engine has to get a request, even if it is aborted before.

    Later requests name its images by hashes alone, once an engine is thought to have them. Another
    engine keeps blocks until this one's connector has fetched them, or learns of the abort.
    """
    if any(feature.data is not None for feature in request.mm_features or ()):
        return True
    params = request.sampling_params
    extra_args = None if params is None else params.extra_args
    return extra_args is not None and not _TRANSFERS.isdisjoint(extra_args)


def _sending_calls(original: patching.Function) -> patching.Function:
    @functools.wraps(original)
    def send_input_message(
        self: "AsyncMPClient", message: tuple[Any, ...], engine: bytes
    ) -> Awaitable[Any]:
        channel = _channel_of(self, engine)
        if channel is None:
            result: Awaitable[Any] = original(self, message, engine)
            return result
        request_type, *frames = message
        return channel.send(request_type[0], lambda: frames)

    return send_input_message


def _channel_of(client: "AsyncMPClient", engine: bytes) -> AsyncChannel | None:
    """Return the channel to an engine, ready to send; None if the engine has none."""
    channel: AsyncChannel | None = client.resources.sparksched_rings.channels.get(engine)
    if channel is not None:
        client.ensure_alive()
        # Room is made known to the reader: it must be there before somebody waits for room.
        channel.start_reading(client)
    return channel


def _forget_in_balancer(client: Any, channel: AsyncChannel, request: "EngineCoreRequest") -> None:
    """Have a load-balancing client forget a request that no engine will ever report.

    If this was later input of a session, its engine has that, and is to end it.
    """
    engine = client.reqs_in_flight.pop(request.request_id, None)
    if engine is not None:
        client.engine_inflight[engine] -= 1
    if request.resumable:
        ids = [request.request_id]
        channel.abort(ids, client.encoder.encode(ids))


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
