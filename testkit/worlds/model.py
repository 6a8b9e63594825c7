"""Stand-ins for what surrounds a scheduler: the model runner, grammars and the clock."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from vllm.compilation.cuda_graph import CUDAGraphStat
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    LogprobsLists,
    LogprobsTensors,
    ModelRunnerOutput,
)
from vllm.v1.request import Request

from .events import GrammarPlan
from .trace import EOS_TOKEN_ID, TraceGenerator


class FakeClock:
    """Replaces `time.monotonic`: stands still within one operation, so that both sides agree."""

    def __init__(self) -> None:
        self._now = 1000.0

    def advance(self) -> None:
        self._now += 0.125

    def __call__(self) -> float:
        return self._now


class FakeModel:
    """Computes what the model runner returns.

    Each sampled token is a function of the seed, the step and the request.
    """

    def __init__(self, seed: int, trace: TraceGenerator) -> None:
        self._seed = seed
        self._trace = trace
        self._counts_nans = trace.chance(0.2)
        self._reports_cudagraphs = trace.chance(0.3)
        self._counts_generated_tokens = trace.chance(0.3)

    def run(
        self, step_number: int, scheduler_output: SchedulerOutput, requests: Mapping[str, Request]
    ) -> ModelRunnerOutput:
        """Execute one scheduled step; must be called before anything else changes `requests`."""
        if not scheduler_output.num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        order = self._trace.runner_order(list(scheduler_output.num_scheduled_tokens))
        sampled = [
            # A step that leaves part of the prompt uncomputed samples nothing.
            [] if requests[request_id].is_prefill_chunk else [self._token(step_number, request_id)]
            for request_id in order
        ]
        return ModelRunnerOutput(
            req_ids=order,
            req_id_to_index={request_id: index for index, request_id in enumerate(order)},
            sampled_token_ids=sampled,
            logprobs=self._logprobs(step_number, [requests[request_id] for request_id in order]),
            prompt_logprobs_dict=self._prompt_logprobs(order, sampled, requests),
            num_nans_in_logits=self._num_nans(step_number, order),
            cudagraph_stats=CUDAGraphStat(step_number, step_number + 1, 1, "FULL")
            if self._reports_cudagraphs
            else None,
        )

    def _hash(self, *parts: object) -> int:
        return zlib.crc32(repr((self._seed, *parts)).encode())

    def _token(self, step_number: int, request_id: str) -> int:
        token = self._hash("token", step_number, request_id)
        if self._trace.vocabulary_size > 50 and token % 16 == 0:
            return EOS_TOKEN_ID
        return token % self._trace.vocabulary_size

    def _logprobs(self, step_number: int, requests: Sequence[Request]) -> LogprobsLists | None:
        wanted = [
            request.sampling_params.num_logprobs
            for request in requests
            if request.sampling_params and request.sampling_params.num_logprobs is not None
        ]
        if not wanted:
            return None
        num_rows, num_columns = len(requests), max(wanted) + 1
        token_ids = np.arange(num_rows * num_columns, dtype=np.int32) + step_number
        return LogprobsLists(
            logprob_token_ids=token_ids.reshape(num_rows, num_columns),
            logprobs=-token_ids.reshape(num_rows, num_columns).astype(np.float32),
            sampled_token_ranks=np.arange(num_rows, dtype=np.int32),
            cu_num_generated_tokens=list(range(num_rows + 1))
            if self._counts_generated_tokens
            else None,
        )

    def _prompt_logprobs(
        self, order: Iterable[str], sampled: Iterable[list[int]], requests: Mapping[str, Request]
    ) -> dict[str, LogprobsTensors | None]:
        prompt_logprobs: dict[str, LogprobsTensors | None] = {}
        for request_id, tokens in zip(order, sampled, strict=True):
            request = requests[request_id]
            wanted = request.sampling_params and request.sampling_params.prompt_logprobs
            if wanted is None or not tokens or request.num_output_tokens > 0:
                continue
            shape = (request.num_prompt_tokens - 1, wanted + 1)
            prompt_logprobs[request_id] = LogprobsTensors(
                torch.full(shape, len(request_id), dtype=torch.int32),
                torch.full(shape, -0.5),
                torch.zeros(shape[0], dtype=torch.int32),
            )
        return prompt_logprobs

    def _num_nans(self, step_number: int, order: Iterable[str]) -> dict[str, int] | None:
        if not self._counts_nans:
            return None
        counts = {
            request_id: self._hash("nans", step_number, request_id) % 3 for request_id in order
        }
        # Now and then the runner counts some requests only.
        return {
            request_id: count
            for request_id, count in counts.items()
            if self._hash("counted", step_number, request_id) % 4
        }


class FakeGrammar:
    """A compiled grammar: accepts every token but the one that its plan rejects."""

    def __init__(self, plan: GrammarPlan) -> None:
        self.plan = plan

    def accepts(self, first_output_token: int, num_tokens: int) -> bool:
        rejected = self.plan.rejects_output_token
        return rejected is None or not (
            first_output_token <= rejected < first_output_token + num_tokens
        )

    def num_valid(self, draft_token_ids: Sequence[int]) -> int:
        """Count the draft tokens ahead of the first that the grammar rejects."""
        divisor = self.plan.rejects_draft_tokens
        return next(
            (
                index
                for index, token in enumerate(draft_token_ids)
                if token < 0 or (divisor is not None and token % divisor == 0)
            ),
            len(draft_token_ids),
        )


class FakeStructuredOutputManager:
    """Plays vLLM's structured output manager, and records which state of requests it was shown."""

    def __init__(self) -> None:
        self.observations: list[tuple[Any, ...]] = []

    def accept_tokens(self, request: Request, new_token_ids: list[int]) -> bool:
        if not request.use_structured_output or not new_token_ids:
            return True
        self._observe("accept", request, list(new_token_ids))
        all_token_ids = list(request.all_token_ids)
        assert all_token_ids[-len(new_token_ids) :] == new_token_ids, (
            "accept_tokens must find the new tokens at the end of the request"
        )
        grammar = request.structured_output_request.grammar
        assert isinstance(grammar, FakeGrammar)
        return grammar.accepts(request.num_output_tokens - len(new_token_ids), len(new_token_ids))

    def grammar_bitmask(
        self,
        requests: Mapping[str, Request],
        structured_output_request_ids: list[str],
        scheduled_spec_decode_tokens: dict[str, list[int]],
    ) -> np.ndarray | None:
        if not structured_output_request_ids:
            return None
        rows = []
        for request_id in structured_output_request_ids:
            request = requests[request_id]
            draft_token_ids = list(scheduled_spec_decode_tokens.get(request_id, ()))
            self._observe("bitmask", request, draft_token_ids)
            for position in range(len(draft_token_ids) + 1):
                num_tokens = request.num_output_tokens + position
                rows.append([num_tokens, zlib.crc32(request_id.encode()) >> 1])
        return np.array(rows, dtype=np.int32)

    def clear_backend(self) -> None:
        """Do nothing: there is no backend."""

    def validate_tokens(self, request: Request, spec_tokens: list[int]) -> list[int]:
        if not request.use_structured_output:
            return spec_tokens
        self._observe("validate", request, list(spec_tokens))
        grammar = request.structured_output_request.grammar
        assert isinstance(grammar, FakeGrammar)
        return spec_tokens[: grammar.num_valid(spec_tokens)]

    def _observe(self, call: str, request: Request, new_token_ids: list[int]) -> None:
        self.observations.append(
            (
                call,
                request.request_id,
                new_token_ids,
                request.prompt_token_ids and list(request.prompt_token_ids),
                list(request.output_token_ids),
                list(request.all_token_ids),
                request.num_tokens,
                request.num_output_tokens,
            )
        )

    def take_observations(self) -> list[tuple[Any, ...]]:
        """Return and forget what was recorded since the last call."""
        observations, self.observations = self.observations, []
        return observations


class GrammarCompilation:
    """The pending compilation of one request's grammar."""

    def __init__(self, request: Request, plan: GrammarPlan) -> None:
        self._plan = plan
        self._steps_left = plan.ready_after_steps
        self._future: Future[FakeGrammar] = Future()
        structured_output_request = request.structured_output_request
        if self._steps_left == 0 and not plan.fails_to_compile:
            structured_output_request.grammar = FakeGrammar(plan)
            return
        structured_output_request.grammar = self._future
        if self._steps_left == 0:
            self._complete()

    @property
    def finished(self) -> bool:
        return self._steps_left <= 0

    def advance(self) -> None:
        """Let one step pass."""
        self._steps_left -= 1
        if self._steps_left == 0:
            self._complete()

    def _complete(self) -> None:
        if self._plan.fails_to_compile:
            self._future.set_exception(ValueError("the grammar does not compile"))
        else:
            self._future.set_result(FakeGrammar(self._plan))
