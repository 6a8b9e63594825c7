"""An executor whose model is spread over the stages of a pipeline, without a GPU and workers."""

import pickle
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from vllm.distributed.utils import get_pp_indices
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.outputs import ModelRunnerOutput

from .device import Device, ends_of_computed_tokens
from .executor import FakeExecutor


class PipelineExecutor(FakeExecutor):
    """Answers late and in order, and insists that its first stage has the tokens to compute.

    What the engine asks for is packed at once, as for other processes, and carried out when its
    answer is waited for, behind all that was asked for earlier.
    """

    supports_pp = True

    def _init_executor(self) -> None:
        super()._init_executor()
        self._num_stages: int = self.parallel_config.pipeline_parallel_size
        self._first_stage = FirstStage(
            self._num_stages, hears_the_last=self.scheduler_config.async_scheduling
        )
        self._awaited: deque[_Answer] = deque()

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        [specs] = super().get_kv_cache_specs()
        layers = list(specs.items())
        stages = range(self._num_stages)
        bounds = [get_pp_indices(len(layers), stage, self._num_stages) for stage in stages]
        return [dict(layers[start:end]) for start, end in bounds]

    def determine_available_memory(self) -> list[int]:
        memory: list[int] = super().determine_available_memory()
        return memory * self._num_stages

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        layouts: list[list[str]] = super().get_supported_kv_cache_layouts()
        return layouts * self._num_stages

    def collective_rpc(self, *args: Any, **kwargs: Any) -> Any:
        return super().collective_rpc(*args, **kwargs) * self._num_stages

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        return self._ask(self._execute, scheduler_output, non_block)

    def sample_tokens(self, grammar_output: GrammarOutput | None, non_block: bool = False) -> Any:
        return self._ask(self._sample, grammar_output, non_block)

    def _ask(self, carry_out: Callable[[Any], Any], request: object, non_block: bool) -> Any:
        message = pickle.dumps(request)
        answer = _Answer(self._awaited, partial(_carry_out, carry_out, message))
        return answer if non_block else answer.result()

    def _execute(self, step: SchedulerOutput) -> ModelRunnerOutput | None:
        output: ModelRunnerOutput | None = super().execute_model(step)
        self._first_stage.update(step)
        self._first_stage.check(step, self.device)
        return output

    def _sample(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        output: ModelRunnerOutput = super().sample_tokens(grammar_output)
        self._first_stage.hear(output)
        return output


def _carry_out(function: Callable[[Any], Any], message: bytes) -> Any:
    return function(pickle.loads(message))


class _Answer(Future[Any]):
    """Comes when it is waited for, after all that were promised before."""

    def __init__(self, awaited: "deque[_Answer]", give: Callable[[], Any]) -> None:
        super().__init__()
        self._awaited = awaited
        self._give = give
        awaited.append(self)

    def result(self, timeout: float | None = None) -> Any:
        while not self.done():
            earliest = self._awaited.popleft()
            earliest.set_result(earliest._give())
        return super().result(timeout)


class FirstStage:
    """What a pipeline's first stage knows of each request's tokens, which the last one samples.

    With synchronous scheduling the scheduler tells it. With asynchronous the last stage does, and
    then it hears in each step what was sampled as many steps before as there are stages.
    """

    def __init__(self, num_stages: int, hears_the_last: bool) -> None:
        self._hears_the_last = hears_the_last
        self._tokens: dict[str, list[int]] = {}
        self._on_the_way: deque[dict[str, list[int]]] = deque({} for _ in range(num_stages))

    def update(self, step: SchedulerOutput) -> None:
        """Begin a step: take in what has arrived and what the scheduler says."""
        for request_id, token_ids in self._on_the_way.popleft().items():
            self._tokens[request_id] += token_ids
        self._on_the_way.append({})
        for request_id in step.finished_req_ids:
            self._forget(request_id)
        for new in step.scheduled_new_reqs:
            self._forget(new.req_id)
            self._tokens[new.req_id] = list(new.prefill_token_ids or new.prompt_token_ids or ())
        if not self._hears_the_last:
            self._be_told(step)

    def hear(self, output: ModelRunnerOutput) -> None:
        """Send off what was sampled in the latest step."""
        if self._hears_the_last:
            sampled = zip(output.req_ids, output.sampled_token_ids, strict=True)
            self._on_the_way[-1].update(sampled)

    def check(self, step: SchedulerOutput, device: Device) -> None:
        """Fail if a token to be computed isn't known here, or isn't what was sampled."""
        for request_id, end in ends_of_computed_tokens(step).items():
            start = end - step.num_scheduled_tokens[request_id]
            known = self._tokens[request_id][start:end]
            assert len(known) == end - start, f"{request_id}: a token has not arrived yet"
            assert known == device.tokens_of(request_id)[start:end], f"{request_id}: another token"

    def _be_told(self, step: SchedulerOutput) -> None:
        cached = step.scheduled_cached_reqs
        for request_id, start, token_ids in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_token_ids, strict=True
        ):
            self._tokens[request_id][start : start + len(token_ids)] = token_ids

    def _forget(self, request_id: str) -> None:
        self._tokens.pop(request_id, None)
        for tokens in self._on_the_way:
            tokens.pop(request_id, None)
