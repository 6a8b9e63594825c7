"""Times the phases of a running engine's loop, the same ones for any scheduler.

`install` gives vLLM's `EngineCore` methods that the benchmark calls through vLLM's utility calls:
`bench_describe`, `bench_start` and `bench_stop`. Between the latter two, calls of scheduler,
executor and output queue are timed; otherwise nothing is changed, and nothing costs anything.

The phases of a step are:

- schedule, update: the scheduler's two calls
- execute, sample: the executor's two calls, which launch the model's and the sampler's work
- wait: for results: a future's `result()`, and within other phases a GPU event or a worker's answer
- deliver: to put outputs into the engine's output queue; sparksched sends them in that call
- dummy: a batch of nothing, which an engine runs so that its peers' experts have all their parts
- peer: to agree with other engines on a step, which takes until the last one is there
"""

import functools
import json
import os
import threading
import time
from types import ModuleType
from typing import Any

from bench.serving.timers import Function, PhaseTimer, Replacements

SCHEDULE, EXECUTE, SAMPLE, WAIT, UPDATE, DELIVER, DUMMY, PEER = PHASES = (
    "schedule",
    "execute",
    "sample",
    "wait",
    "update",
    "deliver",
    "dummy",
    "peer",
)
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
            "threads": thread_names(),
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


def thread_names() -> dict[int, str]:
    """Return Python's names of this process's threads, by the kernel's ids."""
    return {it.native_id: it.name for it in threading.enumerate() if it.native_id is not None}


def _name(it: object) -> str:
    return f"{type(it).__module__}.{type(it).__qualname__}"


def _start(engine: Any) -> None:
    """Begin to time phases."""
    if hasattr(engine, PROBE):
        raise RuntimeError("phases are being timed already")
    setattr(engine, PROBE, EngineProbe(engine))


def _stop(engine: Any) -> str:
    """Put everything back; return as JSON what was timed."""
    probe: EngineProbe = getattr(engine, PROBE)
    delattr(engine, PROBE)
    return json.dumps(probe.stop())


def _take_compiled(engine: Any) -> str:
    """Return as JSON what each worker has compiled since the last call."""
    return json.dumps(engine.model_executor.collective_rpc("bench_take_compiled"))


class EngineProbe:
    """Times one engine's phases from its construction until `stop`. For the loop's thread."""

    def __init__(self, engine: Any) -> None:
        """Begin."""
        self._timer = PhaseTimer()
        self._sizes: list[tuple[int, int]] = []
        self._cpu_ns: list[int] = []
        self._replacements = Replacements()
        timed = self._timer.timed
        for owner, name, phase, on_result in (
            (engine.scheduler, "schedule", SCHEDULE, self._note_size),
            (engine.scheduler, "update_from_output", UPDATE, None),
            (engine.model_executor, "execute_model", EXECUTE, self._time_result),
            (engine.model_executor, "sample_tokens", SAMPLE, self._time_result),
            (engine.model_executor, "execute_dummy_batch", DUMMY, None),
            (engine.output_queue, "put_nowait", DELIVER, None),
        ):
            make = functools.partial(timed, phase=phase, on_result=on_result)
            self._replacements.replace(owner, name, make)
        for owner, name in _waits():
            make = functools.partial(timed, phase=WAIT, with_cpu=True)
            self._replacements.replace(owner, name, make)
        if engine.vllm_config.parallel_config.data_parallel_size > 1:
            self._time_agreements()

    def stop(self) -> dict[str, Any]:
        """Put everything back; return events and sizes of steps.

        Sizes are requests and tokens of each `schedule` event, and `cpu_ns` what the loop's thread
        has taken until its end.
        """
        self._replacements.put_back()
        return {
            "events": self._timer.events,
            "sizes": self._sizes,
            "cpu_ns": self._cpu_ns,
        }

    def _note_size(self, args: tuple[Any, ...], scheduled: Any) -> None:
        tokens = scheduled.total_num_scheduled_tokens
        self._sizes.append((len(scheduled.num_scheduled_tokens), tokens))
        self._cpu_ns.append(time.thread_time_ns())

    def _time_result(self, args: tuple[Any, ...], future: Any) -> None:
        """Time how long the engine waits for what an executor has launched."""
        if hasattr(future, "result"):
            future.result = self._timer.timed(future.result, WAIT, with_cpu=True)

    def _time_agreements(self) -> None:
        """Time how long the engine waits for its peers: in collectives of tensors in memory.

        Collectives of a GPU's tensors only launch work, and may be a part of the model's.
        """
        import torch.distributed

        def timing(reduce: Function) -> Function:
            timed = self._timer.timed(reduce, PEER, with_cpu=True)

            def reducing(tensor: Any, *args: Any, **kwargs: Any) -> Any:
                chosen = timed if tensor.device.type == "cpu" else reduce
                return chosen(tensor, *args, **kwargs)

            return reducing

        self._replacements.replace(torch.distributed, "all_reduce", timing)


def _waits() -> list[tuple[Any, str]]:
    """Return the functions in which an executor of vLLM's waits for GPU or worker."""
    import torch
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    waits: list[tuple[Any, str]] = [(MessageQueue, "dequeue")]
    if torch.cuda.is_available():
        waits.append((torch.cuda.Event, "synchronize"))
    return waits
