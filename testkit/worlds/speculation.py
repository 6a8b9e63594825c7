"""Speculative decoding: vLLM's configuration of it, and a drafter of tokens.

The drafter decides what a model runner with a drafter would: how many of a step's draft tokens the
model accepts, and which ones come next. Everything it says is a function of the seed, the step and
the request, so that it changes nothing else in the trace.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.config import SpeculativeConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import DraftTokenIds, LogprobsLists, ModelRunnerOutput

from .configuration import Configuration
from .events import GrammarPlan, RequestPlan
from .feature import Feature, FeatureSettings, Step

_EAGLE_LIKE = ("eagle", "eagle3", "mtp")
_PADDING = -1
# Accepted tokens come from those that requests stop at now and then.
_VOCABULARY_SIZE = 50


@dataclass(frozen=True)
class SpeculationSettings(FeatureSettings):
    """How an engine speculates."""

    method: str
    num_tokens: int
    num_mtp_modules: int
    parallel_drafting: bool
    disable_eagle_block_drop: bool
    disable_lookahead_block_hashes: bool
    """Whether blocks are dropped for a drafter, as before vLLM 0.33.0."""
    tokens_per_batch_size: tuple[tuple[int, int, int], ...] | None
    """Draft tokens by batch size: first size, last size and number of tokens."""
    flags_last_group: bool
    """Whether the last KV cache group is known to be the drafter's; else none is."""
    request_metrics: str
    shortens_drafts: bool
    """Whether the model runner takes back draft tokens of a step that it was given."""
    structured_share: float
    """Share of the other requests that get a grammar."""

    @classmethod
    def draw(
        cls, rng: random.Random, configuration: Configuration, scenario: Mapping[str, Any]
    ) -> SpeculationSettings:
        fixed = scenario.get("speculation", {})

        def choose(setting: str, *values: Any) -> Any:
            # Drawn even when fixed, so that fixing one setting leaves the others as they were.
            drawn = rng.choice(values)
            return fixed.get(setting, drawn)

        method = choose("method", "ngram", "eagle", "eagle3", "draft_model", "mtp")
        if method == "ngram" and configuration.async_scheduling:
            method = "ngram_gpu"  # the one that vLLM allows there
        num_tokens = choose("num_tokens", 1, 2, 3, 4)
        can_draft_in_parallel = method in ("eagle", "eagle3", "draft_model")
        schedule = _draw_schedule(rng, num_tokens, configuration.max_num_seqs)
        settings = cls(
            method=method,
            num_tokens=num_tokens,
            disable_lookahead_block_hashes=False,
            num_mtp_modules=choose("num_mtp_modules", 1, 1, 2, 3),
            parallel_drafting=choose("parallel", *[False] * 5, True) and can_draft_in_parallel,
            disable_eagle_block_drop=choose("disable_eagle_block_drop", *[False] * 3, True),
            tokens_per_batch_size=schedule if choose("is_dynamic", *[False] * 4, True) else None,
            flags_last_group=choose("flags_last_group", False, True),
            request_metrics=choose("request_metrics", "none", "summary", "detailed"),
            shortens_drafts=choose("shortens_drafts", *[False] * 5, True),
            structured_share=choose("structured_share", 0.0, 0.0, 0.2),
        )
        # Without a group of full attention to shorten a lookup, vLLM looks for hashes that are not
        # there yet if they look ahead by several tokens, and ends in an IndexError.
        may_look_ahead = settings.num_prefill_lookahead < 2 or None in configuration.sliding_windows
        disable_lookahead = choose("disable_lookahead_block_hashes", False, False, True)
        return dataclasses.replace(
            settings, disable_lookahead_block_hashes=disable_lookahead or not may_look_ahead
        )

    @property
    def drops_eagle_block(self) -> bool:
        return self.method in _EAGLE_LIKE and not self.disable_eagle_block_drop

    @property
    def num_prefill_lookahead(self) -> int:
        """Prompt tokens past a chunk that the drafter reads."""
        if self.method not in _EAGLE_LIKE:
            return 0
        is_multi_module = self.method == "mtp" and min(self.num_mtp_modules, self.num_tokens) > 1
        return self.num_tokens if is_multi_module else 1

    @property
    def extra_retained_tokens(self) -> int:
        """Tokens by which vLLM extends sliding windows, for the drafter's sake."""
        return max(0, self.num_prefill_lookahead - 1)

    def adjust(self, configuration: Configuration) -> Configuration:
        # Room for what drafting takes of a request's budget, and for one padded decode.
        spare_tokens = 2 * self.num_tokens + 1
        spare_blocks = -(-(3 * spare_tokens) // configuration.block_size)
        num_windows = sum(window is not None for window in configuration.sliding_windows)
        return dataclasses.replace(
            configuration,
            max_num_batched_tokens=configuration.max_num_batched_tokens + spare_tokens,
            num_blocks=configuration.num_blocks + num_windows * spare_blocks,
        )

    def configure(self, vllm_config: Any) -> None:
        # An n-gram drafter needs no model, and the other methods' answers are of the same class.
        speculative_config = SpeculativeConfig(
            model="ngram",
            num_speculative_tokens=self.num_tokens,
            disable_eagle_block_drop=self.disable_eagle_block_drop,
        )
        if hasattr(speculative_config, "disable_lookahead_block_hashes"):
            disabled = self.disable_lookahead_block_hashes
            speculative_config.disable_lookahead_block_hashes = disabled
        speculative_config.method = self.method
        speculative_config.parallel_drafting = self.parallel_drafting
        if self.tokens_per_batch_size is not None:
            speculative_config.num_speculative_tokens_per_batch_size = list(
                self.tokens_per_batch_size
            )
        hf_config = SimpleNamespace(
            model_type="drafter", num_nextn_predict_layers=self.num_mtp_modules
        )
        speculative_config.draft_model_config = SimpleNamespace(
            model="drafter", hf_config=hf_config
        )
        vllm_config.speculative_config = speculative_config
        vllm_config.observability_config.per_request_spec_decode_metrics = self.request_metrics
        assert vllm_config.num_prefill_lookahead_tokens == self.num_prefill_lookahead

    def configure_groups(self, groups: list[KVCacheGroupSpec]) -> None:
        # As vLLM's `get_kv_cache_configs()` does.
        for group in groups:
            if isinstance(group.kv_cache_spec, SlidingWindowSpec):
                group.kv_cache_spec = dataclasses.replace(
                    group.kv_cache_spec, extra_retained_tokens=self.extra_retained_tokens
                )
        groups[-1].is_eagle_group = self.flags_last_group and self.drops_eagle_block

    def start(self, configuration: Configuration, seed: int) -> Feature:
        return Speculation(configuration, seed, self)


def _draw_schedule(
    rng: random.Random, num_tokens: int, max_num_seqs: int
) -> tuple[tuple[int, int, int], ...]:
    """Draw ranges of batch sizes, with gaps and an open end for vLLM to fill in."""
    schedule: list[tuple[int, int, int]] = []
    first = 1
    while first <= max_num_seqs and len(schedule) < 4:
        last = first + rng.randint(0, max(1, max_num_seqs // 3))
        schedule.append((first, last, rng.randint(0, num_tokens + 1)))
        first = last + rng.choice([1, 1, 2])
    return tuple(schedule)


class Speculation(Feature):
    """The drafter, and what the model makes of its tokens."""

    def __init__(
        self, configuration: Configuration, seed: int, settings: SpeculationSettings
    ) -> None:
        super().__init__(configuration, seed)
        self._seed = seed
        self._settings = settings
        self._proposed: DraftTokenIds | None = None

    def plan_request(self, plan: RequestPlan) -> RequestPlan:
        rng = self.rng
        gets_grammar = rng.random() < self._settings.structured_share
        rejects_drafts = rng.choice([None, 2, 5])
        ready_after_steps = rng.choice([0, 0, 1, 2])
        grammar = plan.grammar
        if grammar is None and gets_grammar and "prompt_logprobs" not in dict(plan.sampling):
            grammar = GrammarPlan(ready_after_steps, False, None)
        if grammar is None:
            return plan
        grammar = dataclasses.replace(grammar, rejects_draft_tokens=rejects_drafts)
        return dataclasses.replace(plan, grammar=grammar)

    # The model and its drafter.

    def after_schedule(
        self, step_number: int, scheduler_outputs: Sequence[SchedulerOutput]
    ) -> None:
        if not self._settings.shortens_drafts:
            return
        for request_id, drafts in list(scheduler_outputs[0].scheduled_spec_decode_tokens.items()):
            draw = self._hash("shortened", step_number, request_id)
            if draw % 16:
                continue
            num_valid = draw // 16 % max(len(drafts), 1)
            for output in scheduler_outputs:
                if num_valid:
                    output.scheduled_spec_decode_tokens[request_id] = drafts[:num_valid]
                else:
                    del output.scheduled_spec_decode_tokens[request_id]

    def complete_output(self, step: Step, output: ModelRunnerOutput) -> ModelRunnerOutput:
        for request_id, sampled in zip(output.req_ids, output.sampled_token_ids, strict=True):
            drafts = step.scheduled.scheduled_spec_decode_tokens.get(request_id, ())
            if sampled:
                sampled.extend(self._accepted(step.number, request_id, len(drafts)))
        if output.logprobs is not None:
            output.logprobs = _logprobs_by_token(output.logprobs, output.sampled_token_ids)
        return output

    def _accepted(self, step_number: int, request_id: str, num_drafts: int) -> list[int]:
        """Return the tokens that follow a request's first sampled one."""
        draw = self._hash("accepted", step_number, request_id)
        num_accepted = draw // 4 % (num_drafts + 1)
        if draw % 4 == 0:
            num_accepted = num_drafts
        return [
            self._hash("token", step_number, request_id, position) % _VOCABULARY_SIZE
            for position in range(num_accepted)
        ]

    def after_sampling(
        self, step_number: int, scheduler_output: SchedulerOutput, request_ids: Sequence[str]
    ) -> None:
        if not request_ids:
            return
        # Nobody reads the tokens then, so Model Runner V2 leaves them on the device.
        without_tokens = (
            self.configuration.use_v2_model_runner
            and not self.configuration.async_scheduling
            and not scheduler_output.has_structured_output_requests
        )
        num_tokens = scheduler_output.num_spec_tokens_to_schedule
        self._proposed = DraftTokenIds(
            list(request_ids),
            [
                [_PADDING] * num_tokens
                if without_tokens
                else self._drafts(step_number, request_id, num_tokens)
                for request_id in request_ids
            ],
        )
        if self._hash("silent", step_number) % 16 == 0:
            self._proposed = None

    def _drafts(self, step_number: int, request_id: str, num_tokens: int) -> list[int]:
        draw = self._hash("number", step_number, request_id)
        # Only this drafter proposes as many tokens as it finds.
        if self._settings.method == "ngram" and draw % 3 == 0:
            num_tokens = draw // 3 % (num_tokens + 1)
        return [
            self._hash("draft", step_number, request_id, position) % _VOCABULARY_SIZE
            for position in range(num_tokens)
        ]

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        return self._proposed

    def _hash(self, *parts: object) -> int:
        return zlib.crc32(repr((self._seed, "drafter", *parts)).encode())


def _logprobs_by_token(logprobs: LogprobsLists, sampled: Sequence[list[int]]) -> LogprobsLists:
    """Return logprobs with one row for each token that was sampled."""
    num_tokens = [len(tokens) for tokens in sampled]
    num_rows, num_columns = sum(num_tokens), logprobs.logprobs.shape[1]
    first_token_id = int(logprobs.logprob_token_ids[0, 0])
    token_ids = np.arange(num_rows * num_columns, dtype=np.int32) + first_token_id
    return LogprobsLists(
        logprob_token_ids=token_ids.reshape(num_rows, num_columns),
        logprobs=-token_ids.reshape(num_rows, num_columns).astype(np.float32),
        sampled_token_ranks=np.arange(num_rows, dtype=np.int32),
        cu_num_generated_tokens=[0, *itertools.accumulate(num_tokens)],
    )


def reject_invalid_drafts(
    scheduler_output: SchedulerOutput, runner_outputs: Iterable[ModelRunnerOutput]
) -> None:
    """Let the model sample no more than what follows the draft tokens that grammars allow."""
    for request_id, num_invalid in (scheduler_output.num_invalid_spec_tokens or {}).items():
        drafts = scheduler_output.scheduled_spec_decode_tokens[request_id]
        for runner_output in runner_outputs:
            sampled = runner_output.sampled_token_ids[runner_output.req_id_to_index[request_id]]
            del sampled[1 + len(drafts) - num_invalid :]
