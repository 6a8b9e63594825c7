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
    """Return how many were compiled since the last call; None if that isn't known.

    The first call begins, and so has nothing to return.
    """
    watch = getattr(worker, WATCH, None)
    if watch is None:
        from vllm.utils import jit_monitor

        # It has Triton call hooks also for kernels that Triton can't describe to them.
        if not jit_monitor.is_active():
            return None
        from triton import knobs

        watch = Compilations(knobs.runtime)
        setattr(worker, WATCH, watch)
    return watch.take()


class Compilations:
    """Is called by Triton after it has compiled a kernel, and calls whom it called before.

    A kernel that Triton finds on disk counts as well.
    """

    def __init__(self, hooks: Any) -> None:
        """Begin.

        Args:
            hooks: Triton's `knobs.runtime`.

        """
        self._number = 0
        self._after = hooks.jit_post_compile_hook
        hooks.jit_post_compile_hook = self._note

    def take(self) -> int:
        """Return how many were compiled since the last call."""
        number, self._number = self._number, 0
        return number

    def _note(self, **about: Any) -> Any:
        self._number += 1
        return None if self._after is None else self._after(**about)
