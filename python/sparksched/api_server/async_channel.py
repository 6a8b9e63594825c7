"""Rings of a client that has an event loop.

`AsyncChannel._on_event` does what `process_outputs_socket` of vLLM's `AsyncMPClient` does
(`vllm/v1/engine/core_client.py`). vLLM's own goes on beside it, for engines on ZMQ.
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
from sparksched.api_server.channel import MAX_MESSAGES, Channel
from sparksched.api_server.errors import EngineBusyError

if TYPE_CHECKING:
    from vllm.v1.engine.core_client import AsyncMPClient, MPClient

_ABORT: Final = EngineCoreRequestType.ABORT.value[0]
"""Kind of an abort: the byte that vLLM sends as a frame of its own."""

MAX_OUTPUTS: Final = 4096
"""About how many outputs are taken in one turn: processing so many takes some 30 ms."""


_SOON_S: Final = 0.01
"""The least time between two looks whether an engine makes room."""


class _Sent:
    """To be awaited when there is nothing to wait for."""

    def __await__(self) -> Generator[None, None, None]:
        yield from ()


SENT: Final = _Sent()


class Waiting:
    """A message that waits for room in its ring; to be awaited until it is sent."""

    def __init__(
        self,
        kind: int,
        encode: Callable[[], Any],
        request_id: str | None,
        on_dropped: Callable[[], object] | None,
        encode_abort: Callable[[], Any] | None,
    ) -> None:
        self.kind = kind
        self.request_id = request_id
        self.future = asyncio.get_running_loop().create_future()
        self.ticket: int | None = None
        """Set when it is encoded and given to the rings: from then on the engine gets it."""
        self.is_aborted = False
        """Whether nobody waits for it any more, but the engine has to get it for all that."""
        self._encode: Callable[[], Any] | None = encode
        self._on_dropped = on_dropped
        self.encode_abort = encode_abort

    def __await__(self) -> Generator[Any, None, None]:
        try:
            yield from self.future.__await__()
        finally:
            self.abort()

    def take_frames(self) -> Any:
        """Encode it, once."""
        assert self._encode is not None
        encode, self._encode = self._encode, None
        return encode()

    def abort(self) -> None:
        """Never send it, unless it is sent already or the engine has to get it."""
        if self.encode_abort is None:
            self.drop()
        else:
            self.is_aborted = True

    def drop(self) -> None:
        """Never send it, unless it is sent already; whoever counts on it is told."""
        if self._encode is not None:
            self._encode = None
            if self._on_dropped is not None:
                self._on_dropped()

    @property
    def is_dropped(self) -> bool:
        """Whether nobody needs it any more."""
        return self.ticket is None and self._encode is None


class AsyncChannel(Channel):
    """Rings of a client that lives in an event loop; only that loop's thread uses them."""

    def __init__(self, client: "AsyncMPClient", rank: int, rings: "_core.ClientRings") -> None:
        super().__init__(client, rank, rings)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fileno = rings.fileno()
        # In the order in which they came. The first may be in the ring in part.
        self._waiting: collections.deque[Waiting] = collections.deque()
        self._timer: asyncio.TimerHandle | None = None
        self._num_outputs = 0
        self._max_messages = MAX_MESSAGES
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
        self._receive(self._max_messages)
        if self._waiting and not self._has_ended:
            self._send_waiting()
        if self._has_ended:
            self._stop_reading()

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
            self._outputs_queue.put_nowait(outputs)
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
        if self._timer is not None:
            self._timer.cancel()
        self._fail_waiting(EngineDeadError)
        self._fail_calls()

    def close(self) -> None:
        """Say goodbye to the engine."""
        # At once, whatever thread this is and whether the loop still runs; only what belongs to
        # the loop waits for it.
        self._has_ended = True
        self.rings.close()
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._stop_reading)

    # Sending

    def send(
        self,
        kind: int,
        encode: Callable[[], Any],
        request_id: str | None = None,
        on_dropped: Callable[[], object] | None = None,
        encode_abort: Callable[[], Any] | None = None,
    ) -> Awaitable[None]:
        """Send now; what is returned is to be awaited for room in the ring, if that is lacking.

        Messages keep their order. One is encoded when all before it are in the ring: so what waits
        takes no more memory than its sender's objects do, but for one message.

        Args:
            kind: As in `ClientRings.send`.
            encode: Returns the frames; called at most once.
            request_id: Of the request that this brings, which `abort` may have dropped.
            on_dropped: Called if the message will never be sent.
            encode_abort: Of a request that the engine has to get even if it is aborted while it
                waits. Returns the frames of an abort, which then follows it.

        Raises:
            EngineBusyError: if the engine has made no room for too long; awaiting raises it, too.
            EngineDeadError: if the engine is gone.

        """
        waiting_for_s = self.rings.without_room_for_s
        if not self._waiting and waiting_for_s is None:
            ticket = self._write(kind, encode())
            if self.rings.sent_before() > ticket:
                return SENT
            waiting = Waiting(kind, encode, request_id, on_dropped=None, encode_abort=None)
            waiting.ticket = ticket
        elif waiting_for_s is not None and waiting_for_s >= environment.stuck_after_s():
            if on_dropped is not None:
                on_dropped()
            raise _no_room()
        else:
            waiting = Waiting(kind, encode, request_id, on_dropped, encode_abort)
        self._waiting.append(waiting)
        self._watch_room()
        return waiting

    def abort(self, request_ids: Sequence[str], frames: Any) -> None:
        """Send an abort past all that waits; requests among that are dropped, if they may be."""
        names = set(request_ids)
        for waiting in self._waiting:
            if waiting.request_id in names:
                if waiting.ticket is None:
                    waiting.abort()
                if not waiting.future.done():
                    waiting.future.set_result(None)
        # If the engine is gone, the requests end with it; the ring says so in its turn.
        with contextlib.suppress(EngineDeadError):
            self._write(_ABORT, frames)

    def _write(self, kind: int, frames: Any) -> int:
        try:
            return self.rings.send(kind, frames)
        except ConnectionError as error:
            raise EngineDeadError from error

    def _send_waiting(self) -> None:
        """Send what has waited, as far as there is room, and wake its senders."""
        while self._waiting:
            first = self._waiting[0]
            try:
                if first.ticket is None and not first.is_dropped:
                    if self.rings.without_room_for_s is not None:
                        return
                    first.ticket = self._write(first.kind, first.take_frames())
                    if first.is_aborted and first.encode_abort is not None:
                        self._write(_ABORT, first.encode_abort())
                if first.ticket is not None and self.rings.sent_before() <= first.ticket:
                    return
            except Exception as error:  # of this one: it can't be encoded, or has no end
                if not first.future.done():
                    first.future.set_exception(error)
            self._waiting.popleft()
            if not first.future.done():
                first.future.set_result(None)

    def _watch_room(self) -> None:
        """Look again when the engine may have made no room for too long."""
        assert self._loop is not None
        if self._timer is None and self._waiting:
            left_s = environment.stuck_after_s() - (self.rings.without_room_for_s or 0.0)
            self._timer = self._loop.call_later(max(left_s, _SOON_S), self._refuse_if_stuck)

    def _refuse_if_stuck(self) -> None:
        self._timer = None
        waiting_for_s = self.rings.without_room_for_s
        if waiting_for_s is not None and waiting_for_s >= environment.stuck_after_s():
            self._fail_waiting(_no_room)
        self._watch_room()

    def _fail_waiting(self, make_error: Callable[[], Exception]) -> None:
        while self._waiting:
            waiting = self._waiting.popleft()
            waiting.drop()
            if not waiting.future.done():
                waiting.future.set_exception(make_error())


def _no_room() -> EngineBusyError:
    return EngineBusyError(environment.stuck_after_s())


def _run_now(coroutine: Any) -> None:
    """Run a coroutine that never waits: vLLM's observer of outputs is one."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    coroutine.close()
    raise RuntimeError(f"{coroutine.__qualname__} was expected not to wait for anything")
