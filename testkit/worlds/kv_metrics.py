"""KV cache metrics: how long sampled blocks lived, and how they were used, until their eviction."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.request import Request

from .configuration import Configuration
from .feature import Feature, FeatureSettings, stats_of


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

    def start(self, configuration: Configuration, seed: int, coverage: Counter[str]) -> Feature:
        return KVMetricsFeature(configuration, seed, coverage, self.sample_rate)


class KVMetricsFeature(Feature):
    """Gives both sides the same random numbers, and a clock that stands still in an operation."""

    def __init__(
        self,
        configuration: Configuration,
        seed: int,
        coverage: Counter[str],
        sample_rate: float,
    ) -> None:
        super().__init__(configuration, seed, coverage)
        self._sample_rate = sample_rate
        self._operation_seed = 0

    def while_running(self, clock: Callable[[], float]) -> AbstractContextManager[Any]:
        def monotonic_ns() -> int:
            return int(clock() * 1e9)

        return mock.patch("time.monotonic_ns", monotonic_ns)

    def before_call(self, side: int) -> None:
        # Blocks are sampled by the global generator: each one that is allocated costs a number.
        if side == 0:
            self._operation_seed = self.rng.getrandbits(32)
        random.seed(self._operation_seed)

    def cover_outputs(
        self, outputs: Mapping[int, EngineCoreOutputs], requests: Mapping[str, Request]
    ) -> None:
        for stats in stats_of(outputs):
            for event in stats.kv_cache_eviction_events:
                self.coverage["metrics: evictions"] += 1
                self.coverage["metrics: evictions of a sample"] += self._sample_rate < 1
                self.coverage["metrics: evictions after an access"] += (
                    event.idle_seconds < event.lifetime_seconds
                )
                self.coverage["metrics: evictions after reuse"] += bool(event.reuse_gaps_seconds)
