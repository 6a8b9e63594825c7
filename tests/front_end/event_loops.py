"""Both event loops that vLLM runs in, and how time is told in them: in turns."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

EVENT_LOOPS = pytest.mark.parametrize(
    "new_event_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)

NewEventLoop = Callable[[], asyncio.AbstractEventLoop]


def run(new_event_loop: NewEventLoop, coroutine: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(asyncio.wait_for(coroutine, 60))


class Turns:
    """Counts the turns of the running event loop."""

    def __init__(self) -> None:
        self.count = 0
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            self.count += 1
            await asyncio.sleep(0)

    def stop(self) -> None:
        self._task.cancel()


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)
