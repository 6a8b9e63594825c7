"""KV cache metrics: how long sampled blocks lived, and how they were used, until their eviction."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from .configuration import Configuration
from .feature import Feature, FeatureSettings


@dataclass(frozen=True)
class KVMetricsSettings(FeatureSettings):
    """Metrics are on, for a share of the blocks."""

    sample_rate: float

    @classmethod
    def draw(
        cls, rng: random.Random, _configuration: Configuration, _scenario: Mapping[str, Any]
    ) -> KVMetricsSettings:
        return cls(sample_rate=rng.choice([0.3, 1.0]))

    def configure(self, vllm_config: Any) -> None:
        vllm_config.observability_config.kv_cache_metrics = True
        vllm_config.observability_config.kv_cache_metrics_sample = self.sample_rate

    def start(self, configuration: Configuration, seed: int) -> Feature:
        return KVMetricsFeature(configuration, seed)


class KVMetricsFeature(Feature):
    """Gives both sides the same random numbers, and a clock that stands still in an operation."""

    _operation_seed = 0

    def while_running(self, clock: Callable[[], float]) -> AbstractContextManager[Any]:
        def monotonic_ns() -> int:
            return int(clock() * 1e9)

        return mock.patch("time.monotonic_ns", monotonic_ns)

    def before_call(self, side: int) -> None:
        # Blocks are sampled by the global generator: each one that is allocated costs a number.
        if side == 0:
            self._operation_seed = self.rng.getrandbits(32)
        random.seed(self._operation_seed)
