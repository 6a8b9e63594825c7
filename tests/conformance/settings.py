"""What tests assign to a scheduler that is part of the native one's configuration."""

import inspect
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from sparksched.compat import releases
from vllm.config import ModelConfig, VllmConfig
from vllm.multimodal import encoder_budget
from vllm.v1.request import Request

from . import kv_transfer_mirror

_ENCODER_SETTINGS = frozenset({"max_num_encoder_input_tokens", "encoder_cache_manager"})

# Settings that are read from properties of the configuration, by the property's name.
_PROPERTIES = {
    "num_prefill_lookahead": "num_prefill_lookahead_tokens",
    "num_hash_lookahead_tokens": "num_hash_lookahead_tokens",
}

NAMES = (
    frozenset({"use_v2_model_runner", "pp_size", "can_skip_drafts", *_PROPERTIES})
    | _ENCODER_SETTINGS
    | kv_transfer_mirror.SETTINGS
)


@contextmanager
def assigned(vllm_config: VllmConfig, settings: dict[str, Any], stock: Any) -> Iterator[None]:
    """Say in the configuration what a test has said by assignment.

    `stock` is a scheduler of vLLM's that has these attributes already.
    """
    with ExitStack() as patches:
        enter = patches.enter_context
        if "use_v2_model_runner" in settings:
            variable = {"VLLM_USE_V2_MODEL_RUNNER": str(int(settings["use_v2_model_runner"]))}
            enter(mock.patch.dict(os.environ, variable))
        if "pp_size" in settings:
            num_stages = {"pipeline_parallel_size": settings["pp_size"]}
            enter(mock.patch.multiple(vllm_config.parallel_config, **num_stages))
        if "can_skip_drafts" in settings:
            enter(_with_behavior("can_skip_drafts", settings["can_skip_drafts"]))
        for name in _PROPERTIES.keys() & settings.keys():
            enter(mock.patch.object(VllmConfig, _PROPERTIES[name], settings[name]))
        if settings.keys() & _ENCODER_SETTINGS:
            enter(_with_encoder(stock))
        enter(kv_transfer_mirror.assigned(vllm_config, settings))
        yield


@contextmanager
def _with_behavior(name: str, value: Any) -> Iterator[None]:
    behaviors = releases.behaviors

    def changed_behaviors(vllm_config: VllmConfig) -> dict[str, Any]:
        return behaviors(vllm_config) | {name: value}

    with mock.patch.object(releases, "behaviors", changed_behaviors):
        yield


@contextmanager
def _with_encoder(stock: Any) -> Iterator[None]:
    """Have the budget and the cache of this scheduler's, whatever the model.

    Tests give images to requests of a model for text: vLLM's scheduler doesn't ask the model.
    """
    budget = SimpleNamespace(
        encoder_compute_budget=stock.max_num_encoder_input_tokens,
        encoder_cache_size=stock.encoder_cache_manager.cache_size,
    )
    with (
        mock.patch.object(ModelConfig, "supports_multimodal_inputs", True),
        mock.patch.object(encoder_budget, "MultiModalBudget", return_value=budget),
    ):
        yield


def hash_lookahead_of(request: Request) -> int:
    """Return how many tokens behind a block the hashes of a request cover.

    vLLM's scheduler takes whatever hashes a request has; ours makes them, by its configuration.
    """
    if request._block_hasher is None:
        return 0
    captured = inspect.getclosurevars(request._block_hasher).nonlocals
    return int(captured.get("num_hash_lookahead_tokens", 0))
