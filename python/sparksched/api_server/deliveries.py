"""How long a step's outputs take in the API server: from the transport to their streams.

From the moment at which they are taken from the rings, undecoded, or from ZMQ's queue, decoded,
until each stream has its own. Outputs wait for the event loop in between: this grows when an API
server has more to do than it can.
"""

import functools
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from prometheus_client import Histogram

from sparksched.compat import patching

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.output_processor import OutputProcessor

_under_way: ContextVar[tuple[Histogram, float] | None] = ContextVar("under_way", default=None)
"""Where to count the outputs that this task or thread is processing, and when they came."""


class Deliveries:
    """Times the deliveries of one client."""

    def __init__(self, histograms: dict[int, Histogram]) -> None:
        self._histograms = histograms
        """By rank of the engine."""
        self._received_at: dict[int, float] = {}
        """By identity of outputs that are in the client's queue, which keeps them alive."""

    def note_reception(self, outputs: "EngineCoreOutputs", received_at: float) -> None:
        """Note when outputs came that are about to be put into the client's queue."""
        if outputs.outputs:
            self._received_at[id(outputs)] = received_at

    def watch(self, queue: Any) -> None:
        """Begin a delivery whenever outputs are taken from a client's queue, of either kind.

        Both kinds take through `_get`, which is there to be replaced. The client's own function
        stays the one that waits: what it raises has no frame of ours.
        """
        take = queue._get

        def take_and_begin() -> Any:
            outputs = take()
            if not isinstance(outputs, Exception):
                self.begin(outputs)
            return outputs

        queue._get = take_and_begin

    def begin(self, outputs: "EngineCoreOutputs") -> None:
        """Begin to deliver outputs that were taken from the queue."""
        received_at = self._received_at.pop(id(outputs), None)
        histogram = self._histograms.get(outputs.engine_index)
        if histogram is None or not outputs.outputs:
            _under_way.set(None)
            return
        _under_way.set((histogram, time.monotonic() if received_at is None else received_at))


def _ending(original: patching.Function) -> patching.Function:
    @functools.wraps(original)
    def update_scheduler_stats(self: "OutputProcessor", scheduler_stats: Any) -> None:
        under_way = _under_way.get()
        if under_way is not None:
            histogram, received_at = under_way
            histogram.observe(time.monotonic() - received_at)
            _under_way.set(None)
        original(self, scheduler_stats)

    return update_scheduler_stats
