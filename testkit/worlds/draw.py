"""Draws a configuration: what its name fixes, and all else from a seed."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import random
from typing import Any

from .configuration import FULL_ATTENTION, Configuration
from .features import draw_features
from .scenarios import NAMED_SETTINGS


def draw_configuration(name: str, seed: int) -> Configuration:
    """Complete the settings that `name` fixes with values drawn from `seed`."""
    rng = random.Random(f"configuration/{name}/{seed}")
    fixed = NAMED_SETTINGS[name]

    def choose(setting: str, *values: Any) -> Any:
        # Drawn even when fixed, so that fixing one setting leaves the others as they were.
        drawn = rng.choice(values)
        return fixed.get(setting, drawn)

    async_scheduling = choose("async_scheduling", False, True)
    block_size = choose("block_size", 4, 4, 16, 32)
    sliding_windows = _draw_sliding_windows(
        rng, choose("groups", "full", "sliding", "full+sliding", "full+3sliding", "full+2windows")
    )
    max_model_len = choose("max_model_len", 64, 96, 160, 320)
    max_num_seqs = choose("max_num_seqs", 2, 4, 8, 12)
    enable_chunked_prefill = choose("enable_chunked_prefill", True, True, True, False)
    smallest_budget = max_num_seqs if enable_chunked_prefill else max_model_len
    max_num_batched_tokens = smallest_budget + choose("spare_tokens", 0, 7, 24, 64, 256)
    long_prefill_token_threshold = choose("long_prefill_token_threshold", 0, 0, 5, 16, 33)
    enable_prefix_caching = choose("enable_prefix_caching", True, True, True, False)
    has_sliding_window = any(window is not FULL_ATTENTION for window in sliding_windows)
    batch_queue_size = choose("batch_queue_size", 2, 2, 3) if async_scheduling else 1
    in_flight_tokens = max_num_batched_tokens * (2 if async_scheduling else 1)
    latent_groups = _draw_latent_groups(
        rng, choose("latent", "none", "none", "all", "some"), len(sliding_windows)
    )
    smallest_pool = _smallest_pool(sliding_windows, block_size, max_model_len, in_flight_tokens)
    configuration = Configuration(
        name=name,
        async_scheduling=async_scheduling,
        policy=choose("policy", "fcfs", "fcfs", "priority"),
        sliding_windows=sliding_windows,
        latent_groups=latent_groups,
        block_size=block_size,
        num_blocks=int(smallest_pool * choose("pool_factor", 1.0, 1.0, 1.2, 1.6, 3.0)) + 1,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_scheduled_tokens=(
            rng.randint(max(1, max_num_batched_tokens // 2), max_num_batched_tokens)
            if choose("limits_scheduled_tokens", True, False, False) and enable_chunked_prefill
            else None
        ),
        max_num_active_seqs=choose("max_num_active_seqs", None, None, max_num_seqs // 2),
        enable_chunked_prefill=enable_chunked_prefill,
        long_prefill_token_threshold=long_prefill_token_threshold,
        long_prefill_token_threshold_adaptive=choose("adaptive_threshold", False, True),
        watermark=choose("watermark", 0.0, 0.0, 0.05, 0.3),
        scheduler_reserve_full_isl=choose("scheduler_reserve_full_isl", True, False, False),
        enable_prefix_caching=enable_prefix_caching,
        prefix_caching_hash_algo=choose("prefix_caching_hash_algo", *available_hash_algorithms()),
        prefix_cache_retention_interval=choose(
            "prefix_cache_retention_interval",
            *(
                (0, 0, None, block_size, 4 * block_size, 8 * block_size)
                if has_sliding_window
                else (0, None)
            ),
        ),
        use_v2_model_runner=choose("use_v2_model_runner", False, True),
        log_stats=choose("log_stats", True, True, False),
        include_finished_set=choose("include_finished_set", False, False, True),
        batch_queue_size=batch_queue_size,
        throttles_prefills=choose("throttles_prefills", *[False] * 9, True),
        native_block_hasher=choose("native_block_hasher", False, True),
        prefill_schedule_interval=choose("prefill_schedule_interval", 1, 1, 1, 2, 3, 4),
    )
    features = draw_features(configuration, seed, fixed)
    configuration = dataclasses.replace(configuration, features=features)
    for settings in features:
        configuration = settings.adjust(configuration)
    return configuration


def available_hash_algorithms() -> tuple[str, ...]:
    """Names of vLLM's prefix caching hashes whose libraries are installed."""
    if importlib.util.find_spec("xxhash") is None:
        return ("sha256", "sha256_cbor")
    return ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")


def _draw_sliding_windows(rng: random.Random, groups: str) -> tuple[int | None, ...]:
    window, other_window = rng.sample([5, 8, 12, 17, 32, 64, 128], 2)
    return {
        "full": (FULL_ATTENTION,),
        "2full": (FULL_ATTENTION, FULL_ATTENTION),
        "sliding": (window,),
        "full+sliding": rng.choice([(FULL_ATTENTION, window), (window, FULL_ATTENTION)]),
        "full+3sliding": (FULL_ATTENTION, window, window, window),
        "full+2windows": (FULL_ATTENTION, window, other_window),
    }[groups]


def _draw_latent_groups(rng: random.Random, which: str, num_groups: int) -> tuple[bool, ...]:
    """Return which groups have multi-head latent attention."""
    some = tuple(rng.random() < 0.5 for _ in range(num_groups))
    last = (*[False] * (num_groups - 1), True)
    none, every = (False,) * num_groups, (True,) * num_groups
    return {"none": none, "some": some, "last": last, "all": every}[which]


def _smallest_pool(
    sliding_windows: tuple[int | None, ...],
    block_size: int,
    max_model_len: int,
    in_flight_tokens: int,
) -> int:
    """Count the blocks that hold one request of the greatest length: vLLM starts with no fewer."""
    num_blocks = 0
    for window in sliding_windows:
        if window is FULL_ATTENTION:
            num_blocks += math.ceil(max_model_len / block_size)
        else:
            held_tokens = min(window - 1 + in_flight_tokens, max_model_len)
            num_blocks += math.ceil(held_tokens / block_size) + 1
    return num_blocks
