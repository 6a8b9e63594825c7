"""Notes CPython's garbage collections in this process, for as long as one wants to."""

import gc
import threading
import time
from dataclasses import dataclass
from typing import Any

from bench.serving.timers import Span


@dataclass(frozen=True)
class Collection(Span):
    """One collection. Whichever thread runs it, no other one gets the interpreter meanwhile.

    Its CPU time is what it took of the thread that watches: 0 if another one ran it.
    """

    generation: int


class GarbageWatch:
    """Notes each collection that begins and ends until `stop`."""

    def __init__(self) -> None:
        """Begin, for the thread that calls this."""
        self._thread = threading.get_ident()
        self._begun: tuple[int, int] | None = None
        self._collections: list[Collection] = []
        gc.callbacks.append(self._note)

    def stop(self) -> list[Collection]:
        """Note no more; return what was noted, in order."""
        gc.callbacks.remove(self._note)
        return self._collections

    def _note(self, phase: str, info: dict[str, Any]) -> None:
        # Collections don't nest, and begin and end on the same thread.
        if phase == "start":
            self._begun = (time.monotonic_ns(), self._spent_ns())
        elif self._begun is not None:
            (start_ns, spent_ns), self._begun = self._begun, None
            cpu_ns = self._spent_ns() - spent_ns
            wall_ns = time.monotonic_ns() - start_ns
            self._collections.append(Collection(start_ns, wall_ns, cpu_ns, info["generation"]))

    def _spent_ns(self) -> int:
        """Return the CPU time of the thread that watches, if that is the one that asks."""
        return time.thread_time_ns() if threading.get_ident() == self._thread else 0
