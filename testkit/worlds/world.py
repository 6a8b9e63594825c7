"""Named scheduler configurations, and the vLLM objects that one of them needs.

A configuration fixes what its name promises (for example "async scheduling over two KV cache
groups"); the seed draws everything else, so that every name covers a family of engines. All of
it is built from a small local `config.json`: no weights, no tokenizer and no network.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.util
import json
import logging
import math
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from .feature import FeatureSettings
from .features import draw_features
from .opt_config import OPT_CONFIG
from .states import LAYOUTS

BlockHasher = Callable[[Any], list[bytes]]
SchedulerClass = type[SchedulerInterface]
CandidateChooser = Callable[["Configuration"], SchedulerClass]

_RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"

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
    features: tuple[FeatureSettings, ...] = ()

    @property
    def needs_block_hashes(self) -> bool:
        return self.enable_prefix_caching or any(it.needs_block_hashes for it in self.features)

    @property
    def has_sliding_window(self) -> bool:
        return any(window is not FULL_ATTENTION for window in self.sliding_windows)


# Many requests in a pool that one of them could fill: almost every step preempts.
_SCARCE_BLOCKS: dict[str, Any] = {
    "pool_factor": 1.0,
    "block_size": 4,
    "max_num_seqs": 12,
    "max_num_active_seqs": None,
    "scheduler_reserve_full_isl": False,
    "watermark": 0.0,
}

# What each name fixes. All that is not listed is drawn from the seed.
NAMED_SETTINGS: dict[str, dict[str, Any]] = {
    "sync-full": {"async_scheduling": False, "groups": "full"},
    "sync-full-v2": {"async_scheduling": False, "groups": "full", "use_v2_model_runner": True},
    "sync-priority": {"async_scheduling": False, "policy": "priority"},
    "sync-sliding": {"async_scheduling": False, "groups": "sliding"},
    "sync-hybrid": {"async_scheduling": False, "groups": "full+sliding"},
    "async-full": {"async_scheduling": True, "groups": "full"},
    "async-full-v2": {"async_scheduling": True, "groups": "full", "use_v2_model_runner": True},
    "async-priority": {"async_scheduling": True, "policy": "priority"},
    "async-sliding": {"async_scheduling": True, "groups": "sliding"},
    "async-hybrid": {"async_scheduling": True, "groups": "full+sliding"},
    "async-hybrid-v2": {
        "async_scheduling": True,
        "groups": "full+sliding",
        "use_v2_model_runner": True,
    },
    "async-four-groups": {"async_scheduling": True, "groups": "full+3sliding"},
    "async-two-windows": {"async_scheduling": True, "groups": "full+2windows"},
    "sync-two-windows": {"async_scheduling": False, "groups": "full+2windows"},
    "sync-latent": {"async_scheduling": False, "latent": "all"},
    "async-some-latent": {"async_scheduling": True, "groups": "full+2windows", "latent": "some"},
    "full-and-latent": {"groups": "2full", "latent": "last"},
    "no-prefix-cache": {"enable_prefix_caching": False},
    "no-chunked-prefill": {"enable_chunked_prefill": False},
    "deep-queue": {"async_scheduling": True, "batch_queue_size": 3} | _SCARCE_BLOCKS,
    "throttled-prefills": {"throttles_prefills": True},
    "sync-preempting": {"async_scheduling": False} | _SCARCE_BLOCKS,
    "async-preempting": {"async_scheduling": True} | _SCARCE_BLOCKS,
    "preempting-by-priority": {"policy": "priority"} | _SCARCE_BLOCKS,
    "large-batch": {
        "max_num_seqs": 64,
        "max_num_active_seqs": None,
        "spare_tokens": 256,
        "pool_factor": 16.0,
    },
    "prefill-interval": {"prefill_schedule_interval": 3},
    "random": {},
}

_FEATURE_SETTINGS: dict[str, dict[str, Any]] = {
    "sync-kv-events": {"async_scheduling": False, "kv_events": True},
    "async-kv-events": {
        "async_scheduling": True,
        "enable_prefix_caching": True,
        "kv_events": True,
    },
    "kv-events-hybrid": {
        "enable_prefix_caching": True,
        "groups": "full+2windows",
        "kv_events": True,
    },
    "kv-events-preempting": {"enable_prefix_caching": True, "kv_events": True} | _SCARCE_BLOCKS,
    "speculating-kv-events": {
        "enable_prefix_caching": True,
        "speculation": {"method": "mtp", "disable_eagle_block_drop": False},
        "kv_events": True,
    },
    "kv-cache-metrics": {"log_stats": True, "kv_cache_metrics": True},
    "mfu-metrics": {"log_stats": True, "mfu_metrics": True},
    "speculating-mfu-metrics": {
        "log_stats": True,
        "speculation": {"method": "mtp"},
        "mfu_metrics_in_detail": True,
    },
    "prompt-embeds": {"enable_prefix_caching": True, "prompt_embeds": True},
    "prompt-embeds-preempting": {
        "enable_prefix_caching": True,
        "use_v2_model_runner": True,
        "prompt_embeds": True,
        "kv_events": True,
    }
    | _SCARCE_BLOCKS,
    "prompt-embeds-by-eagle": {
        "enable_prefix_caching": True,
        "groups": "full+sliding",
        "prompt_embeds": True,
        "speculation": {"method": "eagle"},
    },
    "sampling-masks": {"sampling_masks": True},
    "sampling-masks-speculating": {"speculation": {}, "sampling_masks": True},
    "sync-pooling": {"async_scheduling": False, "pooling": {}},
    "async-pooling": {"async_scheduling": True, "pooling": {}},
    "pooling-preempting": {"async_scheduling": True, "pooling": {}} | _SCARCE_BLOCKS,
    "pooling-without-cache": {
        "enable_chunked_prefill": False,
        "enable_prefix_caching": False,
        "pooling": {"has_kv_cache": False},
    },
    "sync-multimodal": {"async_scheduling": False, "multimodal": {}},
    "async-multimodal": {"async_scheduling": True, "multimodal": {}},
    "multimodal-preempting": {"multimodal": {}} | _SCARCE_BLOCKS,
    "multimodal-v2": {"use_v2_model_runner": True, "multimodal": {}},
    "multimodal-kv-events": {"enable_prefix_caching": True, "multimodal": {}, "kv_events": True},
    "multimodal-speculating": {
        "enable_chunked_prefill": True,
        "multimodal": {},
        "speculation": {"method": "mtp", "num_tokens": 3, "num_mtp_modules": 3},
    },
}

_SPECULATION_SETTINGS: dict[str, dict[str, Any]] = {
    "sync-speculating": {"async_scheduling": False, "speculation": {}},
    "async-speculating": {"async_scheduling": True, "speculation": {}},
    "sync-eagle": {"async_scheduling": False, "speculation": {"method": "eagle"}},
    "async-eagle": {
        "async_scheduling": True,
        "use_v2_model_runner": False,
        "speculation": {"method": "eagle"},
    },
    "async-eagle-v2": {
        "async_scheduling": True,
        "use_v2_model_runner": True,
        "speculation": {"method": "eagle3"},
    },
    "eagle-hybrid": {
        "groups": "full+sliding",
        "enable_prefix_caching": True,
        "speculation": {"method": "eagle", "disable_eagle_block_drop": False},
    },
    "speculating-by-draft-model": {"speculation": {"method": "draft_model"}},
    "multi-module-mtp": {
        "groups": "full+sliding",
        "enable_chunked_prefill": True,
        "speculation": {"method": "mtp", "num_mtp_modules": 3, "num_tokens": 3},
    },
    "eagle-without-lookahead": {
        "groups": "full+sliding",
        "enable_prefix_caching": True,
        "speculation": {"method": "eagle", "disable_lookahead_block_hashes": True},
    },
    "dynamic-speculation": {"speculation": {"is_dynamic": True, "num_tokens": 4}},
    "speculating-preempting": {"speculation": {}} | _SCARCE_BLOCKS,
    "speculating-structured": {"speculation": {"structured_share": 0.5}} | _SCARCE_BLOCKS,
}

_LORA_SETTINGS: dict[str, dict[str, Any]] = {
    "sync-lora": {"async_scheduling": False, "lora": True},
    "async-lora": {"async_scheduling": True, "lora": True},
    "lora-by-priority": {"policy": "priority", "lora": True} | _SCARCE_BLOCKS,
    "lora-throttled": {"throttles_prefills": True, "lora": True},
}

_SESSION_SETTINGS: dict[str, dict[str, Any]] = {
    "sync-sessions": {"async_scheduling": False, "policy": "fcfs", "sessions": True},
    "async-sessions": {"async_scheduling": True, "policy": "fcfs", "sessions": True},
    "sessions-preempting": {"policy": "fcfs", "sessions": True} | _SCARCE_BLOCKS,
    "sessions-by-priority": {"policy": "priority", "sessions": True},
    "sessions-speculating": {
        "policy": "fcfs",
        "speculation": {"shortens_drafts": False},
        "sessions": True,
    },
    "sessions-by-eagle": {
        "policy": "fcfs",
        "enable_prefix_caching": True,
        "speculation": {"method": "eagle", "shortens_drafts": False},
        "sessions": True,
    }
    | _SCARCE_BLOCKS,
}

_PARALLEL_SETTINGS: dict[str, dict[str, Any]] = {
    "sync-pipeline": {"async_scheduling": False, "pipeline": True},
    "async-pipeline": {
        "async_scheduling": True,
        "use_v2_model_runner": False,
        "pipeline": True,
    },
    "async-pipeline-v2": {"async_scheduling": True, "use_v2_model_runner": True, "pipeline": True},
    "pipeline-preempting": {"pipeline": True} | _SCARCE_BLOCKS,
    "pipeline-speculating": {
        "async_scheduling": True,
        "use_v2_model_runner": True,
        "pipeline": True,
        "speculation": {},
    },
    "sync-pipeline-speculating": {
        "async_scheduling": False,
        "pipeline": True,
        "speculation": {},
    },
    "data-parallel": {"data_parallel": True},
}

# The features are drawn apart from all else, so this can become a setting of "random" itself.
_RANDOM_SETTINGS: dict[str, dict[str, Any]] = {
    "random-features": {"draws_features": True},
}

_CHUNKED_LOCAL_SETTINGS: dict[str, dict[str, Any]] = {
    "sync-chunked-local": {
        "async_scheduling": False,
        "groups": "full+sliding",
        "chunked_local": True,
    },
    "async-chunked-local": {
        "async_scheduling": True,
        "groups": "full+sliding",
        "chunked_local": True,
    },
    "chunked-local-alone": {"groups": "sliding", "chunked_local": True},
    "chunked-local-and-windows": {"groups": "full+2windows", "chunked_local": True},
}

_CONNECTOR_SETTINGS: dict[str, dict[str, Any]] = {
    "sync-connector": {"async_scheduling": False, "connector": {}},
    "async-connector": {"async_scheduling": True, "connector": {}},
    "connector-preempting": {"connector": {}} | _SCARCE_BLOCKS,
    "connector-failures": {
        "groups": "full",
        "connector": {"failure_share": 0.4, "match_share": 0.7},
    },
    "connector-failures-hybrid": {
        "groups": "full+sliding",
        "connector": {"failure_share": 0.4, "match_share": 0.7, "async_share": 1.0},
    },
    "connector-speculating": {"connector": {"match_share": 0.7}, "speculation": {}},
    "connector-multimodal": {"connector": {"match_share": 0.7}, "multimodal": {}},
    # Requests whose blocks have been loaded wait for their images, and go first all the same.
    "connector-loads-multimodal": {
        "connector": {"match_share": 1.0, "async_share": 1.0},
        "multimodal": {},
    },
    # What a failed load takes back of a prompt, Model Runner V2 gets the images of again.
    "connector-failures-multimodal": {
        "async_scheduling": False,
        "groups": "full",
        "use_v2_model_runner": True,
        "connector": {"failure_share": 0.4, "match_share": 0.7, "async_share": 0.2},
        "multimodal": {},
    },
    "ec-connector": {"multimodal": {}, "ec_connector": {}},
    "ec-connector-preempting": {"multimodal": {}, "ec_connector": {}} | _SCARCE_BLOCKS,
    "ec-connector-v2": {"use_v2_model_runner": True, "multimodal": {}, "ec_connector": {}},
    "ec-connector-speculating": {
        "multimodal": {},
        "ec_connector": {},
        "speculation": {"method": "mtp", "num_tokens": 3, "num_mtp_modules": 3},
    },
    "ec-and-kv-connectors": {
        "connector": {"match_share": 0.7},
        "multimodal": {},
        "ec_connector": {},
    },
    # A model without an encoder: its requests end all the same.
    "ec-connector-of-texts": {"ec_connector": {}},
    "example-connector": {"groups": "full", "example_connector": {}},
    "offloading": {
        "enable_prefix_caching": True,
        "pool_factor": 1.0,
        "offloading": {},
        "kv_events": True,
    },
    "offloading-preempting": {"enable_prefix_caching": True, "offloading": {}} | _SCARCE_BLOCKS,
    "connector-kv-events": {"connector": {"makes_events": True}, "kv_events": True},
    "random-features-with-connector": {"draws_features": True, "connector": {}},
}

# vLLM wants Model Runner V2 and the prefix cache for it.
_AUX_OUTPUT: dict[str, Any] = {
    "enable_prefix_caching": True,
    "use_v2_model_runner": True,
    "aux_outputs": {},
}

_AUX_OUTPUT_SETTINGS: dict[str, dict[str, Any]] = {
    "sync-experts": {"async_scheduling": False} | _AUX_OUTPUT,
    "async-experts": {"async_scheduling": True} | _AUX_OUTPUT,
    "experts-preempting": _AUX_OUTPUT | _SCARCE_BLOCKS,
    "experts-speculating": {"speculation": {}} | _AUX_OUTPUT,
    "experts-sessions": {"policy": "fcfs", "sessions": True} | _AUX_OUTPUT,
    "experts-states": {"states": {"match_unit": 4}} | _AUX_OUTPUT,
    "experts-connector": {"connector": {"match_share": 0.7}} | _AUX_OUTPUT,
}

_STATE_SETTINGS: dict[str, dict[str, Any]] = {
    f"{'async' if number % 2 else 'sync'}-{layout}": {
        "async_scheduling": bool(number % 2),
        "states": {"layout": layout},
    }
    for number, layout in enumerate(LAYOUTS)
} | {
    "sync-qwen3-next": {"async_scheduling": False, "states": {"layout": "qwen3-next"}},
    "async-qwen3-next": {
        "async_scheduling": True,
        "enable_prefix_caching": True,
        "states": {"layout": "qwen3-next"},
    },
    "states-within-blocks": {
        "enable_prefix_caching": True,
        "prefix_cache_retention_interval": None,
        "states": {"match_unit": 4},
    },
    "states-kept-sparsely": {
        "enable_prefix_caching": True,
        "prefix_cache_retention_interval": 0,
        "states": {"layout": "granite-4"},
    },
    "states-of-every-block": {"enable_prefix_caching": True, "states": {"mode": "all"}},
    "states-without-cache": {"enable_prefix_caching": False, "states": {}},
    "states-preempting": {"enable_prefix_caching": True, "states": {}} | _SCARCE_BLOCKS,
    "states-by-priority": {"policy": "priority", "states": {}} | _SCARCE_BLOCKS,
    "states-speculating": {
        "enable_prefix_caching": True,
        "states": {},
        "speculation": {"method": "ngram"},
    },
    "states-by-eagle": {
        "enable_prefix_caching": True,
        "states": {"layout": "qwen3-next"},
        "speculation": {"method": "eagle"},
    },
    "states-by-mtp": {
        "enable_prefix_caching": True,
        "states": {"layout": "qwen3-next"},
        "speculation": {"method": "mtp", "num_mtp_modules": 1},
    },
    "states-speculating-preempting": {
        "states": {},
        "speculation": {"method": "ngram"},
    }
    | _SCARCE_BLOCKS,
    "states-lora": {"states": {}, "lora": True},
    "states-sessions": {"policy": "fcfs", "states": {}, "sessions": True},
    # Of a hit that ends within a block, vLLM would tell a hash that is not there.
    "states-kv-events": {
        "enable_prefix_caching": True,
        "states": {"match_unit": None},
        "kv_events": True,
    },
    "states-kv-cache-metrics": {"log_stats": True, "states": {}, "kv_cache_metrics": True},
    "states-multimodal": {"states": {}, "multimodal": {}},
}

_CIRCULAR_SETTINGS: dict[str, dict[str, Any]] = {
    "sync-circular": {"async_scheduling": False, "states": {"layout": "glm-5-next"}},
    "async-circular": {
        "async_scheduling": True,
        "enable_prefix_caching": True,
        "states": {"layout": "glm-5-next"},
    },
    "circular-and-sliding": {
        "enable_prefix_caching": True,
        "states": {"layout": "circular-and-sliding"},
    },
    "sync-circular-latent-and-sliding": {
        "async_scheduling": False,
        "states": {"layout": "deepseek-v4.1"},
    },
    "async-circular-latent-and-sliding": {
        "async_scheduling": True,
        "states": {"layout": "deepseek-v4.1", "mixes_precisions": True},
    },
    "circular-and-states": {"enable_prefix_caching": True, "states": {"layout": "qwen4-exp"}},
    "circular-without-cache": {
        "enable_prefix_caching": False,
        "states": {"layout": "deepseek-v4.1"},
    },
    "circular-preempting": {"states": {"layout": "deepseek-v4.1"}} | _SCARCE_BLOCKS,
    "circular-by-priority": {"policy": "priority", "states": {"layout": "circular-and-sliding"}}
    | _SCARCE_BLOCKS,
    "circular-where-all-must-fit": {"states": {"layout": "deepseek-v4.1"}}
    | _SCARCE_BLOCKS
    | {"scheduler_reserve_full_isl": True},
    "circular-by-mtp": {
        "enable_prefix_caching": True,
        "states": {"layout": "deepseek-v4.1"},
        "speculation": {"method": "mtp", "disable_eagle_block_drop": False},
    },
    "circular-and-states-by-mtp": {
        "enable_prefix_caching": True,
        "states": {"layout": "qwen4-exp"},
        "speculation": {"method": "mtp", "num_mtp_modules": 1},
    },
    # Only a circular buffer is known to be the drafter's.
    "circular-by-eagle": {
        "enable_prefix_caching": True,
        "prefix_cache_retention_interval": 0,
        "states": {"layout": "deepseek-v4.1"},
        "speculation": {
            "method": "eagle",
            "disable_eagle_block_drop": False,
            "disable_lookahead_block_hashes": True,
            "flags_last_group": True,
        },
    },
    "circular-kv-events": {
        "enable_prefix_caching": True,
        "states": {"layout": "deepseek-v4.1"},
        "kv_events": True,
    },
    "circular-kv-cache-metrics": {
        "log_stats": True,
        "states": {"layout": "glm-5-next"},
        "kv_cache_metrics": True,
    },
    "circular-sessions": {
        "policy": "fcfs",
        "states": {"layout": "deepseek-v4.1"},
        "sessions": True,
    },
}

NAMED_SETTINGS |= (
    _FEATURE_SETTINGS
    | _SPECULATION_SETTINGS
    | _LORA_SETTINGS
    | _SESSION_SETTINGS
    | _PARALLEL_SETTINGS
    | _CHUNKED_LOCAL_SETTINGS
    | _CONNECTOR_SETTINGS
    | _AUX_OUTPUT_SETTINGS
    | _STATE_SETTINGS
    | _CIRCULAR_SETTINGS
    | _RANDOM_SETTINGS
)


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


def stock_scheduler_class(configuration: Configuration) -> SchedulerClass:
    """Return the class that vLLM itself would choose."""
    chosen: SchedulerClass = AsyncScheduler if configuration.async_scheduling else Scheduler
    return chosen


def sparksched_scheduler_class(_configuration: Configuration) -> SchedulerClass:
    """Return sparksched's class; it serves synchronous and asynchronous scheduling."""
    from sparksched.scheduler import SparkScheduler

    return SparkScheduler


_CONNECTORS = {"connector", "ec_connector", "example_connector", "offloading"}


def is_verifiable(name: str) -> bool:
    """Return whether vLLM's scheduler can run beside another: a connector has one such side."""
    return not _CONNECTORS & set(NAMED_SETTINGS.get(name, ()))


def verifying_scheduler_class(configuration: Configuration) -> SchedulerClass:
    """Return sparksched's class that has vLLM's scheduler inside, and stops when they differ."""
    from sparksched.verify.scheduler import VerifyingScheduler

    if not is_verifiable(configuration.name):
        return sparksched_scheduler_class(configuration)
    return VerifyingScheduler


CANDIDATES: dict[str, CandidateChooser] = {
    "stock": stock_scheduler_class,
    "sparksched": sparksched_scheduler_class,
    "verifying": verifying_scheduler_class,
}


def stock_block_hasher(world: World) -> BlockHasher | None:
    """Return vLLM's own block hasher, as the engine core hands it to each request."""
    configuration = world.configuration
    if not configuration.needs_block_hashes:
        return None
    hash_function = get_hash_fn_by_name(configuration.prefix_caching_hash_algo)
    hasher: BlockHasher = get_request_block_hasher(
        world.hash_block_size, hash_function, *world.hash_lookahead
    )
    return hasher


def candidate_block_hasher(world: World, scheduler_class: SchedulerClass) -> BlockHasher | None:
    """Return the block hasher for the candidate's requests.

    The one place that knows of the candidate's own hasher. It is a variation that the seed draws,
    as sparksched must serve requests that were hashed by vLLM too. The block hashes of both sides
    are compared whichever is used.
    """
    configuration = world.configuration
    is_native = scheduler_class.__module__.startswith("sparksched.")
    if not (is_native and configuration.native_block_hasher and configuration.needs_block_hashes):
        return stock_block_hasher(world)
    from sparksched.engine.hooks import native_block_hasher

    return native_block_hasher(
        configuration.prefix_caching_hash_algo, world.hash_block_size, *world.hash_lookahead
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
