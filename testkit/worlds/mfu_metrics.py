"""MFU metrics: vLLM's estimate of the work of each step, with and without its details."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.request import Request

from .configuration import Configuration
from .feature import Feature, FeatureSettings, stats_of


@dataclass(frozen=True)
class MFUMetricsSettings(FeatureSettings):
    """Metrics are on."""

    in_detail: bool

    @classmethod
    def draw(
        cls, _rng: random.Random, _configuration: Configuration, _scenario: Mapping[str, Any]
    ) -> MFUMetricsSettings:
        return cls(in_detail=False)

    @classmethod
    def draw_detailed(
        cls, _rng: random.Random, _configuration: Configuration, _scenario: Mapping[str, Any]
    ) -> MFUMetricsSettings:
        return cls(in_detail=True)

    def configure(self, vllm_config: Any) -> None:
        vllm_config.observability_config.enable_mfu_metrics = True

    def environment(self) -> dict[str, str]:
        return {"VLLM_DEBUG_MFU_METRICS": str(int(self.in_detail))}

    def start(self, configuration: Configuration, seed: int, coverage: Counter[str]) -> Feature:
        return MFUMetricsFeature(configuration, seed, coverage)


class MFUMetricsFeature(Feature):
    """Counts the kinds of steps that are estimated."""

    def cover_outputs(
        self, outputs: Mapping[int, EngineCoreOutputs], requests: Mapping[str, Request]
    ) -> None:
        for stats in stats_of(outputs):
            estimate = stats.perf_stats
            self._count("without requests", not estimate.num_flops_per_gpu)
            details = estimate.debug_stats
            self._count("without detail", details is None)
            if details is not None:
                self._count("in detail", True)
                self._count("with prefills", details.num_prefill_requests > 0)
                self._count("with decodes", details.num_decode_requests > 0)

    def _count(self, kind: str, is_of_kind: bool) -> None:
        self.coverage[f"MFU metrics: steps {kind}"] += is_of_kind
