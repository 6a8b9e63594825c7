"""Times the phases of a running engine's loop, the same ones for any scheduler.

`install` gives vLLM's `EngineCore` methods that the benchmark calls through vLLM's utility calls:
`bench_describe`, `bench_start` and `bench_stop`. Between the latter two, calls of scheduler,
executor and output queue are timed; otherwise nothing is changed, and nothing costs anything.

The phases of a step are:

- schedule, update: the scheduler's two calls
- execute, sample: the executor's two calls, which launch the model's and the sampler's work
- wait: for results: a future's `result()`, and within other phases a GPU event or a worker's answer
- deliver: to put outputs into the engine's output queue; sparksched sends them in that call
"""

import functools
import json
import os
import threading
import time
from types import ModuleType
from typing import Any

from bench.serving.timers import Function, PhaseTimer, Replacements

SCHEDULE, EXECUTE, SAMPLE, WAIT, UPDATE, DELIVER = PHASES = (
    "schedule",
    "execute",
    "sample",
    "wait",
    "update",
    "deliver",
)
MARK = "bench:"
"""What the names of phases begin with in a profiler's trace."""

ATTRIBUTE = "bench_probe"


def install(core: ModuleType) -> None:
    """Give the engine the methods that the benchmark calls."""
    core.EngineCore.bench_describe = _describe
    core.EngineCore.bench_start = _start
    core.EngineCore.bench_stop = _stop


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
        }
    )


def thread_names() -> dict[int, str]:
    """Return Python's names of this process's threads, by the kernel's ids."""
    return {it.native_id: it.name for it in threading.enumerate() if it.native_id is not None}


def _name(it: object) -> str:
    return f"{type(it).__module__}.{type(it).__qualname__}"


def _start(engine: Any, marks_trace: bool = False) -> None:
    """Begin to time phases; `marks_trace` shows them in a running torch profiler, too."""
    if hasattr(engine, ATTRIBUTE):
        raise RuntimeError("phases are being timed already")
    setattr(engine, ATTRIBUTE, EngineProbe(engine, marks_trace))


def _stop(engine: Any) -> str:
    """Put everything back; return as JSON what was timed."""
    probe: EngineProbe = getattr(engine, ATTRIBUTE)
    delattr(engine, ATTRIBUTE)
    return json.dumps(probe.stop())


class EngineProbe:
    """Times one engine's phases from its construction until `stop`. For the loop's thread."""

    def __init__(self, engine: Any, marks_trace: bool) -> None:
        """Begin."""
        self._timer = PhaseTimer(_trace_mark if marks_trace else None)
        self._sizes: list[tuple[int, int]] = []
        self._encodings: list[tuple[int, int]] = []
        self._replacements = Replacements()
        timed = self._timer.timed
        for owner, name, phase, on_result in (
            (engine.scheduler, "schedule", SCHEDULE, self._note_size),
            (engine.scheduler, "update_from_output", UPDATE, None),
            (engine.model_executor, "execute_model", EXECUTE, self._time_result),
            (engine.model_executor, "sample_tokens", SAMPLE, self._time_result),
            (engine.output_queue, "put_nowait", DELIVER, None),
        ):
            make = functools.partial(timed, phase=phase, on_result=on_result)
            self._replacements.replace(owner, name, make)
        for owner, name in _waits():
            make = functools.partial(timed, phase=WAIT, with_cpu=True)
            self._replacements.replace(owner, name, make)
        self._time_encoders()

    def stop(self) -> dict[str, Any]:
        """Put everything back; return events, sizes of steps and times of the encoder.

        Sizes are requests and tokens of each `schedule` event. Encodings are wall and CPU time of
        vLLM's encoder for a step's outputs, in ns, in whatever thread.
        """
        self._replacements.put_back()
        return {
            "events": self._timer.events,
            "sizes": self._sizes,
            "encodings": self._encodings,
        }

    def _note_size(self, args: tuple[Any, ...], scheduled: Any) -> None:
        self._sizes.append(
            (len(scheduled.num_scheduled_tokens), scheduled.total_num_scheduled_tokens)
        )

    def _time_result(self, args: tuple[Any, ...], future: Any) -> None:
        """Time how long the engine waits for what an executor has launched."""
        if hasattr(future, "result"):
            future.result = self._timer.timed(future.result, WAIT, with_cpu=True)

    def _time_encoders(self) -> None:
        from vllm.v1.engine import EngineCoreOutputs
        from vllm.v1.serial_utils import MsgpackEncoder

        def measuring(encode: Function) -> Function:
            def measured(encoder: Any, outputs: Any, *args: Any) -> Any:
                if not isinstance(outputs, EngineCoreOutputs) or not outputs.outputs:
                    return encode(encoder, outputs, *args)
                start, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
                result = encode(encoder, outputs, *args)
                spent_ns = time.thread_time_ns() - cpu_ns
                self._encodings.append((time.perf_counter_ns() - start, spent_ns))
                return result

            return measured

        for name in ("encode", "encode_into"):
            self._replacements.replace(MsgpackEncoder, name, measuring)


def _waits() -> list[tuple[Any, str]]:
    """Return the functions in which an executor of vLLM's waits for GPU or worker."""
    import torch
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    waits: list[tuple[Any, str]] = [(MessageQueue, "dequeue")]
    if torch.cuda.is_available():
        waits.append((torch.cuda.Event, "synchronize"))
    return waits


def _trace_mark(phase: str) -> Any:
    import torch

    return torch.profiler.record_function(MARK + phase)
