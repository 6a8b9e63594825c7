"""The front end's side: rings beside the sockets of `MPClient` and its subclasses.

Read it beside `vllm/v1/engine/core_client.py`: `_AsyncChannel._on_event` and `_SyncChannel._run` do
what vLLM's two `process_outputs_socket` do, and go on beside them.
"""

import asyncio
import collections
import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Generator, Sequence
from http import HTTPStatus
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from vllm.exceptions import GracefulHTTPError
from vllm.logger import init_logger
from vllm.v1.engine import (
    EEP_NOTIFICATION_CALL_ID,
    FT_STATUS_CALL_ID,
    EngineCoreOutputs,
    EngineCoreRequestType,
)
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.serial_utils import MsgpackDecoder

from sparksched import _core, environment, patching
from sparksched.front_end.garbage import FEW_BYTES, LaterCollections
from sparksched.front_end.turns import OthersTurns
from sparksched.metrics import collector
from sparksched.metrics import front_end as metrics
from sparksched.metrics.collector import EngineView
from sparksched.metrics.deliveries import Deliveries
from sparksched.transport.offer import (
    ENGINE_DEAD,
    MAX_BACKLOG_BYTES,
    Offer,
    host_identity,
    read_offer,
)

if TYPE_CHECKING:
    from vllm.v1.engine.core_client import (
        AsyncMPClient,
        BackgroundResources,
        DPLBAsyncMPClient,
        MPClient,
        SyncMPClient,
    )

logger = init_logger("vllm.sparksched.transport")

_ABORT: Final = EngineCoreRequestType.ABORT.value[0]
"""Kind of an abort: the byte that vLLM sends as a frame of its own."""

_MAX_MESSAGES: Final = 64
"""Messages that are taken from a ring before the event loop's other work gets its turn."""

MAX_OUTPUTS: Final = 4096
"""About how many outputs may be in them: processing so many takes some 30 ms."""


class EngineBusyError(GracefulHTTPError):  # type: ignore[misc]
    """The ring to the engine stays full: HTTP 503."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"The engine takes no more messages: {reason}. Please try again later.",
            HTTPStatus.SERVICE_UNAVAILABLE,
        )


# ----------------------------------------------------------------------------------------
# Installation
# ----------------------------------------------------------------------------------------


def install(core_client: ModuleType) -> None:
    """Make vLLM's clients use the rings of engines that offer them."""
    patching.replace(core_client.MPClient, "_apply_ready_response", _remembering_offers)
    patching.replace(core_client.BackgroundResources, "__call__", _closing_rings)
    for client_class in (core_client.AsyncMPClient, core_client.SyncMPClient):
        patching.replace(client_class, "__init__", _connecting)
    patching.replace(core_client.AsyncMPClient, "_ensure_output_queue_task", _reading_rings)
    patching.replace(
        core_client.DPLBAsyncMPClient, "get_core_engine_for_request", _noting_new_requests
    )
    patching.replace(core_client.AsyncMPClient, "_send_input", _undoing_refused_requests)
    patching.replace(core_client.AsyncMPClient, "_send_input_message", _sending_async)
    patching.replace(core_client.SyncMPClient, "_send_input", _sending_sync)


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
            self.resources.sparksched_rings = _connect_all(self)
            self.resources.sparksched_rings.show_metrics_of(self)
            self.resources.sparksched_rings.start_reading(self)
        except BaseException:
            self.shutdown()
            raise

    return init


def _closing_rings(original: patching.Function) -> patching.Function:
    @functools.wraps(original)
    def clean_up(self: "BackgroundResources") -> None:
        try:
            original(self)
        finally:
            rings = getattr(self, "sparksched_rings", None)
            if rings is not None:
                rings.close()

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
        if is_new and isinstance(sent, _Waiting):
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


# ----------------------------------------------------------------------------------------
# Connecting
# ----------------------------------------------------------------------------------------


def _connect_all(client: "MPClient") -> "ClientTransport":
    """Connect to the engines that offer rings; say which ones stay on ZMQ, and why."""
    # Only the asyncio client has more than one engine, or is one of several.
    is_async = hasattr(client, "_ensure_output_queue_task")
    make_channel = _AsyncChannel if is_async else _SyncChannel
    client_index = getattr(client, "client_index", 0)
    transport = ClientTransport({})
    try:
        for engine, offer in client.sparksched_offers.items():
            rank = int.from_bytes(engine, "little")
            rings = _connect_or_explain(rank, offer, client_index)
            if rings is not None:
                transport.channels[engine] = make_channel(client, rank, rings)
    except BaseException:
        transport.close()
        raise
    return transport


def _connect_or_explain(
    rank: int, offer: Offer | None, client_index: int
) -> "_core.ClientRings | None":
    try:
        rings = _connect(offer, client_index)
    except ConnectionError as error:
        if environment.transport() == "shm":
            raise RuntimeError(
                f"{environment.TRANSPORT}=shm, but engine {rank} can't be reached through "
                f"shared memory: {error}"
            ) from error
        logger.info("sparksched: messages to engine %d go over ZMQ: %s", rank, error)
        return None
    logger.info(
        "sparksched: messages to engine %d go through shared memory (2 rings of %d MiB)",
        rank,
        rings.ring_bytes >> 20,
    )
    return rings


def _connect(offer: Offer | None, client_index: int) -> "_core.ClientRings":
    if offer is None:
        raise ConnectionError("it runs without sparksched")
    if offer.name is None:
        raise ConnectionError(offer.reason)
    if environment.transport() == "zmq":
        raise ConnectionError(f"{environment.TRANSPORT}=zmq")
    if offer.host != host_identity():
        raise ConnectionError("it runs on another host")
    return _core.ClientRings(
        offer.name,
        client_index=client_index,
        max_backlog_bytes=MAX_BACKLOG_BYTES,
        stuck_after_s=environment.stuck_after_s(),
    )


class ClientTransport:
    """A client's rings to all its engines."""

    def __init__(self, channels: "dict[bytes, _Channel]") -> None:
        self.channels = channels
        """By the identity that vLLM's sockets know the engine by."""
        self._views: list[EngineView] = []

    def show_metrics_of(self, client: "MPClient") -> None:
        """Show the client's engines in vLLM's metrics, as long as this is open.

        An error is logged: a server that can't be watched is better than none.
        """
        ranks = {channel.rank for channel in self.channels.values()}
        try:
            self._views = metrics.show_engines(client, ranks)
        except Exception:
            logger.exception("sparksched: there will be no metrics of engines")
            return
        for channel in self.channels.values():
            channel.deliveries = getattr(client.resources, "sparksched_deliveries", None)

    def start_reading(self, client: "MPClient") -> None:
        """Start to receive, if that is possible already: asyncio needs a running loop."""
        for channel in self.channels.values():
            channel.start_reading(client)

    def stuck_engine(self) -> tuple[int, float] | None:
        """Return an engine whose process doesn't run, and for how many seconds; or None."""
        for channel in self.channels.values():
            seconds = channel.rings.stuck_for_s
            if seconds is not None:
                return channel.rank, seconds
        return None

    def close(self) -> None:
        """Say goodbye to all engines. Any thread may call this."""
        while self._views:
            collector.hide(self._views.pop())
        for channel in self.channels.values():
            try:
                channel.close()
            except Exception:
                logger.exception("sparksched: the rings to engine %d weren't closed", channel.rank)


# ----------------------------------------------------------------------------------------
# Channels: what both kinds of clients share
# ----------------------------------------------------------------------------------------


class _Channel:
    """A client's rings to one engine. It holds no reference to the client, which is collected."""

    def __init__(self, client: "MPClient", rank: int, rings: "_core.ClientRings") -> None:
        self.rank = rank
        self.rings = rings
        self._client = weakref.ref(client)
        self._resources: BackgroundResources = client.resources
        self._outputs_queue = client.outputs_queue
        self._utility_results = client.utility_results
        self._decoder = MsgpackDecoder(EngineCoreOutputs)
        self.deliveries: Deliveries | None = None
        self._received_at = 0.0
        self._has_ended = False
        self._has_failed = False

    def start_reading(self, client: "MPClient") -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def _handle(self, event: Any) -> None:
        """Handle one event. After the first error nothing more is delivered: it is the last."""
        if self._has_ended:
            return
        try:
            match event:
                case _core.RingMessage():
                    self._handle_message(event)
                case _core.RingEnd():
                    self._handle_end(event)
                case _core.RingStuck():
                    logger.warning(
                        "sparksched: engine %d is stuck: it hasn't run for %.1f s",
                        self.rank,
                        event.seconds,
                    )
                case _core.RingRecovered():
                    logger.info("sparksched: engine %d runs again", self.rank)
        except Exception as error:
            self._fail(error)

    def _handle_message(self, message: "_core.RingMessage") -> None:
        if message.kind == ENGINE_DEAD:
            self._resources.engine_dead = True
            raise EngineDeadError
        self._deliver(self._decoder.decode(message.frames))

    def _deliver(self, outputs: EngineCoreOutputs) -> None:
        raise NotImplementedError

    def _handle_end(self, end: "_core.RingEnd") -> None:
        client = self._client()
        if client is None or not client._finalizer.alive:
            self._has_ended = True  # this side is closing down itself
            return
        log = logger.warning if end.is_goodbye else logger.error
        log("sparksched: engine %d is gone: %s", self.rank, end.reason)
        self._resources.engine_dead = True
        if self._resources.engine_manager is not None:
            # vLLM's monitor leaves this to whoever has noticed first. Shutting down waits for
            # processes, which an event loop mustn't.
            threading.Thread(target=client.shutdown, name="RingShutdown", daemon=True).start()
        raise EngineDeadError

    def _fail(self, error: Exception) -> None:
        self._has_ended = self._has_failed = True
        self._outputs_queue.put_nowait(error)

    def _give_up(self, error: Exception) -> None:
        """Deliver nothing more after an error of the rings themselves."""
        logger.error("sparksched: the rings to engine %d failed", self.rank, exc_info=error)
        self._resources.engine_dead = True
        self._fail(error)

    def _receive(self, max_messages: int) -> None:
        """Receive and handle what has happened. No error leaves this: whoever waits is told."""
        try:
            events = self.rings.receive(max_messages=max_messages)
        except Exception as error:
            self._give_up(error)
            return
        self._received_at = time.monotonic()
        self._handle_all(events)

    def _handle_all(self, events: Sequence[object]) -> None:
        for event in events:
            self._handle(event)

    def _fail_calls(self) -> None:
        """Fail the utility calls in flight: nothing will be delivered any more.

        A request may be behind one of them, for vLLM asks the engine what it can do before it sends
        its first.
        """
        for call in list(self._utility_results.values()):
            if not call.done():
                call.set_exception(EngineDeadError())
                call.exception()  # asyncio would complain of calls that nobody waits for any more

    def _put_outputs(self, outputs: EngineCoreOutputs) -> None:
        if self.deliveries is not None:
            self.deliveries.note_reception(outputs, self._received_at)
        self._outputs_queue.put_nowait(outputs)


# ----------------------------------------------------------------------------------------
# asyncio
# ----------------------------------------------------------------------------------------


class _Sent:
    """To be awaited when there is nothing to wait for."""

    def __await__(self) -> Generator[None, None, None]:
        yield from ()


_SENT = _Sent()


class _Waiting:
    """A message that waits for room in its ring; to be awaited until it is sent."""

    def __init__(self, rings: "_core.ClientRings", ticket: int) -> None:
        self.ticket = ticket
        self.future = asyncio.get_running_loop().create_future()
        self.on_taken_back: Callable[[], None] | None = None
        self._rings = rings

    def __await__(self) -> Generator[Any, None, None]:
        return self._wait().__await__()

    async def _wait(self) -> None:
        limit_s = environment.stuck_after_s()
        try:
            async with asyncio.timeout(limit_s):
                await self.future
        except TimeoutError:
            raise EngineBusyError(f"it has made no room for {limit_s:g} s") from None
        finally:
            # Nothing is left to take back if it was sent. If a part of it is in the ring, the
            # engine gets all of it as soon as it makes room.
            if self._rings.take_back(self.ticket) and self.on_taken_back is not None:
                self.on_taken_back()


class _AsyncChannel(_Channel):
    """Rings of a client that lives in an event loop; only that loop's thread uses them."""

    def __init__(self, client: "AsyncMPClient", rank: int, rings: "_core.ClientRings") -> None:
        super().__init__(client, rank, rings)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fileno = rings.fileno()
        # In the order of their tickets.
        self._waiting: collections.deque[_Waiting] = collections.deque()
        self._num_outputs = 0
        self._max_messages = _MAX_MESSAGES
        self._others = OthersTurns()
        self._collections = LaterCollections()
        self._observe_outputs: Callable[[Any, EngineCoreOutputs], Any] | None = getattr(
            type(client), "process_engine_outputs", None
        )

    # Receiving

    def start_reading(self, client: "MPClient") -> None:
        if self._loop is not None or self._has_ended:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return  # not in a loop yet; this is called again with each message
        loop.add_reader(self._fileno, self._on_event)
        self._loop = loop
        self._on_event()

    def _on_event(self) -> None:
        assert self._loop is not None
        # What isn't taken stays to be read: this is called again in the loop's next turn.
        if not self._waiting and self._others.take_next():
            return
        self._receive(self._max_messages)
        self._others.begin()
        if self._waiting and not self._has_ended:
            self._wake_senders()
        if self._has_ended:
            self._stop_reading()

    def _handle_all(self, events: Sequence[object]) -> None:
        assert self._loop is not None
        # After a sleep caches are cold. What is done for many outputs takes 20 µs then, a fifth of
        # what a message of few takes in all.
        if _num_bytes(events) <= FEW_BYTES:
            super()._handle_all(events)
            return
        self._collections.begin()
        try:
            super()._handle_all(events)
        finally:
            self._collections.end_after_streams(self._loop)

    def _deliver(self, outputs: EngineCoreOutputs) -> None:
        if outputs.utility_output is not None:
            self._deliver_utility_output(outputs)
            return
        if self._observe_outputs is not None:
            client = self._client()
            if client is None:
                return
            _run_now(self._observe_outputs(client, outputs))
        if outputs.outputs or outputs.scheduler_stats:
            self._put_outputs(outputs)
            self._others.owe(len(outputs.outputs), outputs.timestamp)
            # The next steps' messages will have about as many. A short one among them, of an abort
            # for example, says little.
            self._num_outputs = max(len(outputs.outputs), self._num_outputs // 2)
            max_messages = MAX_OUTPUTS // max(self._num_outputs, 1)
            self._max_messages = min(max(max_messages, 1), _MAX_MESSAGES)

    def _deliver_utility_output(self, outputs: EngineCoreOutputs) -> None:
        from vllm.v1.engine.core_client import _process_utility_output

        output = outputs.utility_output
        if output.call_id == FT_STATUS_CALL_ID:
            client = self._client()
            if client is not None and output.result is not None:
                client._engine_status[outputs.engine_index] = output.result.result
        elif output.call_id == EEP_NOTIFICATION_CALL_ID:
            raise RuntimeError("elastic expert parallelism doesn't use this transport")
        else:
            _process_utility_output(output, self._utility_results)

    def _stop_reading(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._fileno)
        while self._waiting:
            future = self._waiting.popleft().future
            if not future.done():
                future.set_exception(EngineDeadError())
        self._fail_calls()

    def close(self) -> None:
        # At once, whatever thread this is and whether the loop still runs; only what belongs to
        # the loop waits for it.
        self._has_ended = True
        self.rings.close()
        self._collections.close()
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._stop_reading)

    # Sending

    def send(self, kind: int, frames: Any) -> Awaitable[None]:
        """Send now; what is returned is to be awaited for room in the ring, if that is lacking.

        Raises:
            EngineBusyError: if too much waits already; awaiting raises it if that takes too long.
            EngineDeadError: if the engine is gone.

        """
        # An abort makes room in the end, and nobody could do anything about it not being sent.
        is_abort = kind == _ABORT
        try:
            ticket = self.rings.send(kind, frames, regardless=is_abort)
        except ConnectionError as error:
            if is_abort:
                return _SENT  # the requests end with the engine; the ring says so in its turn
            raise EngineDeadError from error
        if ticket is None:
            raise EngineBusyError(f"{MAX_BACKLOG_BYTES >> 20} MiB wait for it already")
        if is_abort or self.rings.sent_before() > ticket:
            return _SENT
        waiting = _Waiting(self.rings, ticket)
        self._waiting.append(waiting)
        return waiting

    def _wake_senders(self) -> None:
        try:
            sent_before = self.rings.sent_before()
        except Exception as error:
            self._give_up(error)
            return
        while self._waiting and self._waiting[0].ticket < sent_before:
            future = self._waiting.popleft().future
            if not future.done():
                future.set_result(None)


def _num_bytes(events: Sequence[object]) -> int:
    """Return how large the messages among events are, but for their tensors."""
    num_bytes = 0
    for event in events:
        if isinstance(event, _core.RingMessage):
            num_bytes += len(event.frames[0])
    return num_bytes


def _run_now(coroutine: Any) -> None:
    """Run a coroutine that never waits: vLLM's observer of outputs is one."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    coroutine.close()
    raise RuntimeError(f"{coroutine.__qualname__} was expected not to wait for anything")


# ----------------------------------------------------------------------------------------
# Threads
# ----------------------------------------------------------------------------------------


class _SyncChannel(_Channel):
    """Rings of a client without an event loop: a thread receives, as in vLLM."""

    def __init__(self, client: "SyncMPClient", rank: int, rings: "_core.ClientRings") -> None:
        super().__init__(client, rank, rings)
        self._room = threading.Condition()
        self._thread: threading.Thread | None = None

    def start_reading(self, client: "MPClient") -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="EngineCoreRingThread", daemon=True
            )
            self._thread.start()

    def _run(self) -> None:
        while not self._has_ended:
            self._receive(_MAX_MESSAGES)
            with self._room:
                self._room.notify_all()
            if not self._has_ended:
                self._wait()
        with self._room:
            self._room.notify_all()
        if not self._has_failed:
            # Somebody may wait for outputs that will never come.
            self._fail(EngineDeadError())
        self._fail_calls()

    def _wait(self) -> None:
        try:
            self.rings.wait()
        except Exception as error:
            self._give_up(error)

    def _deliver(self, outputs: EngineCoreOutputs) -> None:
        from vllm.v1.engine.core_client import _process_utility_output

        if outputs.utility_output is not None:
            _process_utility_output(outputs.utility_output, self._utility_results)
        else:
            self._put_outputs(outputs)

    def close(self) -> None:
        self._has_ended = True
        self.rings.close()
        with self._room:
            self._room.notify_all()

    def send(self, kind: int, frames: Any) -> None:
        """Send, and wait until all of it is in the ring.

        Raises:
            EngineDeadError: if the engine is gone, or goes meanwhile.

        """
        # Each thread waits for its own message, so no more than one a thread can pile up.
        try:
            ticket = self.rings.send(kind, frames, regardless=True)
        except ConnectionError as error:
            raise EngineDeadError from error
        assert ticket is not None
        with self._room:
            while not self._has_ended and self.rings.sent_before() <= ticket:
                self._room.wait()
        if self._has_ended:
            raise EngineDeadError
