"""Pooling models: requests end with an embedding or a score, and nothing is sampled."""

from __future__ import annotations

import dataclasses
import random
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.pooling_params import PoolingParams
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from .configuration import Configuration
from .events import Call, Event, RequestPlan, SchedulerView
from .feature import Feature, FeatureSettings, Step


@dataclass(frozen=True)
class PoolingSettings(FeatureSettings):
    """A pooling model, with or without a KV cache."""

    has_kv_cache: bool
    lists_no_tokens: bool
    """Whether the model runner returns no list of sampled tokens at all, or empty ones."""

    @classmethod
    def draw(
        cls, rng: random.Random, configuration: Configuration, scenario: Mapping[str, Any]
    ) -> PoolingSettings:
        fixed = scenario["pooling"]
        return cls(
            has_kv_cache=fixed.get("has_kv_cache", True),
            lists_no_tokens=rng.random() < 0.7,
        )

    def adjust(self, configuration: Configuration) -> Configuration:
        if self.has_kv_cache:
            return configuration
        return dataclasses.replace(
            configuration,
            sliding_windows=(),
            latent_groups=(),
            num_blocks=1,
            prefix_cache_retention_interval=0,
        )

    def configure(self, vllm_config: Any) -> None:
        vllm_config.model_config.runner_type = "pooling"
        vllm_config.scheduler_config.runner_type = "pooling"

    def start(self, configuration: Configuration, seed: int) -> Feature:
        return Pooling(configuration, seed, self)


class Pooling(Feature):
    """Turns each request into one for a pooling model, and plays the pooler."""

    samples_tokens = False

    def __init__(self, configuration: Configuration, seed: int, settings: PoolingSettings) -> None:
        super().__init__(configuration, seed)
        self._settings = settings
        self._reset_rate = self.rng.choice([0.0, 0.1, 0.3])

    def plan_request(self, plan: RequestPlan) -> RequestPlan:
        rng = self.rng
        task = rng.choice(["embed", "token_embed", "classify", "token_classify"])
        skips_prefix_cache = rng.choice([None, False, task.startswith("token_")])
        prompt = plan.prompt_token_ids
        if rng.random() < 0.15:
            # Nothing is sampled, so a prompt may fill the whole context.
            num_missing = self.configuration.max_model_len - len(prompt)
            prompt = (*prompt, *(rng.randrange(4) for _ in range(num_missing)))
        return dataclasses.replace(
            plan,
            prompt_token_ids=prompt,
            grammar=None,
            pooling=(("task", task), ("skip_reading_prefix_cache", skips_prefix_cache)),
        )

    def request_arguments(self, plan: RequestPlan) -> dict[str, Any]:
        assert plan.pooling is not None
        return {"sampling_params": None, "pooling_params": PoolingParams(**dict(plan.pooling))}

    def events_before_step(self, _view: SchedulerView) -> Sequence[Event]:
        # A step that pools is often the only one of its request, so it is rarely met by chance.
        if self.rng.random() >= self._reset_rate:
            return []
        return [
            Call("reset_prefix_cache(True)", lambda scheduler: scheduler.reset_prefix_cache(True))
        ]

    def complete_output(self, step: Step, output: ModelRunnerOutput) -> ModelRunnerOutput:
        if not output.req_ids:
            return output
        return dataclasses.replace(
            output,
            sampled_token_ids=[]
            if self._settings.lists_no_tokens
            else [[] for _ in output.req_ids],
            logprobs=None,
            prompt_logprobs_dict={},
            num_nans_in_logits=None,
            pooler_output=[
                None
                if step.requests[request_id].is_prefill_chunk
                else _pooled(step.number, step.requests[request_id])
                for request_id in output.req_ids
            ],
        )


def _pooled(step_number: int, request: Request) -> torch.Tensor:
    value = zlib.crc32(f"{request.request_id}/{step_number}".encode()) % 1000
    if request.pooling_params.task == "token_embed":
        return torch.full((request.num_tokens, 2), value, dtype=torch.float16)
    if request.pooling_params.task == "classify":
        return torch.tensor(float(value))
    return torch.full((3,), value / 7)
