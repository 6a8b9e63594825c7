"""A burst of new requests is let in over several turns of the event loop.

A new request takes a few hundred microseconds in `AsyncLLM.add_request()`, and nothing in there
waits. When a step ends many requests, their clients send as many new ones, and one turn of the loop
would take them all: outputs of the others would wait for a tenth of a second. So a few are let in
in each turn, in the order in which they came. Whoever is to be aborted enters first: vLLM knows a
request by its id only from then on.
"""

import asyncio
import collections
import functools
from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from sparksched.compat import patching

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

PER_TURN: Final = 4
"""So many keep a turn short, about a millisecond, and turns cost little beside them."""

SHARE_PER_TURN: Final = 16
"""Of those who wait, one in so many at least: also where turns are long, nobody waits for ever."""


class Newcomers:
    """Requests that are about to enter one `AsyncLLM`; only its loop's thread uses this."""

    def __init__(self) -> None:
        self._waiting: collections.deque[tuple[str, asyncio.Future[None]]] = collections.deque()
        self._num_free = PER_TURN
        self._is_counting = False

    def enter(
        self, request_id: str, loop: asyncio.AbstractEventLoop
    ) -> "asyncio.Future[None] | None":
        """Return what a request has to await before it goes on; None if nothing."""
        if not self._is_counting:
            self._is_counting = True
            loop.call_soon(self._begin_turn, loop)
        if self._num_free:
            self._num_free -= 1
            return None
        turn = loop.create_future()
        self._waiting.append((request_id, turn))
        return turn

    def let_in(self, request_ids: Iterable[str]) -> bool:
        """Let those in at once that wait; return whether there were any."""
        wanted = set(request_ids)
        turns = [turn for name, turn in self._waiting if name in wanted and not turn.done()]
        for turn in turns:
            turn.set_result(None)
        return bool(turns)

    def _begin_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._num_free = most = max(PER_TURN, len(self._waiting) // SHARE_PER_TURN)
        while self._num_free and self._waiting:
            _, turn = self._waiting.popleft()
            if not turn.done():  # it may have been cancelled, or let in
                turn.set_result(None)
                self._num_free -= 1
        # While nobody comes there is nothing to count.
        self._is_counting = self._num_free < most
        if self._is_counting:
            loop.call_soon(self._begin_turn, loop)


def install(async_llm: ModuleType) -> None:
    """Let new requests wait for their turn."""
    patching.replace(async_llm.AsyncLLM, "add_request", _in_turns)
    patching.replace(async_llm.AsyncLLM, "abort", _once_they_are_in)


def _in_turns(original: patching.Function) -> patching.Function:
    @functools.wraps(original)
    async def add_request(self: "AsyncLLM", request_id: str, *args: Any, **kwargs: Any) -> Any:
        # One for which another engine holds something must not be cancelled while nobody knows it
        # here.
        config = self.vllm_config
        if config.kv_transfer_config is not None or config.ec_transfer_config is not None:
            return await original(self, request_id, *args, **kwargs)
        loop = asyncio.get_running_loop()
        newcomers = self.__dict__.get("sparksched_newcomers")
        if newcomers is None or newcomers[0] is not loop:
            newcomers = self.sparksched_newcomers = (loop, Newcomers())
        turn = newcomers[1].enter(request_id, loop)
        if turn is not None:
            await turn
        return await original(self, request_id, *args, **kwargs)

    return add_request


def _once_they_are_in(original: patching.Function) -> patching.Function:
    @functools.wraps(original)
    async def abort(
        self: "AsyncLLM", request_id: str | Iterable[str], *args: Any, **kwargs: Any
    ) -> Any:
        names = [request_id] if isinstance(request_id, str) else list(request_id)
        newcomers = self.__dict__.get("sparksched_newcomers")
        if newcomers is not None and newcomers[1].let_in(names):
            await asyncio.sleep(0)  # they go on before this does
        return await original(self, names, *args, **kwargs)

    return abort
