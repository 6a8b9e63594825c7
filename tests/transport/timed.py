"""Executors whose steps take a fixed time beside the engine's loop, as those of a GPU do."""

import time
from typing import Any

from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes

from testkit.executor import ASYNC_SCHEDULING, FakeExecutor, FakeModel

from .engines import STEP_S, PacedExecutor

LAUNCH_S = 0.002
"""What a worker needs to launch a step."""


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


class WorkerExecutor(MultiprocExecutor):
    """vLLM's executor for workers in processes of their own, over a worker without a GPU."""

    def _init_executor(self) -> None:
        self.scheduler_config.async_scheduling = self.vllm_config.additional_config[
            ASYNC_SCHEDULING
        ]
        self.parallel_config.worker_cls = "transport.timed.TimedWorker"
        super()._init_executor()


class _Output(AsyncModelRunnerOutput):
    """What a step has sampled, when it is over."""

    def __init__(self, output: ModelRunnerOutput, end_s: float) -> None:
        self._output = output
        self._end_s = end_s

    def get_output(self) -> ModelRunnerOutput:
        time.sleep(max(0.0, self._end_s - time.monotonic()))
        return self._output

    def get_kv_connector_output(self) -> None:
        return None


class TimedWorker:
    """As much of a worker as vLLM asks for: its launches take time, and its steps `set_step_s`."""

    def __init__(self, rank: int, **settings: Any) -> None:
        self.rank = rank
        self._fake: Any = FakeExecutor.__new__(FakeExecutor)
        self._fake.cache_config = settings["vllm_config"].cache_config
        self._model = FakeModel()
        self._executing: SchedulerOutput | None = None
        self._step_s = STEP_S
        self._end_s = 0.0

    def nothing(self, *args: Any, **settings: Any) -> None:
        """Stand for what needs a GPU."""

    init_device = load_model = set_kv_cache_layout = initialize_from_config = shutdown = nothing
    check_health = synchronize_device = nothing

    def compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(0.0, 0.0)

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def get_kv_cache_spec(self) -> Any:
        return self._fake.get_kv_cache_specs()[0]

    def determine_available_memory(self) -> int:
        return int(self._fake.determine_available_memory()[0])

    def get_supported_kv_cache_layouts(self) -> list[str]:
        layouts: list[str] = self._fake.get_supported_kv_cache_layouts()[0]
        return layouts

    def set_step_s(self, step_s: float) -> None:
        self._step_s = step_s

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput | None:
        self._model.update(step)
        if not step.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        time.sleep(LAUNCH_S)
        self._executing = step
        return None

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> _Output:
        assert self._executing is not None
        self._end_s = max(time.monotonic(), self._end_s) + self._step_s
        return _Output(self._model.sample(self._executing, {}), self._end_s)
