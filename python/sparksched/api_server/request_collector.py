"""How a stream waits for its next output: on a future that exists only while it waits.

Read it beside `RequestOutputCollector` in vLLM's `v1/engine/output_processor.py`. There the
`asyncio.Event` `ready` is set and cleared for each token, and keeps a queue of waiters where there
is one. Here nobody waits for it. What is merged, replaced and raised stays the same, and so does
the turn of the event loop in which a consumer wakes. vLLM's subclass for streaming input (since
0.33.0) sets `ready` in `get` and `get_nowait`, having put the next output into `output`: there a
consumer looks before it waits.

If nothing but plain outputs is in what waits in `output`, it is `plain_output` as well.
`output_processor.py` sets that, and writes the next plain output into it, without one more object
for `put` to merge. What was taken may still be `plain_output`, and then isn't `output` any more.
"""

import asyncio
import functools
from typing import TYPE_CHECKING

from vllm.outputs import PoolingRequestOutput, RequestOutput

from sparksched.compat import patching

if TYPE_CHECKING:
    from vllm.v1.engine.output_processor import RequestOutputCollector


def prepare(collector: "type[RequestOutputCollector]") -> None:
    """Give vLLM's collectors what our functions use."""
    collector.plain_output = None
    collector._waiter = None
    collector._create_future = None


def _waking_the_consumer(original: patching.Function) -> patching.Function:
    @functools.wraps(original)
    def put(
        self: "RequestOutputCollector", output: RequestOutput | PoolingRequestOutput | Exception
    ) -> None:
        self.plain_output = None
        if self.output is not None and not isinstance(output, Exception):
            original(self, output)  # it merges the two, and wakes nobody
            return
        self.output = output
        if self._waiter is not None:
            _wake(self._waiter)

    return put


def _waiting_for_a_future(original: patching.Function) -> patching.Function:
    @functools.wraps(original)
    async def get(self: "RequestOutputCollector") -> RequestOutput | PoolingRequestOutput:
        while (output := self.output) is None:
            if self._create_future is None:
                # Kept, because to ask which loop is running takes a system call.
                self._create_future = asyncio.get_running_loop().create_future
            waiter = self._create_future()
            if self._waiter is None or self._waiter.done():
                self._waiter = waiter
            else:
                # vLLM has one consumer for each collector. Should there be another, it's next.
                self._waiter.add_done_callback(functools.partial(_wake, waiter))
            await waiter
        self.output = self.plain_output = None
        if isinstance(output, Exception):
            raise output
        return output

    return get


def _wake(waiter: "asyncio.Future[None]", _: object = None) -> None:
    if not waiter.done():  # it is if it was woken before, or if the consumer was cancelled
        waiter.set_result(None)
