"""An executor whose steps take a fixed time beside the engine's loop, as those of a GPU do."""

import time
from typing import Any

from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput

from testkit.executor import FakeExecutor

from .engines import PacedExecutor


class _Step:
    """As much of a launched step's future as the engine uses."""

    def __init__(self, output: Any, end_s: float) -> None:
        self._output = output
        self._end_s = end_s

    def done(self) -> bool:
        return time.monotonic() >= self._end_s

    def result(self) -> Any:
        time.sleep(max(0.0, self._end_s - time.monotonic()))
        return self._output


class TimedExecutor(PacedExecutor):
    """Has one step after the other take `on_set_step_s` seconds from its launch or its turn."""

    def _init_executor(self) -> None:
        super()._init_executor()
        self._end_s = 0.0

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        if scheduler_output.total_num_scheduled_tokens:
            self._end_s = max(time.monotonic(), self._end_s) + self._step_s
        return FakeExecutor.execute_model(self, scheduler_output, non_block)

    def sample_tokens(self, grammar_output: GrammarOutput | None, non_block: bool = False) -> Any:
        return _Step(super().sample_tokens(grammar_output), self._end_s)
