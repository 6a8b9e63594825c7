"""Garbage collections wait until streams have taken their outputs.

CPython collects when some hundreds more containers were made than freed. A step of 1,024 streams
brings some 5,000 containers. All are alive until the streams take them, two turns of the event loop
later. A collection in between frees nothing, and ages these outputs as if they were to last. Soon
CPython counts too many aged objects, and looks through the whole heap: that takes 10 ms and more
with 1,024 streams, and no stream gets anything meanwhile.

This module raises the threshold until the streams have had their turn. By then as many containers
are freed as were made. The threshold is never off, so garbage in cycles is still collected, only
later. If an application has set a higher threshold, or turned collections off, nothing is raised.
"""

import asyncio
import gc
import threading
from typing import Final

FEW_BYTES: Final = 64 * 128
"""Of encoded outputs that are received together; nothing is raised for so few. vLLM gives streams a
turn after 128 outputs, which keeps their containers few, and one of its OpenAI server has more than
64 bytes, for its id. Where ids are short, outputs may be more, and collections one or two."""

RAISED: Final = 100_003
"""Containers, as in `gc.set_threshold`: outputs of one turn are seldom as many. The number is odd,
so that what is found to be set to it was set here."""


class LaterCollections:
    """One reader's wish for a raised threshold, from when it decodes until streams have it all."""

    def __init__(self) -> None:
        self._num_receptions = 0

    def begin(self) -> None:
        """Note that outputs are about to be decoded; to be followed by `end_after_streams`."""
        with _threshold.lock:
            self._num_receptions += 1
            if self._num_receptions == 1:
                _threshold.raise_for(self)

    def end_after_streams(self, loop: asyncio.AbstractEventLoop) -> None:
        """Note that they are decoded, and about to be processed."""
        # In the next turn they are processed, in the second one the streams take them. What is
        # called then comes after these, as it is in each turn the last to be asked for.
        loop.call_soon(loop.call_soon, self._end)

    def close(self) -> None:
        """Wish for nothing any more: the loop may not get to it. Any thread may call this."""
        with _threshold.lock:
            self._num_receptions = 0
            _threshold.lower_for(self)

    def _end(self) -> None:
        with _threshold.lock:
            self._num_receptions = max(0, self._num_receptions - 1)  # 0 if closed meanwhile
            if not self._num_receptions:
                _threshold.lower_for(self)


class _Threshold:
    """The youngest generation's, in this process: raised as long as any reader wants that.

    What is set says whether it is raised, so that this mends itself if somebody saves thresholds
    while they are raised, and sets them again later.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Whoever calls the functions below holds it.

        It can be taken again by its thread: a collection that begins meanwhile may find a client,
        whose finalizer closes its readers.
        """
        self._readers: set[LaterCollections] = set()
        self._usual: tuple[int, ...] | None = None
        """What was set before the threshold was last raised."""

    def raise_for(self, reader: LaterCollections) -> None:
        self._readers.add(reader)
        found = gc.get_threshold()
        # 0 turns collections off, like `gc.disable`.
        if gc.isenabled() and 0 < found[0] < RAISED:
            self._usual = found
            gc.set_threshold(RAISED, *found[1:])
            if reader not in self._readers:  # closed by a collection meanwhile
                self.lower_for(reader)

    def lower_for(self, reader: LaterCollections) -> None:
        self._readers.discard(reader)
        if not self._readers and self._usual is not None and gc.get_threshold()[0] == RAISED:
            gc.set_threshold(*self._usual)


_threshold = _Threshold()
