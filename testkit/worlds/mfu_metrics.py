"""MFU metrics: vLLM's estimate of the work of each step, with and without its details."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .feature import FeatureSettings


@dataclass(frozen=True)
class MFUMetricsSettings(FeatureSettings):
    """Metrics are on."""

    in_detail: bool = False

    @classmethod
    def draw_detailed(cls, *_: Any) -> MFUMetricsSettings:
        return cls(in_detail=True)

    def configure(self, vllm_config: Any) -> None:
        vllm_config.observability_config.enable_mfu_metrics = True

    def environment(self) -> dict[str, str]:
        return {"VLLM_DEBUG_MFU_METRICS": str(int(self.in_detail))}
