"""How a stream waits for its next output: on a future that exists only while it waits.

Read it beside `RequestOutputCollector` in vLLM's `v1/engine/output_processor.py`. There an
`asyncio.Event` is set and cleared for each token, and keeps a queue of waiters where there is one.
What is merged, replaced and raised stays the same, and so does the turn of the event loop in which
a consumer wakes. Only the attribute `ready` is no event any more. Of vLLM's own code nobody else
waits for it, and a subclass for streaming input (since 0.33.0) sets it in `get` and `get_nowait`,
having put the next output into `output`: there a consumer looks before it waits.

`plain_output` is what waits in `output`, as long as nothing but plain outputs are in it, or None.
`output_processor.py` sets it, and writes the next plain output into it, without one more object for
`put` to merge. That bypasses `put`, so only if that is ours when a stream begins.
"""

import asyncio
import functools
from typing import TYPE_CHECKING

from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind

from sparksched.compat import patching

if TYPE_CHECKING:
    from vllm.v1.engine.output_processor import RequestOutputCollector


def prepare(collector: "type[RequestOutputCollector]") -> None:
    """Give vLLM's collectors what our functions use."""
    collector.ready = _NoEvent()
    collector.plain_output = None
    collector.extends_plain_output = False  # for subclasses that don't call its `__init__`


class _NoEvent:
    """Takes the place of a collector's `asyncio.Event`."""

    def set(self) -> None:
        """Do nothing: whoever calls this is the consumer."""


def _without_event(original: patching.Function) -> patching.Function:
    from vllm.v1.engine.output_processor import RequestOutputCollector as collector

    put = collector.put  # ours, which is replaced first

    @functools.wraps(original)
    def init(
        self: "RequestOutputCollector", output_kind: RequestOutputKind, request_id: str
    ) -> None:
        self.aggregate = output_kind == RequestOutputKind.DELTA
        # A subclass, or another's `put`, may do anything with what comes.
        is_ours = type(self) is collector and collector.put is put
        self.extends_plain_output = is_ours and self.aggregate
        self.plain_output = None
        self.request_id = request_id
        self.output = None
        self._input_stream_task = None
        self._waiter = None
        self._create_future = None

    return init


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


def _clearing_no_event(original: patching.Function) -> patching.Function:
    @functools.wraps(original)
    def get_nowait(
        self: "RequestOutputCollector",
    ) -> RequestOutput | PoolingRequestOutput | None:
        output = self.output
        if output is not None:
            self.output = self.plain_output = None
            if isinstance(output, Exception):
                raise output
        return output

    return get_nowait
