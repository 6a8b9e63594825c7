"""Receives messages from clients for the engine.

Read `RingInput` beside vLLM's `process_input_sockets`, in `vllm/v1/engine/core.py`.
"""

import queue
import threading
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.multimodal.cache import MultiModalCacheMissError
from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType
from vllm.v1.fault_tolerance.engine_core_sentinel import FT_UTILITY_METHOD
from vllm.v1.serial_utils import MsgpackDecoder

from sparksched import _core
from sparksched.engine.notices import Notice
from sparksched.shared.offer import REQUEST_TYPES

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCoreProc

logger = init_logger("vllm.sparksched.transport")

_SIGNAL_DELAY_S = 1.0
"""How long a signal may wait for the engine's loop if another thread has caught it."""

_BRIEF = frozenset(
    {EngineCoreRequestType.ADD, EngineCoreRequestType.ABORT, EngineCoreRequestType.WAKEUP}
)
"""What the engine's loop handles in a moment: nobody has to receive meanwhile."""


class _InputQueue(queue.Queue[Any]):
    """The engine's input queue. A loop that finds it empty receives from the rings meanwhile."""

    def __init__(self, ring_input: "RingInput") -> None:
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


class RingInput:
    """Receives from the rings and feeds the engine's input queue.

    | who receives | while the loop | thread wanted | loop receiving | until |
    | --- | --- | --- | --- | --- |
    | the thread | makes steps, or handles a long item | yes | no | the queue is empty |
    | the loop | has nothing to do | no | yes | a message or an item has come |
    | nobody | handles brief items | no | no | it makes a step, or waits again |

    `_receiving` is held by the one that receives, from before it waits until it has handled what
    came, so that messages stay in order. It starts with the thread.
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
            self.queue.put_nowait((Notice.FAILED, error))

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
            self.queue.put_received((Notice.FAILED, error))
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
                self.queue.put_received((Notice.CLIENT_ATTACHED, event.client))
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
                self.queue.put_received((Notice.CLIENT_GONE, event.client))

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
