"""Notes the steps of a running engine's loop, and how long it waits in them, for any scheduler.

`install` gives vLLM's `EngineCore` methods that the benchmark calls through vLLM's utility calls:
`bench_describe`, `bench_start` and `bench_stop`. Between the latter two, calls of the scheduler are
noted and waits are timed; otherwise nothing is changed, and nothing costs anything.

An engine waits for results: in a future's `result()`, for a GPU event or for a worker's answer. And
it waits for other engines, to agree with them on a step.
"""

import json
import os
import time
from types import ModuleType
from typing import Any

from bench.serving.timers import Function, Replacements, WaitTimer

PROBE = "bench_probe"
"""Attribute of an engine that is being looked at."""


def install(core: ModuleType) -> None:
    """Give the engine the methods that the benchmark calls."""
    core.EngineCore.bench_describe = _describe
    core.EngineCore.bench_start = _start
    core.EngineCore.bench_stop = _stop
    core.EngineCore.bench_take_compiled = _take_compiled


def _describe(engine: Any) -> str:
    """Return as JSON what runs here."""
    config = engine.vllm_config
    return json.dumps(
        {
            "pid": os.getpid(),
            "scheduler": _name(engine.scheduler),
            "executor": _name(engine.model_executor),
            "is_async": bool(engine.async_scheduling),
            "num_requests": len(engine.scheduler.requests),
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "num_gpu_blocks": config.cache_config.num_gpu_blocks,
            "model_runner": "V2" if config.use_v2_model_runner else "V1",
        }
    )


def _name(it: object) -> str:
    return f"{type(it).__module__}.{type(it).__qualname__}"


def _start(engine: Any) -> None:
    """Begin to note steps."""
    if hasattr(engine, PROBE):
        raise RuntimeError("steps are being noted already")
    setattr(engine, PROBE, EngineProbe(engine))


def _stop(engine: Any) -> str:
    """Put everything back; return as JSON what was noted."""
    probe: EngineProbe = getattr(engine, PROBE)
    delattr(engine, PROBE)
    return json.dumps(probe.stop())


def _take_compiled(engine: Any) -> str:
    """Return as JSON how many kernels each worker has compiled since the last call."""
    return json.dumps(engine.model_executor.collective_rpc("bench_take_compiled"))


class EngineProbe:
    """Notes one engine's steps from its construction until `stop`. For the loop's thread."""

    def __init__(self, engine: Any) -> None:
        """Begin."""
        self._waits = WaitTimer()
        self._steps: list[tuple[int, ...]] = []
        self._replacements = Replacements()
        replace = self._replacements.replace
        replace(engine.scheduler, "schedule", self._noting)
        replace(engine.model_executor, "execute_model", self._timing_result)
        replace(engine.model_executor, "sample_tokens", self._timing_result)
        for owner, name in _waits():
            replace(owner, name, self._waits.timed)
        if engine.vllm_config.parallel_config.data_parallel_size > 1:
            import torch.distributed

            replace(torch.distributed, "all_reduce", self._timing_agreements)

    def stop(self) -> list[tuple[int, ...]]:
        """Put everything back; return of each step what was there when it was scheduled.

        That is requests and tokens; the time; the CPU time of the loop's thread so far; and for how
        long it had waited so far, with the CPU time of that. All times are in nanoseconds.
        """
        self._replacements.put_back()
        return self._steps

    def _noting(self, schedule: Function) -> Function:
        def noting(*args: Any) -> Any:
            scheduled = schedule(*args)
            size = len(scheduled.num_scheduled_tokens), scheduled.total_num_scheduled_tokens
            now = time.perf_counter_ns(), time.thread_time_ns()
            self._steps.append((*size, *now, self._waits.ns, self._waits.cpu_ns))
            return scheduled

        return noting

    def _timing_result(self, launch: Function) -> Function:
        """Time how long the engine waits for what an executor has launched."""

        def launching(*args: Any, **kwargs: Any) -> Any:
            future = launch(*args, **kwargs)
            if hasattr(future, "result"):
                future.result = self._waits.timed(future.result)
            return future

        return launching

    def _timing_agreements(self, reduce: Function) -> Function:
        """Time how long the engine waits for its peers: in collectives of tensors in memory.

        Collectives of a GPU's tensors only launch work, and may be a part of the model's.
        """
        timed = self._waits.timed(reduce)

        def reducing(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            chosen = timed if tensor.device.type == "cpu" else reduce
            return chosen(tensor, *args, **kwargs)

        return reducing


def _waits() -> list[tuple[Any, str]]:
    """Return the functions in which an executor of vLLM's waits for GPU or worker."""
    import torch
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    waits: list[tuple[Any, str]] = [(MessageQueue, "dequeue")]
    if torch.cuda.is_available():
        waits.append((torch.cuda.Event, "synchronize"))
    return waits
