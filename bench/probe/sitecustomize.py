"""Times the scheduler inside a running vLLM engine, without a change to vLLM.

Python imports a module of this name when it starts, if its directory is on PYTHONPATH. With
SPARKSCHED_DEMO_PROBE=FILE in the environment, each call of `schedule()` and
`update_from_output()` then adds a line of JSON to FILE. Without it, nothing happens.

Lines are written at once: vLLM's front end kills the engine when it stops, so that nothing can
be left for the end of the process. Writing is outside the time that is measured, which is the
CPU time of the calling thread: other processes on the machine don't add to it.
"""

import functools
import importlib.abc
import importlib.machinery
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import IO, Any, ParamSpec, Protocol, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


SCHEDULERS = {
    "vllm.v1.core.sched.scheduler": "Scheduler",
    "sparksched.scheduler": "SparkScheduler",
}


class Step(Protocol):
    """What is read of vLLM's SchedulerOutput."""

    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int


class _SchedulerFinder(importlib.abc.MetaPathFinder):
    """Finds the modules of schedulers as usual, and has their classes wrapped once loaded."""

    def __init__(self, recorder: "_Recorder") -> None:
        self._recorder = recorder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in SCHEDULERS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            self._wrap_after_loading(spec.loader, SCHEDULERS[fullname])
        return spec

    def _wrap_after_loading(self, loader: importlib.abc.Loader, class_name: str) -> None:
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            scheduler_class = getattr(module, class_name)
            scheduler_class.schedule = self._recorder.timed(
                scheduler_class.schedule, step_of=lambda args, result: result
            )
            scheduler_class.update_from_output = self._recorder.timed(
                scheduler_class.update_from_output, step_of=lambda args, result: args[1]
            )

        loader.exec_module = exec_module  # type: ignore[method-assign]


class _Recorder:
    """Appends one line for each timed call to a file."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def timed(
        self,
        method: Callable[Parameters, Result],
        step_of: Callable[[tuple[Any, ...], Any], Step],
    ) -> Callable[Parameters, Result]:
        """Return the method with its calls timed; `step_of` finds a call's SchedulerOutput."""

        @functools.wraps(method)
        def timed_method(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            before_ns = time.thread_time_ns()
            result = method(*args, **kwargs)
            cpu_ns = time.thread_time_ns() - before_ns
            self._record(args[0], method.__name__, step_of(args, result), cpu_ns)
            return result

        return timed_method

    def _record(self, scheduler: object, call: str, step: Step, cpu_ns: int) -> None:
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


def _install() -> None:
    path = os.environ.get("SPARKSCHED_DEMO_PROBE")
    if path:
        sys.meta_path.insert(0, _SchedulerFinder(_Recorder(path)))


_install()
