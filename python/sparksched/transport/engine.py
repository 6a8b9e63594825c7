"""The engine's side: rings beside the sockets of `EngineCoreProc`.

Read `_RingInput` beside vLLM's `process_input_sockets` and `_RingOutput` beside
`process_output_sockets`, both in `vllm/v1/engine/core.py`. Unlike there, no message waits for
another thread to get the interpreter's lock if that can be helped: outputs are encoded and sent by
the thread that made them, and an engine's loop that has nothing to do receives by itself. While
the loop is busy the input thread receives: requests are prepared beside a step, and aborts, and
commands for a loop that has failed, get through.
"""

import enum
import functools
import queue
import threading
import uuid
from types import ModuleType
from typing import TYPE_CHECKING, Any

import vllm.envs
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.multimodal.cache import MultiModalCacheMissError
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
)
from vllm.v1.fault_tolerance.engine_core_sentinel import FT_UTILITY_METHOD
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from sparksched import __version__, _core, compat, environment, patching
from sparksched.metrics import engine as metrics
from sparksched.scheduler import SparkScheduler
from sparksched.transport.encoder import (
    difference_from_vllm,
    request_ids_in,
)
from sparksched.transport.offer import (
    ENGINE_DEAD,
    MAX_BACKLOG_BYTES,
    MAX_SLOW_BACKLOG_BYTES,
    OUTPUTS,
    REQUEST_TYPES,
    RUST_FRONT_END,
    Offer,
    host_identity,
    why_no_rings,
    with_offer,
)

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreReadyResponse
    from vllm.v1.engine.core import EngineCoreProc

logger = init_logger("vllm.sparksched.transport")

_LINGER_S = 4.0
"""How long an engine that stops waits for clients to take their last messages, as over ZMQ."""


_SIGNAL_DELAY_S = 1.0
"""How long a signal may wait for the engine's loop if another thread has caught it."""


_DROPPED_AT_A_TIME = 1 << 20
"""Bytes of messages to a client, on their way from its backlog to nowhere."""


_BRIEF = frozenset(
    {EngineCoreRequestType.ADD, EngineCoreRequestType.ABORT, EngineCoreRequestType.WAKEUP}
)
"""What the engine's loop handles in a moment: nobody has to receive meanwhile."""


class _Notice(enum.Enum):
    """What other threads tell the engine's loop, beside vLLM's request types."""

    CLIENT_ATTACHED = enum.auto()
    CLIENT_GONE = enum.auto()
    CLIENT_BLOCKED = enum.auto()
    BACKLOG_DROPPED = enum.auto()
    FAILED = enum.auto()


# ----------------------------------------------------------------------------------------
# Installation
# ----------------------------------------------------------------------------------------


def install(core: ModuleType) -> None:
    """Make `EngineCoreProc` offer rings to its clients."""
    proc = core.EngineCoreProc
    patching.replace(proc, "process_input_sockets", _with_rings)
    patching.replace(proc, "_make_ready_response", _with_offer)
    patching.replace(proc, "_handle_client_request", _with_notices)
    patching.replace(proc, "shutdown", _closing_rings)


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
    offer.engine = metrics.begin(engine, rings)
    engine.sparksched_offer = offer
    report = offer.engine
    logger.info(
        "sparksched %s: this engine schedules with %s and offers %s",
        __version__,
        "sparksched" if report.scheduler == "sparksched" else "vLLM's own scheduler",
        "shared memory" if offer.reason is None else f"ZMQ ({offer.reason})",
    )
    if rings is not None:
        _share_between_threads(engine)
        engine.sparksched_transport = EngineTransport(engine, rings)
        engine.sparksched_transport.start()


def _with_offer(original: patching.Function) -> patching.Function:
    @functools.wraps(original)
    def make_ready_response(self: "EngineCoreProc") -> "EngineCoreReadyResponse":
        response = original(self)
        if vllm.envs.VLLM_USE_RUST_FRONTEND:
            return response  # vLLM's Rust front end would have to know the field
        return with_offer(response, self.sparksched_offer)

    return make_ready_response


def _with_notices(original: patching.Function) -> patching.Function:
    @functools.wraps(original)
    def handle_client_request(self: "EngineCoreProc", request_type: Any, request: Any) -> None:
        if isinstance(request_type, _Notice):
            self.sparksched_transport.handle_notice(request_type, request)
        else:
            original(self, request_type, request)

    return handle_client_request


def _closing_rings(original: patching.Function) -> patching.Function:
    @functools.wraps(original)
    def shutdown(self: "EngineCoreProc") -> None:
        try:
            original(self)
        finally:
            transport = getattr(self, "sparksched_transport", None)
            if transport is not None:
                transport.close()

    return shutdown


def _share_between_threads(engine: "EngineCoreProc") -> None:
    """Let both input threads use what vLLM means for one: some clients may stay on ZMQ."""
    engine.preprocess_add_request = _one_at_a_time(engine.preprocess_add_request)
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
        rings = _core.EngineRings(
            f"sparksched-{uuid.uuid4()}",
            num_clients=num_clients,
            ring_bytes=environment.ring_bytes(),
            max_idle_backlog_bytes=MAX_BACKLOG_BYTES,
            max_backlog_bytes=MAX_SLOW_BACKLOG_BYTES,
            stuck_after_s=environment.stuck_after_s(),
        )
    except ConnectionError as error:
        return None, Offer(host=host_identity(), reason=str(error))
    return rings, Offer(name=rings.name, host=host_identity())


# ----------------------------------------------------------------------------------------
# The two directions, and what the engine's loop does about clients
# ----------------------------------------------------------------------------------------


class EngineTransport:
    """An engine's rings to all its clients."""

    def __init__(self, engine: "EngineCoreProc", rings: "_core.EngineRings") -> None:
        self._engine = engine
        self._rings = rings
        self._output = _RingOutput(engine, rings)
        self._input = _RingInput(engine, rings)
        engine.output_queue = self._output
        # What was put there so far, such as the failure of an executor, is not lost.
        while not engine.input_queue.empty():
            self._input.queue.put_nowait(engine.input_queue.get_nowait())
        engine.input_queue = self._input.queue

    def start(self) -> None:
        """Start to receive."""
        threading.Thread(target=self._input.run, name="RingInputThread", daemon=True).start()

    def close(self) -> None:
        """Say goodbye to all clients, once they have taken their last messages."""
        self._rings.close(linger_s=_LINGER_S)

    def handle_notice(self, notice: _Notice, value: Any) -> None:
        """Do in the engine's loop what only it may do: the scheduler belongs to its thread."""
        if notice is _Notice.FAILED:
            # Recovery would wait for a command that only the thread that failed could receive.
            self._engine.enable_fault_tolerance = False
            raise RuntimeError("sparksched's transport failed") from value
        if notice is _Notice.CLIENT_ATTACHED:
            self._output.encode_in_rust_for(value)
        elif notice is _Notice.CLIENT_GONE:
            self._forget_client(value)
        elif notice is _Notice.CLIENT_BLOCKED:
            self._output.drop_backlog(value, self._abort_requests_of(value))
        elif notice is _Notice.BACKLOG_DROPPED:
            self._output.unblock(value, self._abort_requests_of(value))

    def _requests_of(self, client: int) -> list[str]:
        requests = self._engine.scheduler.requests
        return [
            request_id for request_id, request in requests.items() if request.client_index == client
        ]

    def _abort_requests_of(self, client: int) -> list[str]:
        request_ids = self._requests_of(client)
        if request_ids:
            self._engine.abort_requests(request_ids)
        return request_ids

    def _forget_client(self, client: int) -> None:
        request_ids = self._abort_requests_of(client)
        if request_ids:
            logger.info(
                "sparksched: aborted %d requests of API server %d", len(request_ids), client
            )
        if self._rings.is_deserted and self._engine.is_running():
            self._go_without_clients()

    def _go_without_clients(self) -> None:
        from vllm.v1.engine.core import EngineShutdownState

        if _others_step_with(self._engine):
            logger.warning(
                "sparksched: the last API server is gone; the engine goes on for those of others, "
                "which step together with it, and has to be ended by hand"
            )
            return
        logger.info("sparksched: the last API server is gone; the engine stops")
        self._engine.shutdown_state = EngineShutdownState.REQUESTED


def _others_step_with(engine: "EngineCoreProc") -> bool:
    """Whether engines of other API servers wait for this one in their steps.

    Those of a mixture of experts do. With internal load balancing all have their API servers in
    common, and lose the last one together.
    """
    from vllm.v1.engine.core import DPEngineCoreProc

    return (
        isinstance(engine, DPEngineCoreProc)
        and engine.has_coordinator
        and engine.vllm_config.parallel_config.local_engines_only
    )


class _RingOutput:
    """Stands in for the engine's output queue; what has no ring goes on to vLLM's own queue."""

    def __init__(self, engine: "EngineCoreProc", rings: "_core.EngineRings") -> None:
        self._engine = engine
        self._engine_index = engine.engine_index
        self._rings = rings
        self._attached: set[int] = set()
        self._zmq_queue: queue.Queue[Any] = engine.output_queue
        # vLLM's output thread takes from here; it may ask this object or the queue itself.
        self.get = self._zmq_queue.get
        # Encoders aren't thread-safe, and utility calls are answered by several threads.
        self._encoders = threading.local()
        self._clients = [_ClientState() for _ in engine.addresses.outputs]
        self._encodes_in_rust = _encodes_in_rust(engine)

    def encode_in_rust_for(self, client: int) -> None:
        """Have the scheduler write this client's outputs itself, if it can.

        Only the engine's loop may call this, for the scheduler belongs to it.
        """
        if self._encodes_in_rust:
            self._engine.scheduler.encode_outputs_for(client)

    def put_nowait(self, item: Any) -> None:
        """Send vLLM's `(client_index, EngineCoreOutputs)`, or the note that the engine is dead.

        A scheduler that writes a client's outputs itself has `StepOutputs` instead.
        """
        if isinstance(item, bytes):
            self._send_dead(item)
            return
        try:
            self._put(item)
        except Exception as error:
            # Not only the engine's loop puts: of an error in the callback of a future, say, nobody
            # else would learn.
            self._engine.input_queue.put_nowait((_Notice.FAILED, error))
            raise

    def _put(self, item: tuple[int, Any]) -> None:
        client, outputs = item
        if isinstance(outputs, _core.StepOutputs):
            outputs.engine_index = self._engine_index
            if not self._rings.send_outputs(client, OUTPUTS, outputs):
                self._lose(client, outputs.frames())
            return
        if client not in self._attached:
            if client < 0 or not self._rings.is_attached(client):
                self._zmq_queue.put_nowait(item)
                return
            self._attached.add(client)
        outputs.engine_index = self._engine_index
        frames = self._encode(outputs)
        if not self._rings.send(client, OUTPUTS, frames, regardless=_must_arrive(outputs)):
            self._lose(client, frames)

    def _encode(self, outputs: EngineCoreOutputs) -> Any:
        encoder: MsgpackEncoder | None = getattr(self._encoders, "value", None)
        if encoder is None:
            encoder = self._encoders.value = MsgpackEncoder()
        try:
            return encoder.encode(outputs)
        except Exception as error:
            call = outputs.utility_output
            if call is None:
                raise
            logger.exception("sparksched: the result of a utility call can't be sent")
            call.result = None
            call.failure_message = f"its result can't be sent: {error}"
            return encoder.encode(outputs)

    def _send_dead(self, note: bytes) -> None:
        try:
            for client in range(len(self._clients)):
                if self._rings.is_attached(client):
                    self._rings.send(client, ENGINE_DEAD, [note], regardless=True)
        except Exception:
            # These clients see the process end; others have to be told.
            logger.exception("sparksched: the end of the engine can't be sent")
        self._zmq_queue.put_nowait(note)

    def _lose(self, client: int, frames: Any) -> None:
        """Drop a message that a client doesn't take; the engine's loop will fail its requests.

        The rings accept nothing more for this client until `unblock`, which may have come between
        the refusal and the lock: then there is nothing to lose.
        """
        state = self._clients[client]
        with state.lock:
            if state.lost is None:
                if self._rings.send(client, OUTPUTS, frames):
                    return
                logger.warning(
                    "sparksched: API server %d takes no messages, or too slowly: %d MiB wait for "
                    "it; its requests fail, those of others go on",
                    client,
                    self._rings.backlog_bytes(client) >> 20,
                )
                state.lost = set()
                self._engine.input_queue.put_nowait((_Notice.CLIENT_BLOCKED, client))
            state.lost |= request_ids_in(frames)

    def drop_backlog(self, client: int, request_ids: list[str]) -> None:
        """Start to drop what waits for a client whose requests have ended: see `unblock`.

        In a thread of its own, because a gigabyte takes seconds.
        """
        state = self._clients[client]
        with state.lock:
            assert state.lost is not None
            state.lost.update(request_ids)
        thread = threading.Thread(
            target=self._run_drop, args=(client, state), name="RingDropThread", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # the process may have no more: seconds without a step are no end
            self._run_drop(client, state)

    def _run_drop(self, client: int, state: "_ClientState") -> None:
        try:
            # The last first: if the client reads again meanwhile, it gets what came before, and no
            # stream has a gap. What must arrive was sent regardless of the room, and stays.
            while messages := self._rings.take_back_newest(client, max_bytes=_DROPPED_AT_A_TIME):
                lost = set().union(*(request_ids_in(message.frames) for message in messages))
                with state.lock:
                    assert state.lost is not None
                    state.lost |= lost
        except Exception as error:
            logger.exception("sparksched: the backlog of API server %d wasn't dropped", client)
            self._engine.input_queue.put_nowait((_Notice.FAILED, error))
        else:
            self._engine.input_queue.put_nowait((_Notice.BACKLOG_DROPPED, client))

    def unblock(self, client: int, request_ids: list[str]) -> None:
        """Tell a client, whenever it comes back, that its requests have failed."""
        state = self._clients[client]
        with state.lock:
            # Some have come since the others ended.
            failed = (state.lost or set()).union(request_ids)
            state.lost = None
            outputs = EngineCoreOutputs(
                engine_index=self._engine_index,
                finished_requests=failed,
                outputs=[
                    EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR)
                    for request_id in failed
                ],
            )
            self._rings.send(client, OUTPUTS, self._encode(outputs), regardless=True)
            self._rings.unblock(client)


def _encodes_in_rust(engine: "EngineCoreProc") -> bool:
    """Return whether the scheduler can write outputs itself."""
    if not isinstance(engine.scheduler, SparkScheduler):
        return False
    difference = difference_from_vllm()
    if difference is None:
        return True
    compat.warn_or_raise(
        warning=f"sparksched: vLLM's encoder writes the outputs, not sparksched's: {difference}",
        error=f"sparksched's encoder of outputs doesn't equal vLLM's: {difference}",
    )
    return False


class _ClientState:
    """What the output side knows of a client that has rings."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lost: set[str] | None = None
        """Requests whose messages were dropped and that are about to be failed; None if all is
        well."""


def _must_arrive(outputs: EngineCoreOutputs) -> bool:
    """Whether somebody waits for exactly this message."""
    return outputs.utility_output is not None or outputs.wave_complete is not None


class _InputQueue(queue.Queue[Any]):
    """The engine's input queue. A loop that finds it empty receives from the rings meanwhile."""

    def __init__(self, ring_input: "_RingInput") -> None:
        super().__init__()
        self._ring_input = ring_input

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Put an item; never waits."""
        super().put(item)
        self._ring_input.notice_item()

    def put_received(self, item: Any) -> None:
        """Put an item that came through the rings: whoever receives looks here afterwards."""
        super().put(item)

    def empty(self) -> bool:
        """Whether nothing is there. The loop asks before each step, and before it waits."""
        self._ring_input.leave_to_thread_for_work()
        return super().empty()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Return the next item; the engine's loop waits without a time limit or not at all."""
        if block and timeout is None:
            while not self.qsize():
                self._ring_input.receive_in_loop()
        item = super().get(block, timeout)
        if item[0] not in _BRIEF:
            self._ring_input.leave_to_thread()
        return item


class _RingInput:
    """Receives from the rings and feeds the engine's input queue.

    Either the engine's loop or the input thread receives: `_receiving` is held by the one that
    does, from before it waits until it has handled what came, so that messages stay in order.
    """

    def __init__(self, engine: "EngineCoreProc", rings: "_core.EngineRings") -> None:
        self._engine = engine
        self._rings = rings
        tensors = engine.tensor_ipc_receiver
        self._add_request_decoder = MsgpackDecoder(EngineCoreRequest, oob_tensor_provider=tensors)
        self._generic_decoder = MsgpackDecoder(oob_tensor_provider=tensors)
        self._hung_up: set[int] = set()
        self.queue = _InputQueue(self)
        self._receiving = threading.Lock()
        self._is_thread_wanted = threading.Event()
        self._is_thread_wanted.set()
        self._is_loop_receiving = False

    def run(self) -> None:
        """Receive until the rings are closed."""
        try:
            while not self._rings.is_closed:
                self._is_thread_wanted.wait()
                with self._receiving:
                    if self._is_thread_wanted.is_set():
                        self._receive()
        except Exception as error:
            logger.exception("sparksched: the input thread failed")
            self.queue.put_nowait((_Notice.FAILED, error))

    def receive_in_loop(self) -> None:
        """Receive in the engine's loop, until something has come or an item was put."""
        self._is_thread_wanted.clear()
        self._is_loop_receiving = True
        try:
            if not self._receiving.acquire(blocking=False):
                self._rings.interrupt()  # the thread waits there
                self._receiving.acquire()
            try:
                # Whoever puts an item from now on sees who is receiving.
                if not self.queue.qsize():
                    self._receive(timeout_s=_SIGNAL_DELAY_S)
            finally:
                self._receiving.release()
        finally:
            self._is_loop_receiving = False

    def leave_to_thread(self) -> None:
        """Have the thread receive: the loop has something to do."""
        if not self._is_thread_wanted.is_set():
            self._is_thread_wanted.set()

    def leave_to_thread_for_work(self) -> None:
        """Have the thread receive if the loop is about to make a step."""
        if not self._is_thread_wanted.is_set() and self._engine.has_work():
            self._is_thread_wanted.set()

    def notice_item(self) -> None:
        """Have the loop look at its queue if it is receiving."""
        if not self._is_loop_receiving:
            return
        try:
            self._rings.interrupt()
        except Exception as error:
            # Whoever puts may be a thread of vLLM's that nobody would miss. The loop sees this as
            # soon as it looks up by itself.
            self.queue.put_received((_Notice.FAILED, error))
            raise

    def _receive(self, timeout_s: float | None = None) -> None:
        for event in self._rings.receive(timeout_s=timeout_s):
            self._handle(event)

    def _handle(self, event: Any) -> None:
        match event:
            case _core.RingMessage():
                self._handle_message(event)
            case _core.RingAttached():
                logger.info(
                    "sparksched: API server %d (process %d) uses shared memory",
                    event.client,
                    event.pid,
                )
                self.queue.put_received((_Notice.CLIENT_ATTACHED, event.client))
            case _core.RingRefused():
                logger.warning("sparksched: refused a connection: %s", event.reason)
            case _core.RingStuck():
                logger.warning(
                    "sparksched: API server %d is stuck: it hasn't run for %.1f s",
                    event.client,
                    event.seconds,
                )
            case _core.RingRecovered():
                logger.info("sparksched: API server %d runs again", event.client)
            case _core.RingEnd():
                log = logger.info if event.is_goodbye else logger.error
                log("sparksched: API server %d is gone: %s", event.client, event.reason)
                self.queue.put_received((_Notice.CLIENT_GONE, event.client))

    def _handle_message(self, message: "_core.RingMessage") -> None:
        if message.client in self._hung_up:
            return
        try:
            request_type, request = self._decode(message)
        except Exception:
            # Nobody knows which request this was: all that its sender waits for must fail.
            logger.exception("sparksched: API server %d sent a malformed message", message.client)
            self._hung_up.add(message.client)
            self._rings.hang_up(message.client)
            return
        if request_type == EngineCoreRequestType.ADD:
            self._add(request)
        elif request_type == EngineCoreRequestType.UTILITY:
            self._call(request)
        else:
            # In both queues, as in vLLM: at once in the midst of a step, and in order.
            self._engine.aborts_queue.put_nowait(request)
            self.queue.put_received((request_type, request))

    def _decode(self, message: "_core.RingMessage") -> tuple[EngineCoreRequestType, Any]:
        request_type = REQUEST_TYPES[message.kind]
        if request_type == EngineCoreRequestType.ADD:
            return request_type, self._add_request_decoder.decode(message.frames)
        request = self._generic_decoder.decode(message.frames)
        if request_type == EngineCoreRequestType.UTILITY:
            _client, _call_id, method, args = request
            if method == FT_UTILITY_METHOD:
                _command = args[0]
        elif not isinstance(request, list) or not all(isinstance(it, str) for it in request):
            raise TypeError("request ids are strings")
        return request_type, request

    def _add(self, request: EngineCoreRequest) -> None:
        engine = self._engine
        try:
            preprocessed = engine.preprocess_add_request(request)
        except MultiModalCacheMissError as error:
            engine._handle_mm_cache_miss(request, error)
        except Exception as error:
            self._fail(request, error)
        else:
            self.queue.put_received((EngineCoreRequestType.ADD, preprocessed))

    def _fail(self, request: EngineCoreRequest, error: Exception) -> None:
        """End a request that can't be prepared. Since vLLM 0.33.0 its client may learn why."""
        tell_client = getattr(self._engine, "_handle_request_validation_error", None)
        if tell_client is not None and isinstance(error, VLLMValidationError):
            tell_client(request, error)
        else:
            self._engine._handle_request_preproc_error(request)

    def _call(self, call: Any) -> None:
        client, call_id, method, args = call
        if method == FT_UTILITY_METHOD:
            # Handled here because the engine's loop is what may have failed.
            self._engine.ft_sentinel.handle_command(client, call_id, args[0])
        else:
            self.queue.put_received((EngineCoreRequestType.UTILITY, call))
