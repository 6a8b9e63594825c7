"""Rings of a client that lives in an event loop.

Read it beside `AsyncMPClient` in `vllm/v1/engine/core_client.py`: `AsyncChannel._on_event` does
what its `process_outputs_socket` does, and goes on beside it.
"""

import asyncio
import collections
import contextlib
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, Final

from vllm.v1.engine import (
    EEP_NOTIFICATION_CALL_ID,
    FT_STATUS_CALL_ID,
    EngineCoreOutputs,
    EngineCoreRequestType,
)
from vllm.v1.engine.exceptions import EngineDeadError

from sparksched import _core, environment
from sparksched.api_server.channel import MAX_MESSAGES, Channel, EngineBusyError
from sparksched.api_server.garbage import FEW_BYTES, LaterCollections
from sparksched.api_server.turns import OthersTurns
from sparksched.shared.offer import MAX_BACKLOG_BYTES

if TYPE_CHECKING:
    from vllm.v1.engine.core_client import AsyncMPClient, MPClient

_ABORT: Final = EngineCoreRequestType.ABORT.value[0]
"""Kind of an abort: the byte that vLLM sends as a frame of its own."""

MAX_OUTPUTS: Final = 4096
"""About how many outputs are taken in one turn: processing so many takes some 30 ms."""


class _Sent:
    """To be awaited when there is nothing to wait for."""

    def __await__(self) -> Generator[None, None, None]:
        yield from ()


_SENT = _Sent()


class Waiting:
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


class AsyncChannel(Channel):
    """Rings of a client that lives in an event loop; only that loop's thread uses them."""

    def __init__(self, client: "AsyncMPClient", rank: int, rings: "_core.ClientRings") -> None:
        super().__init__(client, rank, rings)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fileno = rings.fileno()
        # In the order of their tickets.
        self._waiting: collections.deque[Waiting] = collections.deque()
        self._num_outputs = 0
        self._max_messages = MAX_MESSAGES
        self._others = OthersTurns()
        self._collections = LaterCollections()
        self._observe_outputs: Callable[[Any, EngineCoreOutputs], Any] | None = getattr(
            type(client), "process_engine_outputs", None
        )

    # Receiving

    def start_reading(self, client: "MPClient") -> None:
        """Start to receive, if a loop runs."""
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
            self._max_messages = min(max(max_messages, 1), MAX_MESSAGES)

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
        """Say goodbye to the engine."""
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
        waiting = Waiting(self.rings, ticket)
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
