"""Chunked local attention: a token sees those before it in its own chunk of the sequence."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, KVCacheGroupSpec

from .configuration import Configuration
from .feature import FeatureSettings


@dataclass(frozen=True)
class ChunkedLocalSettings(FeatureSettings):
    """The size of the chunks by KV cache group, or None for groups of other kinds."""

    chunk_sizes: tuple[int | None, ...]

    @classmethod
    def draw(
        cls, rng: random.Random, configuration: Configuration, _scenario: Mapping[str, Any]
    ) -> ChunkedLocalSettings:
        """Make groups with a sliding window chunked ones, with chunks as long as the window."""
        windows = configuration.sliding_windows
        is_aligned, leaves_last = rng.random() < 0.5, rng.random() < 0.3
        block_size = configuration.block_size
        chunk_sizes = [
            -(-window // block_size) * block_size if window and is_aligned else window
            for window in windows
        ]
        if leaves_last and sum(size is not None for size in chunk_sizes) > 1:
            chunk_sizes[-1] = None
        return cls(tuple(chunk_sizes))

    def adjust(self, configuration: Configuration) -> Configuration:
        windows = configuration.sliding_windows
        has_window = any(
            window is not None and size is None
            for window, size in zip(windows, self.chunk_sizes, strict=True)
        )
        if has_window or not configuration.prefix_cache_retention_interval:
            return configuration
        # vLLM refuses others where no group has a window.
        return dataclasses.replace(configuration, prefix_cache_retention_interval=0)

    def configure_groups(self, groups: list[KVCacheGroupSpec]) -> None:
        for group, chunk_size in zip(groups, self.chunk_sizes, strict=True):
            if chunk_size is not None:
                group.kv_cache_spec = ChunkedLocalAttentionSpec(
                    block_size=group.kv_cache_spec.block_size,
                    num_kv_heads=1,
                    head_size=1,
                    dtype=torch.float32,
                    attention_chunk_size=chunk_size,
                )
