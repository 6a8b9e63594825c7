"""Times the scheduler inside a running vLLM engine, without a change to vLLM.

Each call of `schedule()` and `update_from_output()` adds a line of JSON to a file, at once: vLLM's
front end kills the engine when it stops. What is timed is the CPU time of the calling thread, so
that other processes on the machine don't add to it.
"""

import functools
import json
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from sparksched.compat.patching import after_import

SCHEDULERS = {
    "vllm.v1.core.sched.scheduler": "Scheduler",
    "sparksched.scheduler": "SparkScheduler",
}


def install(path: str) -> None:
    """Have both schedulers' calls timed once their modules are loaded."""

    def change(module: ModuleType) -> None:
        owner = getattr(module, SCHEDULERS[module.__name__])
        for call in ("schedule", "update_from_output"):
            setattr(owner, call, _timed(getattr(owner, call), Path(path)))

    for name in SCHEDULERS:
        after_import(name, change)


def _timed(method: Any, path: Path) -> Any:
    @functools.wraps(method)
    def timed_method(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        before_ns = time.thread_time_ns()
        result = method(scheduler, *args, **kwargs)
        cpu_ns = time.thread_time_ns() - before_ns
        step = result if method.__name__ == "schedule" else args[0]
        line = {
            "scheduler": type(scheduler).__name__,
            "call": method.__name__,
            "num_requests": len(step.num_scheduled_tokens),
            "num_tokens": step.total_num_scheduled_tokens,
            "cpu_us": cpu_ns / 1000,
        }
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return result

    return timed_method
