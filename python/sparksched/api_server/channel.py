"""A client's rings to one engine, as far as clients with and without an event loop share it."""

import threading
import weakref
from typing import TYPE_CHECKING, Any, Final

from vllm.logger import init_logger
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.serial_utils import MsgpackDecoder

from sparksched import _core
from sparksched.shared.offer import ENGINE_DEAD

if TYPE_CHECKING:
    from vllm.v1.engine.core_client import BackgroundResources, MPClient

logger = init_logger("vllm.sparksched.transport")

MAX_MESSAGES: Final = 64
"""Messages that are taken from a ring before other work gets its turn."""


class Channel:
    """A client's rings to one engine. It holds no reference to the client, which is collected."""

    def __init__(self, client: "MPClient", rank: int, rings: "_core.ClientRings") -> None:
        self.rank = rank
        self.rings = rings
        self._client = weakref.ref(client)
        self._resources: BackgroundResources = client.resources
        self._outputs_queue = client.outputs_queue
        self._utility_results = client.utility_results
        self._decoder = MsgpackDecoder(EngineCoreOutputs)
        self._has_ended = False
        self._has_failed = False

    def start_reading(self, client: "MPClient") -> None:
        """Start to receive, if that is possible already."""
        raise NotImplementedError

    def close(self) -> None:
        """Say goodbye to the engine. Any thread may call this."""
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
        transport = getattr(self._resources, "sparksched_rings", None)
        is_drained = end.is_goodbye and transport is not None and transport.is_draining
        if client is None or not client._finalizer.alive or is_drained:
            # This side is closing down itself. An engine that was told to end as well has answered
            # its requests; others may still be answering.
            self._has_ended = True
            return
        log = logger.info if end.is_goodbye else logger.error
        log("sparksched: engine %d is gone: %s", self.rank, end.reason)
        self._resources.engine_dead = True
        if self._resources.engine_manager is not None:
            # vLLM's monitor leaves this to whoever has noticed first. Shutting down waits for
            # processes, which an event loop mustn't.
            threading.Thread(target=client.shutdown, name="RingShutdown", daemon=True).start()
        raise EngineDeadError

    def _fail(self, error: Exception) -> None:
        self._has_ended = self._has_failed = True
        if isinstance(error, EngineDeadError):
            # Where it was noticed says nothing, and its frames would keep this channel alive: they
            # hang from the queue, which hangs from them.
            error = error.with_traceback(None)
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
