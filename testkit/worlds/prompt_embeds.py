"""Prompt embeddings: prompts, or parts of them, that arrive as vectors instead of token ids."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .configuration import Configuration
from .events import RequestPlan
from .feature import Feature, FeatureSettings

_HIDDEN_SIZE = 2


@dataclass(frozen=True)
class PromptEmbedsSettings(FeatureSettings):
    """How many prompts are vectors alone, and how many are vectors and tokens in turn."""

    pure_share: float
    mixed_share: float

    @classmethod
    def draw(
        cls, rng: random.Random, _configuration: Configuration, _scenario: Mapping[str, Any]
    ) -> PromptEmbedsSettings:
        return cls(*rng.choice([(0.4, 0.3), (0.8, 0.0), (0.0, 0.8)]))

    def configure(self, vllm_config: Any) -> None:
        vllm_config.model_config.enable_prompt_embeds = True

    def start(self, configuration: Configuration, seed: int) -> Feature:
        return PromptEmbeds(configuration, seed, self)


class PromptEmbeds(Feature):
    """Turns prompts into vectors, each made of its token: prefixes in common stay in common."""

    def __init__(
        self, configuration: Configuration, seed: int, settings: PromptEmbedsSettings
    ) -> None:
        super().__init__(configuration, seed)
        self._settings = settings
        self._arguments_of: dict[str, dict[str, Any]] = {}

    def plan_request(self, plan: RequestPlan) -> RequestPlan:
        drawn, pure_share = self.rng.random(), self._settings.pure_share
        if drawn < pure_share:
            arguments = {"prompt_token_ids": None, "prompt_embeds": _vectors(plan)}
        elif drawn < pure_share + self._settings.mixed_share:
            # Where vectors begin and end has no relation to where blocks do.
            is_token = [position // 7 % 2 == 0 for position in range(len(plan.prompt_token_ids))]
            arguments = {"prompt_embeds": _vectors(plan), "prompt_is_token_ids": is_token}
        else:
            arguments = {}
        self._arguments_of[plan.request_id] = arguments
        return plan

    def request_arguments(self, plan: RequestPlan) -> dict[str, Any]:
        return dict(self._arguments_of[plan.request_id])


def _vectors(plan: RequestPlan) -> torch.Tensor:
    tokens = torch.tensor(plan.prompt_token_ids, dtype=torch.float32)
    return tokens.unsqueeze(1).expand(-1, _HIDDEN_SIZE).contiguous()
