"""The vLLM objects that a configuration needs.

All of them are built from a small local `config.json`: no weights, no tokenizer and no network.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from .configuration import FULL_ATTENTION, Configuration
from .opt_config import OPT_CONFIG

SchedulerClass = type[SchedulerInterface]

_RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"


@dataclass(frozen=True)
class World:
    """One side's own copy of everything that a scheduler is built from."""

    configuration: Configuration
    vllm_config: VllmConfig
    kv_cache_config: KVCacheConfig
    scheduler_block_size: int
    hash_block_size: int

    @property
    def hash_lookahead(self) -> tuple[int, ...]:
        """What the engine core hands to the factory of block hashers, besides size and hash."""
        if hasattr(self.vllm_config, "num_hash_lookahead_tokens"):
            return (self.vllm_config.num_hash_lookahead_tokens,)
        return ()

    def build_scheduler(
        self,
        scheduler_class: SchedulerClass,
        structured_output_manager: Any,
    ) -> SchedulerInterface:
        """Construct `scheduler_class` as vLLM's engine core does."""
        return scheduler_class(
            vllm_config=self.vllm_config,
            kv_cache_config=self.kv_cache_config,
            structured_output_manager=structured_output_manager,
            block_size=self.scheduler_block_size,
            hash_block_size=self.hash_block_size,
            include_finished_set=self.configuration.include_finished_set,
            log_stats=self.configuration.log_stats,
        )


def build_world(configuration: Configuration) -> World:
    """Build a fresh set of vLLM's configuration objects."""
    vllm_config = _build_vllm_config(configuration)
    kv_cache_config = _build_kv_cache_config(configuration)
    scheduler_block_size, hash_block_size = resolve_kv_cache_block_sizes(
        kv_cache_config, vllm_config
    )
    return World(configuration, vllm_config, kv_cache_config, scheduler_block_size, hash_block_size)


def _build_vllm_config(configuration: Configuration) -> VllmConfig:
    model_config = copy.copy(_tiny_model_config())
    model_config.max_model_len = configuration.max_model_len
    scheduler_fields = {field.name for field in dataclasses.fields(SchedulerConfig)}
    scheduler_settings = {
        name: value
        for name, value in dataclasses.asdict(configuration).items()
        if name in scheduler_fields
    }
    cache_config = CacheConfig(
        block_size=configuration.block_size,
        enable_prefix_caching=configuration.enable_prefix_caching,
        prefix_caching_hash_algo=configuration.prefix_caching_hash_algo,
        prefix_cache_retention_interval=configuration.prefix_cache_retention_interval,
    )
    cache_config.num_gpu_blocks = configuration.num_blocks
    scheduler_config = SchedulerConfig(
        **scheduler_settings,
        max_model_len=configuration.max_model_len,
        is_encoder_decoder=False,
    )
    # Model Runner V2 wants a GPU's Triton; the schedulers only ask which runner there is.
    with mock.patch.dict(os.environ, {_RUNNER_VARIABLE: "0"}):
        vllm_config = VllmConfig(
            model_config=model_config,
            cache_config=cache_config,
            scheduler_config=scheduler_config,
        )
    # Platforms adjust what they are given (the CPU one switches async scheduling off), and the
    # schedulers under test read nothing of the platform.
    for name, value in scheduler_settings.items():
        setattr(vllm_config.scheduler_config, name, value)
    cache_config.block_size = configuration.block_size
    for settings in configuration.features:
        settings.configure(vllm_config)
    return vllm_config


@functools.cache
def _tiny_model_config() -> ModelConfig:
    directory = _model_directory().name
    (Path(directory) / "config.json").write_text(json.dumps(OPT_CONFIG))
    return ModelConfig(
        model=directory, skip_tokenizer_init=True, dtype="float16", max_model_len=1024
    )


@functools.cache
def _model_directory() -> tempfile.TemporaryDirectory[str]:
    """Create the directory that vLLM reads the model's configuration from, more than once."""
    return tempfile.TemporaryDirectory(prefix="differential-model-")


def _build_kv_cache_config(configuration: Configuration) -> KVCacheConfig:
    groups = [
        KVCacheGroupSpec(
            [f"layer.{index}"], _kv_cache_spec(configuration.block_size, window, is_latent)
        )
        for index, (window, is_latent) in enumerate(
            zip(configuration.sliding_windows, configuration.latent_groups, strict=True)
        )
    ]
    for settings in configuration.features:
        settings.configure_groups(groups)
    return KVCacheConfig(
        num_blocks=configuration.num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        prefix_cache_retention_interval=configuration.prefix_cache_retention_interval,
    )


def _kv_cache_spec(
    block_size: int, window: int | None, is_latent: bool
) -> FullAttentionSpec | SlidingWindowSpec:
    shape: dict[str, Any] = {
        "block_size": block_size,
        "num_kv_heads": 1,
        "head_size": 1,
        "dtype": torch.float32,
    }
    if window is FULL_ATTENTION:
        return (MLAAttentionSpec if is_latent else FullAttentionSpec)(**shape)
    return (SlidingWindowMLASpec if is_latent else SlidingWindowSpec)(
        **shape, sliding_window=window
    )


@contextmanager
def vllm_environment(configuration: Configuration) -> Iterator[None]:
    """Set the process-wide state that `configuration` implies, and silence vLLM's log."""
    vllm_logger = logging.getLogger("vllm")
    level = vllm_logger.level
    vllm_logger.setLevel(logging.CRITICAL + 1)
    variables = {_RUNNER_VARIABLE: str(int(configuration.use_v2_model_runner))}
    for settings in configuration.features:
        variables |= settings.environment()
    try:
        with mock.patch.dict(os.environ, variables):
            if configuration.needs_block_hashes:
                init_none_hash(get_hash_fn_by_name(configuration.prefix_caching_hash_algo))
            yield
    finally:
        vllm_logger.setLevel(level)
