"""Times the scheduler inside a running vLLM engine, without a change to vLLM.

Each call of `schedule()` and `update_from_output()` adds a line of JSON to a file, at once: vLLM's
front end kills the engine when it stops, so that nothing can be left for the end of the process.
Writing is outside the time that is measured, which is the CPU time of the calling thread: other
processes on the machine don't add to it.
"""

import functools
import json
import time
from collections.abc import Callable
from types import ModuleType
from typing import IO, Any

from sparksched.compat.patching import after_import

SCHEDULERS = {
    "vllm.v1.core.sched.scheduler": "Scheduler",
    "sparksched.scheduler": "SparkScheduler",
}


def install(path: str) -> None:
    """Have both schedulers' calls timed once their modules are loaded."""
    recorder = _Recorder(path)

    def change(module: ModuleType) -> None:
        owner = getattr(module, SCHEDULERS[module.__name__])
        owner.schedule = recorder.timed(owner.schedule, lambda args, result: result)
        update = recorder.timed(owner.update_from_output, lambda args, result: args[1])
        owner.update_from_output = update

    for name in SCHEDULERS:
        after_import(name, change)


class _Recorder:
    """Appends one line for each timed call to a file."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def timed(
        self, method: Callable[..., Any], step_of: Callable[[tuple[Any, ...], Any], Any]
    ) -> Callable[..., Any]:
        """Return the method with its calls timed; `step_of` finds a call's SchedulerOutput."""

        @functools.wraps(method)
        def timed_method(*args: Any, **kwargs: Any) -> Any:
            before_ns = time.thread_time_ns()
            result = method(*args, **kwargs)
            cpu_ns = time.thread_time_ns() - before_ns
            self._record(args[0], method.__name__, step_of(args, result), cpu_ns)
            return result

        return timed_method

    def _record(self, scheduler: object, call: str, step: Any, cpu_ns: int) -> None:
        line = {
            "scheduler": type(scheduler).__name__,
            "call": call,
            "num_requests": len(step.num_scheduled_tokens),
            "num_tokens": step.total_num_scheduled_tokens,
            "cpu_us": cpu_ns / 1000,
        }
        if self._file is None:  # only the engine's process ever writes
            self._file = open(self._path, "a", buffering=1)  # noqa: SIM115 - open until it ends
        self._file.write(json.dumps(line) + "\n")
