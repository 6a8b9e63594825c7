"""When workers in processes of their own have launched a step, for just-in-time scheduling.

The engine hands them a step and goes on. Only they know what the host needs for it, so each output
of theirs carries the time along. Read beside `WorkerProc` in
`vllm/v1/executor/multiproc_executor.py`.
"""

import functools
import time
from types import ModuleType
from typing import Any, Final

from vllm.v1.outputs import AsyncModelRunnerOutput

from sparksched import patching

ATTRIBUTE: Final = "sparksched_launch_s"
"""What the time is called in a `ModelRunnerOutput`."""


def install(module: ModuleType) -> None:
    """Have workers say when they have launched a step."""
    patching.replace(module.WorkerProc, "handle_output", _with_launch_time)


def launch_of(output: Any) -> float | None:
    """Return when a step was launched, by `time.monotonic()`; None if its output doesn't tell."""
    return getattr(output, ATTRIBUTE, None)


def _with_launch_time(original: patching.Function) -> patching.Function:
    @functools.wraps(original)
    def handle_output(self: Any, output: Any) -> None:
        if isinstance(output, AsyncModelRunnerOutput):
            _add_time(output, time.monotonic())
        original(self, output)

    return handle_output


def _add_time(output: AsyncModelRunnerOutput, launch_s: float) -> None:
    def get_output() -> Any:
        del output.get_output  # the method of its class again: no cycle keeps its tensors
        result = output.get_output()
        setattr(result, ATTRIBUTE, launch_s)
        return result

    output.get_output = get_output
