"""What each named scenario fixes. The seed draws everything else."""

from __future__ import annotations

from itertools import cycle
from typing import Any

from .states import LAYOUTS

Settings = dict[str, Any]


def _of(*settings: Settings, **own: Any) -> Settings:
    return {name: value for some in (*settings, own) for name, value in some.items()}


_SYNC: Settings = {"async_scheduling": False}
_ASYNC: Settings = {"async_scheduling": True}
_MODES = {"sync": _SYNC, "async": _ASYNC}
_FCFS: Settings = {"policy": "fcfs"}
_PRIORITY: Settings = {"policy": "priority"}
_CACHED: Settings = {"enable_prefix_caching": True}
_V2: Settings = {"use_v2_model_runner": True}
# vLLM wants Model Runner V2 and the prefix cache for it.
_EXPERTS = _of(_CACHED, _V2, aux_outputs={})
# Many requests in a pool that one of them could fill: almost every step preempts.
_SCARCE: Settings = {
    "pool_factor": 1.0,
    "block_size": 4,
    "max_num_seqs": 12,
    "max_num_active_seqs": None,
    "scheduler_reserve_full_isl": False,
    "watermark": 0.0,
}

# What each name fixes. All that is not listed is drawn from the seed.
NAMED_SETTINGS: dict[str, Settings] = {
    "sync-full": _of(_SYNC, groups="full"),
    "sync-full-v2": _of(_SYNC, _V2, groups="full"),
    "sync-priority": _of(_SYNC, _PRIORITY),
    "sync-sliding": _of(_SYNC, groups="sliding"),
    "sync-hybrid": _of(_SYNC, groups="full+sliding"),
    "async-full": _of(_ASYNC, groups="full"),
    "async-full-v2": _of(_ASYNC, _V2, groups="full"),
    "async-priority": _of(_ASYNC, _PRIORITY),
    "async-sliding": _of(_ASYNC, groups="sliding"),
    "async-hybrid": _of(_ASYNC, groups="full+sliding"),
    "async-hybrid-v2": _of(_ASYNC, _V2, groups="full+sliding"),
    "async-four-groups": _of(_ASYNC, groups="full+3sliding"),
    "async-two-windows": _of(_ASYNC, groups="full+2windows"),
    "sync-two-windows": _of(_SYNC, groups="full+2windows"),
    "sync-latent": _of(_SYNC, latent="all"),
    "async-some-latent": _of(_ASYNC, groups="full+2windows", latent="some"),
    "full-and-latent": _of(groups="2full", latent="last"),
    "no-prefix-cache": _of(enable_prefix_caching=False),
    "no-chunked-prefill": _of(enable_chunked_prefill=False),
    "deep-queue": _of(_ASYNC, _SCARCE, batch_queue_size=3),
    "throttled-prefills": _of(throttles_prefills=True),
    "sync-preempting": _of(_SYNC, _SCARCE),
    "async-preempting": _of(_ASYNC, _SCARCE),
    "preempting-by-priority": _of(_PRIORITY, _SCARCE),
    "large-batch": _of(
        max_num_seqs=64, max_num_active_seqs=None, spare_tokens=256, pool_factor=16.0
    ),
    "prefill-interval": _of(prefill_schedule_interval=3),
    "random": {},
    "sync-kv-events": _of(_SYNC, kv_events=True),
    "async-kv-events": _of(_ASYNC, _CACHED, kv_events=True),
    "kv-events-hybrid": _of(_CACHED, groups="full+2windows", kv_events=True),
    "kv-events-preempting": _of(_CACHED, _SCARCE, kv_events=True),
    "speculating-kv-events": _of(
        _CACHED, speculation={"method": "mtp", "disable_eagle_block_drop": False}, kv_events=True
    ),
    "kv-cache-metrics": _of(log_stats=True, kv_cache_metrics=True),
    "mfu-metrics": _of(log_stats=True, mfu_metrics=True),
    "speculating-mfu-metrics": _of(
        log_stats=True, speculation={"method": "mtp"}, mfu_metrics_in_detail=True
    ),
    "prompt-embeds": _of(_CACHED, prompt_embeds=True),
    "prompt-embeds-preempting": _of(_V2, _CACHED, _SCARCE, prompt_embeds=True, kv_events=True),
    "prompt-embeds-by-eagle": _of(
        _CACHED, groups="full+sliding", prompt_embeds=True, speculation={"method": "eagle"}
    ),
    "sampling-masks": _of(sampling_masks=True),
    "sampling-masks-speculating": _of(speculation={}, sampling_masks=True),
    "sync-pooling": _of(_SYNC, pooling={}),
    "async-pooling": _of(_ASYNC, pooling={}),
    "pooling-preempting": _of(_ASYNC, _SCARCE, pooling={}),
    "pooling-without-cache": _of(
        enable_chunked_prefill=False, enable_prefix_caching=False, pooling={"has_kv_cache": False}
    ),
    "sync-multimodal": _of(_SYNC, multimodal={}),
    "async-multimodal": _of(_ASYNC, multimodal={}),
    "multimodal-preempting": _of(_SCARCE, multimodal={}),
    "multimodal-v2": _of(_V2, multimodal={}),
    "multimodal-kv-events": _of(_CACHED, multimodal={}, kv_events=True),
    "multimodal-speculating": _of(
        enable_chunked_prefill=True,
        multimodal={},
        speculation={"method": "mtp", "num_tokens": 3, "num_mtp_modules": 3},
    ),
    "sync-speculating": _of(_SYNC, speculation={}),
    "async-speculating": _of(_ASYNC, speculation={}),
    "sync-eagle": _of(_SYNC, speculation={"method": "eagle"}),
    "async-eagle": _of(_ASYNC, use_v2_model_runner=False, speculation={"method": "eagle"}),
    "async-eagle-v2": _of(_ASYNC, _V2, speculation={"method": "eagle3"}),
    "eagle-hybrid": _of(
        _CACHED,
        groups="full+sliding",
        speculation={"method": "eagle", "disable_eagle_block_drop": False},
    ),
    "speculating-by-draft-model": _of(speculation={"method": "draft_model"}),
    "multi-module-mtp": _of(
        groups="full+sliding",
        enable_chunked_prefill=True,
        speculation={"method": "mtp", "num_mtp_modules": 3, "num_tokens": 3},
    ),
    "eagle-without-lookahead": _of(
        _CACHED,
        groups="full+sliding",
        speculation={"method": "eagle", "disable_lookahead_block_hashes": True},
    ),
    "dynamic-speculation": _of(speculation={"is_dynamic": True, "num_tokens": 4}),
    "speculating-preempting": _of(_SCARCE, speculation={}),
    "speculating-structured": _of(_SCARCE, speculation={"structured_share": 0.5}),
    "sync-lora": _of(_SYNC, lora=True),
    "async-lora": _of(_ASYNC, lora=True),
    "lora-by-priority": _of(_PRIORITY, _SCARCE, lora=True),
    "lora-throttled": _of(throttles_prefills=True, lora=True),
    "sync-sessions": _of(_SYNC, _FCFS, sessions=True),
    "async-sessions": _of(_ASYNC, _FCFS, sessions=True),
    "sessions-preempting": _of(_FCFS, _SCARCE, sessions=True),
    "sessions-by-priority": _of(_PRIORITY, sessions=True),
    "sessions-speculating": _of(_FCFS, speculation={"shortens_drafts": False}, sessions=True),
    "sessions-by-eagle": _of(
        _FCFS,
        _CACHED,
        _SCARCE,
        speculation={"method": "eagle", "shortens_drafts": False},
        sessions=True,
    ),
    "sync-pipeline": _of(_SYNC, pipeline=True),
    "async-pipeline": _of(_ASYNC, use_v2_model_runner=False, pipeline=True),
    "async-pipeline-v2": _of(_ASYNC, _V2, pipeline=True),
    "pipeline-preempting": _of(_SCARCE, pipeline=True),
    "pipeline-speculating": _of(_ASYNC, _V2, pipeline=True, speculation={}),
    "sync-pipeline-speculating": _of(_SYNC, pipeline=True, speculation={}),
    "data-parallel": _of(data_parallel=True),
    "sync-chunked-local": _of(_SYNC, groups="full+sliding", chunked_local=True),
    "async-chunked-local": _of(_ASYNC, groups="full+sliding", chunked_local=True),
    "chunked-local-alone": _of(groups="sliding", chunked_local=True),
    "chunked-local-and-windows": _of(groups="full+2windows", chunked_local=True),
    "sync-connector": _of(_SYNC, connector={}),
    "async-connector": _of(_ASYNC, connector={}),
    "connector-preempting": _of(_SCARCE, connector={}),
    "connector-failures": _of(groups="full", connector={"failure_share": 0.4, "match_share": 0.7}),
    "connector-failures-hybrid": _of(
        groups="full+sliding",
        connector={"failure_share": 0.4, "match_share": 0.7, "async_share": 1.0},
    ),
    "connector-speculating": _of(connector={"match_share": 0.7}, speculation={}),
    "connector-multimodal": _of(connector={"match_share": 0.7}, multimodal={}),
    # Requests whose blocks have been loaded wait for their images, and go first all the same.
    "connector-loads-multimodal": _of(
        connector={"match_share": 1.0, "async_share": 1.0}, multimodal={}
    ),
    # What a failed load takes back of a prompt, Model Runner V2 gets the images of again.
    "connector-failures-multimodal": _of(
        _SYNC,
        _V2,
        groups="full",
        connector={"failure_share": 0.4, "match_share": 0.7, "async_share": 0.2},
        multimodal={},
    ),
    "ec-connector": _of(multimodal={}, ec_connector={}),
    "ec-connector-preempting": _of(_SCARCE, multimodal={}, ec_connector={}),
    "ec-connector-v2": _of(_V2, multimodal={}, ec_connector={}),
    "ec-connector-speculating": _of(
        multimodal={},
        ec_connector={},
        speculation={"method": "mtp", "num_tokens": 3, "num_mtp_modules": 3},
    ),
    "ec-and-kv-connectors": _of(connector={"match_share": 0.7}, multimodal={}, ec_connector={}),
    # A model without an encoder: its requests end all the same.
    "ec-connector-of-texts": _of(ec_connector={}),
    "example-connector": _of(groups="full", example_connector={}),
    "offloading": _of(_CACHED, pool_factor=1.0, offloading={}, kv_events=True),
    "offloading-preempting": _of(_CACHED, _SCARCE, offloading={}),
    "connector-kv-events": _of(connector={"makes_events": True}, kv_events=True),
    "random-features-with-connector": _of(draws_features=True, connector={}),
    "sync-experts": _of(_EXPERTS, _SYNC),
    "async-experts": _of(_EXPERTS, _ASYNC),
    "experts-preempting": _of(_EXPERTS, _SCARCE),
    "experts-speculating": _of(_EXPERTS, speculation={}),
    "experts-sessions": _of(_EXPERTS, _FCFS, sessions=True),
    "experts-states": _of(_EXPERTS, states={"match_unit": 4}),
    "experts-connector": _of(_EXPERTS, connector={"match_share": 0.7}),
    **{
        f"{mode}-{layout}": _of(settings, states={"layout": layout})
        for layout, (mode, settings) in zip(LAYOUTS, cycle(_MODES.items()), strict=False)
    },
    "async-qwen3-next": _of(_ASYNC, _CACHED, states={"layout": "qwen3-next"}),
    "states-within-blocks": _of(
        _CACHED, prefix_cache_retention_interval=None, states={"match_unit": 4}
    ),
    "states-kept-sparsely": _of(
        _CACHED, prefix_cache_retention_interval=0, states={"layout": "granite-4"}
    ),
    "states-of-every-block": _of(_CACHED, states={"mode": "all"}),
    "states-without-cache": _of(enable_prefix_caching=False, states={}),
    "states-preempting": _of(_CACHED, _SCARCE, states={}),
    "states-by-priority": _of(_PRIORITY, _SCARCE, states={}),
    "states-speculating": _of(_CACHED, states={}, speculation={"method": "ngram"}),
    "states-by-eagle": _of(
        _CACHED, states={"layout": "qwen3-next"}, speculation={"method": "eagle"}
    ),
    "states-by-mtp": _of(
        _CACHED,
        states={"layout": "qwen3-next"},
        speculation={"method": "mtp", "num_mtp_modules": 1},
    ),
    "states-speculating-preempting": _of(_SCARCE, states={}, speculation={"method": "ngram"}),
    "states-lora": _of(states={}, lora=True),
    "states-sessions": _of(_FCFS, states={}, sessions=True),
    # Of a hit that ends within a block, vLLM would tell a hash that is not there.
    "states-kv-events": _of(_CACHED, states={"match_unit": None}, kv_events=True),
    "states-kv-cache-metrics": _of(log_stats=True, states={}, kv_cache_metrics=True),
    "states-multimodal": _of(states={}, multimodal={}),
    "sync-circular": _of(_SYNC, states={"layout": "glm-5-next"}),
    "async-circular": _of(_ASYNC, _CACHED, states={"layout": "glm-5-next"}),
    "circular-and-sliding": _of(_CACHED, states={"layout": "circular-and-sliding"}),
    "sync-circular-latent-and-sliding": _of(_SYNC, states={"layout": "deepseek-v4.1"}),
    "async-circular-latent-and-sliding": _of(
        _ASYNC, states={"layout": "deepseek-v4.1", "mixes_precisions": True}
    ),
    "circular-and-states": _of(_CACHED, states={"layout": "qwen4-exp"}),
    "circular-without-cache": _of(enable_prefix_caching=False, states={"layout": "deepseek-v4.1"}),
    "circular-preempting": _of(_SCARCE, states={"layout": "deepseek-v4.1"}),
    "circular-by-priority": _of(_PRIORITY, _SCARCE, states={"layout": "circular-and-sliding"}),
    "circular-where-all-must-fit": _of(
        _SCARCE, states={"layout": "deepseek-v4.1"}, scheduler_reserve_full_isl=True
    ),
    "circular-by-mtp": _of(
        _CACHED,
        states={"layout": "deepseek-v4.1"},
        speculation={"method": "mtp", "disable_eagle_block_drop": False},
    ),
    "circular-and-states-by-mtp": _of(
        _CACHED, states={"layout": "qwen4-exp"}, speculation={"method": "mtp", "num_mtp_modules": 1}
    ),
    # Only a circular buffer is known to be the drafter's.
    "circular-by-eagle": _of(
        _CACHED,
        prefix_cache_retention_interval=0,
        states={"layout": "deepseek-v4.1"},
        speculation={
            "method": "eagle",
            "disable_eagle_block_drop": False,
            "disable_lookahead_block_hashes": True,
            "flags_last_group": True,
        },
    ),
    "circular-kv-events": _of(_CACHED, states={"layout": "deepseek-v4.1"}, kv_events=True),
    "circular-kv-cache-metrics": _of(
        log_stats=True, states={"layout": "glm-5-next"}, kv_cache_metrics=True
    ),
    "circular-sessions": _of(_FCFS, states={"layout": "deepseek-v4.1"}, sessions=True),
    # The features are drawn apart from all else, so this can become a setting of "random" itself.
    "random-features": _of(draws_features=True),
    "lora-kv-events": _of(_CACHED, lora=True, kv_events=True),
}

_CONNECTORS = {"connector", "ec_connector", "example_connector", "offloading"}


def is_verifiable(name: str) -> bool:
    """Return whether vLLM's scheduler can run beside another: a connector has one such side."""
    return not _CONNECTORS & set(NAMED_SETTINGS.get(name, ()))
