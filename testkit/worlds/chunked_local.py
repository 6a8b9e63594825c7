"""Chunked local attention: a token sees those before it in its own chunk of the sequence."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, KVCacheGroupSpec
from vllm.v1.request import Request

from .configuration import Configuration
from .feature import Feature, FeatureSettings


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

    def start(self, configuration: Configuration, seed: int, coverage: Counter[str]) -> Feature:
        return ChunkedLocal(configuration, seed, coverage, self)


class ChunkedLocal(Feature):
    """Counts what chunks change in prefix hits and block tables."""

    def __init__(
        self,
        configuration: Configuration,
        seed: int,
        coverage: Counter[str],
        settings: ChunkedLocalSettings,
    ) -> None:
        super().__init__(configuration, seed, coverage)
        self._chunk_sizes = settings.chunk_sizes

    def cover_schedule(self, output: SchedulerOutput, requests: Mapping[str, Request]) -> None:
        coverage = self.coverage
        for new_request in output.scheduled_new_reqs:
            num_hit_tokens = new_request.num_computed_tokens
            if num_hit_tokens == 0:
                continue
            num_hit_blocks = num_hit_tokens // self.configuration.block_size
            hit_blocks = [block_ids[:num_hit_blocks] for block_ids in new_request.block_ids]
            held_blocks = [
                block_ids
                for block_ids, size in zip(hit_blocks, self._chunk_sizes, strict=True)
                if size is not None
            ]
            coverage["chunked local: hits"] += 1
            coverage["chunked local: hits within a chunk"] += any(map(any, held_blocks))
            coverage["chunked local: hits without a block"] += not any(map(any, hit_blocks))
            coverage["chunked local: hits that skip chunks"] += any(
                0 in block_ids for block_ids in held_blocks
            )

    def snapshot(self, _scheduler: Any) -> dict[str, Any]:
        sizes = [size for size in self._chunk_sizes if size is not None]
        is_aligned = all(size % self.configuration.block_size == 0 for size in sizes)
        kind = "aligned" if is_aligned else "unaligned"
        self.coverage[f"chunked local: snapshots with {kind} chunks"] += 1
        return {}
