"""Counts the Triton kernels that a worker compiles while it serves.

vLLM compiles kernels for the batches that it expects before it serves. A step whose batch is of
another shape waits for seconds until its kernels are there, and so do all requests in it: that is
no matter of the scheduler, and servers are warmed up until it doesn't happen any more.
"""

from types import ModuleType
from typing import Any

WATCH = "bench_compilations"
"""Attribute of a worker that is being looked at."""


def install(module: ModuleType) -> None:
    """Give workers a method that engines call."""
    module.WorkerBase.bench_take_compiled = _take_compiled  # type: ignore[attr-defined]


def _take_compiled(worker: Any) -> int | None:
    """Return how many were compiled since the last call; None without Triton.

    The first call begins, and so has nothing to return.
    """
    watch = getattr(worker, WATCH, None)
    if watch is None:
        try:
            from triton import knobs
        except ImportError:
            return None
        watch = Compilations(knobs.compilation)
        setattr(worker, WATCH, watch)
    return watch.take()


class Compilations:
    """Listens to Triton, and calls whom it called before.

    A kernel that Triton finds on the disk doesn't count: it is loaded within milliseconds.
    """

    def __init__(self, knobs: Any) -> None:
        """Begin.

        Args:
            knobs: Triton's `knobs.compilation`.

        """
        self._number = 0
        self._after = knobs.listener
        knobs.listener = self._note

    def take(self) -> int:
        """Return how many were compiled since the last call."""
        number, self._number = self._number, 0
        return number

    def _note(self, *, cache_hit: bool, **about: Any) -> None:
        self._number += not cache_hit
        if self._after is not None:
            self._after(cache_hit=cache_hit, **about)
