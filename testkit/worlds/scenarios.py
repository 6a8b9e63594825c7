"""What each named scenario fixes. The seed draws everything else."""

from __future__ import annotations

from typing import Any

from .states import LAYOUTS

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
    | {"lora-kv-events": {"enable_prefix_caching": True, "lora": True, "kv_events": True}}
)

_CONNECTORS = {"connector", "ec_connector", "example_connector", "offloading"}


def is_verifiable(name: str) -> bool:
    """Return whether vLLM's scheduler can run beside another: a connector has one such side."""
    return not _CONNECTORS & set(NAMED_SETTINGS.get(name, ()))
