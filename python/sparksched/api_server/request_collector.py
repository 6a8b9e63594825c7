"""How a stream waits for its next output: on a future that exists only while the stream waits.

Read it beside `RequestOutputCollector` in vLLM's `v1/engine/output_processor.py`. vLLM sets and
clears an `asyncio.Event`, `ready`, for each token. The event keeps a queue of waiters, though there
is only one. Here nobody waits for `ready`. The rest is as in vLLM: what is merged, replaced and
raised, and in which turn of the event loop a consumer wakes.

vLLM's subclass for streaming input (since 0.33.0) puts the next output into `output` in `get` and
`get_nowait`, then sets `ready`. That works here, because a consumer looks at `output` before it
waits.

While `output` holds nothing but plain outputs, `plain_output` is the same object.
`output_processor.py` sets `plain_output` and writes the next plain output into it, so that `put`
gets no further object to merge. `get_nowait` stays vLLM's. It takes `output` and leaves
`plain_output` as it is: the two are then no longer the same object.
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
