"""LoRA adapters: how many fit into a batch, and what they change in block hashes."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparksched.compat import releases
from vllm.config import LoRAConfig
from vllm.lora.request import LoRARequest

from .configuration import Configuration
from .events import RequestPlan
from .feature import Feature, FeatureSettings

# Name, id and path. Nothing keeps a client from using a name twice.
_ADAPTERS = [
    ("poet", 1, "/adapters/poet"),
    ("lawyer", 2, "/adapters/lawyer"),
    ("poet", 3, "/adapters/poet-2"),
    ("\N{GREEK SMALL LETTER LAMDA}", 2**33, "/adapters/\N{GREEK SMALL LETTER LAMDA}"),
    ("clerk", 77, "clerk"),
]


@dataclass(frozen=True)
class LoRASettings(FeatureSettings):
    """How many adapters a batch may have, and how many there are."""

    max_loras: int
    num_adapters: int

    @classmethod
    def draw(
        cls, rng: random.Random, _configuration: Configuration, _scenario: Mapping[str, Any]
    ) -> LoRASettings:
        return cls(max_loras=rng.choice([1, 1, 2, 3]), num_adapters=rng.choice([1, 3, 5, 5]))

    def adjust(self, configuration: Configuration) -> Configuration:
        if releases.is_since("0.33.0"):
            return configuration
        # vLLM forgets the adapter of a running request whose chunk is put off, and ends in an
        # assertion when it continues beside the adapters that were admitted meanwhile.
        return dataclasses.replace(configuration, throttles_prefills=False)

    def configure(self, vllm_config: Any) -> None:
        vllm_config.lora_config = LoRAConfig(max_loras=self.max_loras)

    def start(self, configuration: Configuration, seed: int) -> Feature:
        return LoRA(configuration, seed, self)


class LoRA(Feature):
    """Gives most requests an adapter."""

    def __init__(self, configuration: Configuration, seed: int, settings: LoRASettings) -> None:
        super().__init__(configuration, seed)
        self._adapters = _ADAPTERS[: settings.num_adapters]
        self._adapter_of: dict[str, tuple[str, int, str] | None] = {}

    def plan_request(self, plan: RequestPlan) -> RequestPlan:
        adapter = self.rng.choice(self._adapters) if self.rng.random() < 0.8 else None
        self._adapter_of[plan.request_id] = adapter
        gets_salt = self.rng.random() < 0.15
        if gets_salt and plan.cache_salt is None:
            plan = dataclasses.replace(plan, cache_salt="sugar")
        return plan

    def request_arguments(self, plan: RequestPlan) -> dict[str, Any]:
        adapter = self._adapter_of[plan.request_id]
        return {"lora_request": LoRARequest(*adapter) if adapter else None}
