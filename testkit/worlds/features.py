"""Which features there are, by the name of the setting that switches them on."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from sparksched.compat import releases

from .aux_outputs import AuxOutputsSettings
from .chunked_local import ChunkedLocalSettings
from .configuration import Configuration
from .ec_connector import ECConnectorSettings
from .example_connector import ExampleConnectorSettings
from .feature import FeatureSettings
from .kv_events import KVEventsSettings
from .kv_metrics import KVMetricsSettings
from .kv_transfer import KVTransferSettings
from .lora import LoRASettings
from .mfu_metrics import MFUMetricsSettings
from .multimodal import MultimodalSettings
from .offloading import OffloadingSettings
from .parallel import DataParallelSettings, PipelineSettings
from .pooling import PoolingSettings
from .prompt_embeds import PromptEmbedsSettings
from .sampling_masks import SamplingMasksSettings
from .sessions import SessionSettings
from .speculation import SpeculationSettings
from .states import StateSettings

_DRAW_SETTINGS: dict[
    str, Callable[[random.Random, Configuration, Mapping[str, Any]], FeatureSettings]
] = {
    "kv_events": KVEventsSettings.draw,
    "kv_cache_metrics": KVMetricsSettings.draw,
    "mfu_metrics": MFUMetricsSettings.draw,
    "mfu_metrics_in_detail": MFUMetricsSettings.draw_detailed,
    "connector": KVTransferSettings.draw,
    "ec_connector": ECConnectorSettings.draw,
    "example_connector": ExampleConnectorSettings.draw,
    "offloading": OffloadingSettings.draw,
    "multimodal": MultimodalSettings.draw,
    "pooling": PoolingSettings.draw,
    "prompt_embeds": PromptEmbedsSettings.draw,
    # Before those that look at the groups.
    "states": StateSettings.draw,
    "speculation": SpeculationSettings.draw,
    # Of what speculation samples, too.
    "sampling_masks": SamplingMasksSettings.draw,
    "aux_outputs": AuxOutputsSettings.draw,
    "lora": LoRASettings.draw,
    "sessions": SessionSettings.draw,
    "chunked_local": ChunkedLocalSettings.draw,
    "pipeline": PipelineSettings.draw,
    "data_parallel": DataParallelSettings.draw,
}


# What a configuration that draws its features draws from, and pairs that don't go together: vLLM
# knows no drafter of a model with chunked attention, and before 0.33.0 those with adapters end in
# an assertion of vLLM, as requests that are passed over don't count as users of their adapters.
_COMBINABLE = (
    "kv_events",
    "kv_cache_metrics",
    "multimodal",
    "speculation",
    "lora",
    "sessions",
    "chunked_local",
    "pipeline",
    "data_parallel",
)
_CONFLICTS = [{"chunked_local", "speculation"}]
if not releases.is_since("0.33.0"):
    _CONFLICTS += [{"lora", "pipeline"}, {"lora", "data_parallel"}, {"lora", "speculation"}]


def draw_features(
    configuration: Configuration, seed: int, fixed: Mapping[str, Any]
) -> tuple[FeatureSettings, ...]:
    """Draw the settings of the features that a configuration's fixed settings name."""
    names = set(fixed)
    if fixed.get("draws_features"):
        names |= _draw_names(random.Random(f"features/{configuration.name}/{seed}"))
    return tuple(
        draw(random.Random(f"{setting}/{configuration.name}/{seed}"), configuration, fixed)
        for setting, draw in _DRAW_SETTINGS.items()
        if setting in names
    )


def _draw_names(rng: random.Random) -> set[str]:
    names: set[str] = set()
    for name in rng.sample(_COMBINABLE, rng.choice([0, 1, 2, 2, 3, 4])):
        if not any({name, other} in _CONFLICTS for other in names):
            names.add(name)
    return names
