"""Which features there are, by the name of the setting that switches them on."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .feature import FeatureSettings
from .kv_events import KVEventsSettings
from .kv_metrics import KVMetricsSettings
from .kv_transfer import KVTransferSettings
from .lora import LoRASettings
from .multimodal import MultimodalSettings
from .parallel import DataParallelSettings, PipelineSettings
from .offloading import OffloadingSettings
from .pooling import PoolingSettings
from .sessions import SessionSettings
from .speculation import SpeculationSettings

if TYPE_CHECKING:
    from .world import Configuration

_DRAW_SETTINGS: dict[str, Callable[[random.Random, Configuration], FeatureSettings]] = {
    "kv_events": KVEventsSettings.draw,
    "kv_cache_metrics": KVMetricsSettings.draw,
    "connector": KVTransferSettings.draw,
    "offloading": OffloadingSettings.draw,
    "multimodal": MultimodalSettings.draw,
    "pooling": PoolingSettings.draw,
    "speculation": SpeculationSettings.draw,
    "lora": LoRASettings.draw,
    "sessions": SessionSettings.draw,
    "pipeline": PipelineSettings.draw,
    "data_parallel": DataParallelSettings.draw,
}


def draw_features(
    configuration: Configuration, seed: int, fixed: Mapping[str, Any]
) -> tuple[FeatureSettings, ...]:
    """Draw the settings of the features that a configuration's fixed settings name."""
    return tuple(
        draw(random.Random(f"{setting}/{configuration.name}/{seed}"), configuration)
        for setting, draw in _DRAW_SETTINGS.items()
        if setting in fixed
    )
