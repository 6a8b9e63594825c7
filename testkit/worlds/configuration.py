"""Everything that decides how a scheduler is built and driven."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

FULL_ATTENTION = None
"""A group's sliding window when it has none."""


@dataclass(frozen=True)
class Configuration:
    """Everything that decides how a scheduler is built and driven."""

    name: str
    async_scheduling: bool
    policy: str
    sliding_windows: tuple[int | None, ...]
    latent_groups: tuple[bool, ...]
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_scheduled_tokens: int | None
    max_num_active_seqs: int | None
    enable_chunked_prefill: bool
    long_prefill_token_threshold: int
    long_prefill_token_threshold_adaptive: bool
    watermark: float
    scheduler_reserve_full_isl: bool
    enable_prefix_caching: bool
    prefix_caching_hash_algo: str
    prefix_cache_retention_interval: int | None
    use_v2_model_runner: bool
    log_stats: bool
    include_finished_set: bool
    batch_queue_size: int
    throttles_prefills: bool
    native_block_hasher: bool
    prefill_schedule_interval: int
    features: tuple[Any, ...] = ()
    """Each a `FeatureSettings`."""

    @property
    def needs_block_hashes(self) -> bool:
        return self.enable_prefix_caching or any(it.needs_block_hashes for it in self.features)

    @property
    def has_sliding_window(self) -> bool:
        return any(window is not FULL_ATTENTION for window in self.sliding_windows)
