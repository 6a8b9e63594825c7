"""LoRA adapters: how many fit into a batch, and what they change in block hashes."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparksched.compat import releases
from vllm.config import LoRAConfig
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

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

    def start(self, configuration: Configuration, seed: int, coverage: Counter[str]) -> Feature:
        return LoRA(configuration, seed, coverage, self)


class LoRA(Feature):
    """Gives most requests an adapter."""

    def __init__(
        self,
        configuration: Configuration,
        seed: int,
        coverage: Counter[str],
        settings: LoRASettings,
    ) -> None:
        super().__init__(configuration, seed, coverage)
        self._max_loras = settings.max_loras
        self._adapters = _ADAPTERS[: settings.num_adapters]
        self._adapter_of: dict[str, tuple[str, int, str] | None] = {}

    def plan_request(self, plan: RequestPlan) -> RequestPlan:
        adapter = self.rng.choice(self._adapters) if self.rng.random() < 0.8 else None
        self._adapter_of[plan.request_id] = adapter
        self.coverage["lora: requests with an adapter"] += adapter is not None
        gets_salt = self.rng.random() < 0.15
        if gets_salt and plan.cache_salt is None:
            plan = dataclasses.replace(plan, cache_salt="sugar")
        self.coverage["lora: salted requests with an adapter"] += bool(adapter and plan.cache_salt)
        return plan

    def request_arguments(self, plan: RequestPlan) -> dict[str, Any]:
        adapter = self._adapter_of[plan.request_id]
        return {"lora_request": LoRARequest(*adapter) if adapter else None}

    def cover_schedule(self, output: SchedulerOutput, requests: Mapping[str, Request]) -> None:
        coverage = self.coverage
        adapters = {
            adapter.lora_int_id: adapter.lora_name
            for adapter in (
                requests[request_id].lora_request for request_id in output.num_scheduled_tokens
            )
            if adapter is not None
        }
        coverage["lora: batches with several adapters"] += len(adapters) > 1
        coverage["lora: batches with two adapters of a name"] += len(set(adapters.values())) < len(
            adapters
        )
        coverage["lora: hits of requests with an adapter"] += sum(
            new_request.num_computed_tokens > 0 and new_request.lora_request is not None
            for new_request in output.scheduled_new_reqs
        )
        if len(adapters) < self._max_loras:
            return
        for request in requests.values():
            if request.lora_request is None or request.lora_request.lora_int_id in adapters:
                continue
            for status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
                situation = f"lora: {status.name} while others' adapters fill the batch"
                coverage[situation] += request.status == status
