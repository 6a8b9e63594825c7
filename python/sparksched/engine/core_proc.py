"""What changes in `EngineCoreProc` (`vllm/v1/engine/core.py`), so that it offers rings."""

import functools
import threading
import uuid
from typing import TYPE_CHECKING, Any

import vllm.envs
from vllm.logger import init_logger

from sparksched import __version__, _core, environment
from sparksched.compat import patching
from sparksched.engine import launcher, meters, warm_up
from sparksched.engine.context import context_of
from sparksched.engine.links import RingLinks
from sparksched.engine.notices import Notice
from sparksched.engine.queue_watch import QueueWatch
from sparksched.engine.sockets import SocketLinks, sockets_to_clients
from sparksched.shared import card
from sparksched.shared.offer import (
    RUST_FRONT_END,
    Offer,
    host_identity,
    make_rings,
    why_no_rings,
    with_offer,
)

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreReadyResponse
    from vllm.v1.engine.core import EngineCoreProc

logger = init_logger("vllm.sparksched.transport")


def _with_rings(original: patching.Function) -> patching.Function:
    @functools.wraps(original)
    def process_input_sockets(
        self: "EngineCoreProc", input_addresses: list[str], *args: Any, **kwargs: Any
    ) -> None:
        # vLLM starts this thread when everything else of the engine is there, and waits for it
        # before the engine's loop begins.
        try:
            _start_transport(self, len(input_addresses))
        except Exception:
            # The engine won't start, and says only that this thread has died.
            logger.exception("sparksched: the transport can't start")
            raise
        original(self, input_addresses, *args, **kwargs)

    return process_input_sockets


def _start_transport(engine: "EngineCoreProc", num_clients: int) -> None:
    rings, offer = _offer_rings(engine, num_clients)
    offer.engine = meters.begin(engine, rings)
    context = context_of(engine)
    context.offer = offer
    if environment.shows_metrics():
        try:
            context.card = card.publish(engine, "zmq" if rings is None else "shm", offer.engine)
        except OSError as error:
            logger.warning("sparksched: this engine can't be found by its process: %s", error)
    report = offer.engine
    logger.info(
        "sparksched %s: this engine schedules with %s and offers %s",
        __version__,
        "sparksched" if report.scheduler == "sparksched" else "vLLM's own scheduler",
        "shared memory" if offer.reason is None else f"ZMQ ({offer.reason})",
    )
    if context.scheduler is not None and context.scheduler.pacing() is not None:
        # The engine's loop does it before whatever clients send.
        engine.input_queue.put_nowait((Notice.WARM_UP, None))
    if rings is not None:
        _share_between_threads(engine)
        ring_links = RingLinks(engine, rings)
        context.transport = ring_links
        ring_links.start()
    elif (sockets := sockets_to_clients(engine)) is not None:
        socket_links = SocketLinks(engine, sockets)
        context.transport = socket_links
        socket_links.start()
    if context.scheduler is not None:
        context.queue_watch = QueueWatch(engine, context.scheduler, context.meters)
        context.queue_watch.start()
    launcher.watch_launcher(engine)


def _with_offer(original: patching.Function) -> patching.Function:
    @functools.wraps(original)
    def make_ready_response(self: "EngineCoreProc") -> "EngineCoreReadyResponse":
        response = original(self)
        if vllm.envs.VLLM_USE_RUST_FRONTEND:
            return response  # vLLM's Rust front end would have to know the field
        offer = context_of(self).offer
        assert offer is not None, "the input thread makes it before it says that it is ready"
        return with_offer(response, offer)

    return make_ready_response


def _with_notices(original: patching.Function) -> patching.Function:
    @functools.wraps(original)
    def handle_client_request(self: "EngineCoreProc", request_type: Any, request: Any) -> None:
        if request_type is Notice.LAUNCHER_GONE:
            launcher.fail(self)
        elif request_type is Notice.WARM_UP:
            warm_up.run(self)
        elif request_type is Notice.QUEUE_TIME_IS_UP:
            watch = context_of(self).queue_watch
            assert watch is not None, "it is what noticed"
            watch.end_expired()
        elif isinstance(request_type, Notice):
            transport = context_of(self).transport
            assert transport is not None, "notices are of clients"
            transport.handle_notice(request_type, request)
        else:
            original(self, request_type, request)

    return handle_client_request


def _closing_rings(original: patching.Function) -> patching.Function:
    @functools.wraps(original)
    def shutdown(self: "EngineCoreProc") -> None:
        try:
            original(self)
        finally:
            # An engine may be shut down that hasn't come so far as to have a scheduler.
            context = getattr(self, "sparksched", None)
            if context is not None and context.transport is not None:
                context.transport.close()

    return shutdown


def _share_between_threads(engine: "EngineCoreProc") -> None:
    """Let both input threads use what vLLM means for one: some clients may stay on ZMQ."""
    if engine.tensor_ipc_receiver is not None:
        engine.tensor_ipc_receiver = _one_at_a_time(engine.tensor_ipc_receiver)


def _one_at_a_time(call: patching.Function) -> patching.Function:
    lock = threading.Lock()

    def locked(*args: Any) -> Any:
        with lock:
            return call(*args)

    return locked


def _offer_rings(
    engine: "EngineCoreProc", num_clients: int
) -> tuple["_core.EngineRings | None", Offer]:
    reason = why_no_rings(engine.vllm_config.parallel_config)
    if reason is not None:
        if reason == RUST_FRONT_END:  # it doesn't read offers, and logs no reason
            logger.info("sparksched: messages of this engine go over ZMQ: %s", reason)
        return None, Offer(host=host_identity(), reason=reason)
    try:
        rings = make_rings(f"sparksched-{uuid.uuid4()}", num_clients)
    except ConnectionError as error:
        return None, Offer(host=host_identity(), reason=str(error))
    return rings, Offer(name=rings.name, host=host_identity())
