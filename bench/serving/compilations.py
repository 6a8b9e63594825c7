"""Notes which Triton kernels a worker compiles while it serves, and how long each takes.

vLLM compiles kernels for the batches that it expects before it serves. A step whose batch is of
another shape waits for seconds until its kernels are there, and so do all requests in it: what
they then wait for their first token is no matter of the scheduler.
"""

import time
from collections import Counter
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from bench.serving.evaluate import missing

Row = dict[str, Any]
Compiled = list[tuple[str, float]]
"""Names of kernels, and seconds."""

WATCH = "bench_compilations"
"""Attribute of a worker that is being looked at."""


def install(module: ModuleType) -> None:
    """Give workers a method that engines call."""
    module.WorkerBase.bench_take_compiled = _take_compiled  # type: ignore[attr-defined]


def _take_compiled(worker: Any) -> Compiled | None:
    """Return what has been compiled since the last call; None if that isn't known.

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
    """Is called by Triton before and after it compiles a kernel, and calls whom it called before.

    A kernel that Triton finds on disk counts as well, for as long as it takes to load.
    """

    def __init__(self, hooks: Any) -> None:
        """Begin.

        Args:
            hooks: Triton's `knobs.runtime`.

        """
        self._compiled: Compiled = []
        self._begun = 0.0
        self._before, self._after = hooks.jit_cache_hook, hooks.jit_post_compile_hook
        hooks.jit_cache_hook, hooks.jit_post_compile_hook = self._begin, self._end

    def take(self) -> Compiled:
        """Return what has been compiled since the last call."""
        compiled, self._compiled = self._compiled, []
        return compiled

    def _begin(self, **about: Any) -> Any:
        self._begun = time.monotonic()
        # What is true keeps Triton from compiling.
        return None if self._before is None else self._before(**about)

    def _end(self, **about: Any) -> Any:
        seconds = time.monotonic() - self._begun
        self._compiled.append((getattr(about.get("fn"), "name", "unknown"), seconds))
        return None if self._after is None else self._after(**about)


def evaluate_compiled(workers: Sequence[Compiled | None]) -> Row:
    """Return how many kernels the worker has compiled that took longest, for how long, and which.

    Args:
        workers: What each has compiled.

    """
    known = [it for it in workers if it is not None]
    if not known:
        return missing("vLLM doesn't watch for compilations here")
    slowest = max(known, key=_seconds)
    kernels = dict(Counter(name for name, _ in slowest))
    return {"count": len(slowest), "seconds": _seconds(slowest), "kernels": kernels}


def _seconds(compiled: Compiled) -> float:
    return sum(seconds for _, seconds in compiled)
