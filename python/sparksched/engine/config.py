"""Reads vLLM's configuration, and makes of it what the Rust core is built from."""

from typing import Any

from vllm import envs
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
)
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

from sparksched.compat import releases
from sparksched.compat.kv_cache import eagle_groups
from sparksched.engine import states


def core_config(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    block_size: int,
    hash_block_size: int,
    log_stats: bool,
    kv_transfer: dict[str, bool] | None = None,
) -> dict[str, Any]:
    """Return what the Rust core is built from; `scheduler_config()` there reads it.

    `kv_transfer` says how a KV connector takes part; None without one.
    """
    scheduler_config = vllm_config.scheduler_config
    cache_config, events_config = vllm_config.cache_config, vllm_config.kv_events_config
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    max_num_scheduled_tokens = scheduler_config.max_num_scheduled_tokens
    if max_num_scheduled_tokens is None:
        max_num_scheduled_tokens = scheduler_config.max_num_batched_tokens
    max_num_active_reqs = scheduler_config.max_num_active_seqs
    if max_num_active_reqs is None:
        max_num_active_reqs = scheduler_config.max_num_seqs
    return {
        "async_scheduling": bool(scheduler_config.async_scheduling),
        "policy": scheduler_config.policy,
        "max_num_active_reqs": max_num_active_reqs,
        "max_num_scheduled_tokens": max_num_scheduled_tokens,
        "max_num_batched_tokens": scheduler_config.max_num_batched_tokens,
        "max_model_len": vllm_config.model_config.max_model_len,
        "enable_chunked_prefill": scheduler_config.enable_chunked_prefill,
        "long_prefill_token_threshold": scheduler_config.long_prefill_token_threshold,
        "long_prefill_token_threshold_adaptive": (
            scheduler_config.long_prefill_token_threshold_adaptive
        ),
        "reserve_full_isl": scheduler_config.scheduler_reserve_full_isl,
        **_speculation(vllm_config),
        "num_sampled_tokens_per_step": int(vllm_config.model_config.runner_type != "pooling"),
        "max_loras": None if vllm_config.lora_config is None else vllm_config.lora_config.max_loras,
        "decode_stagger": _decode_stagger(vllm_config),
        "uses_mrope": vllm_config.model_config.uses_mrope,
        "resume_as_new": vllm_config.use_v2_model_runner,
        "sends_sampled_tokens": (
            vllm_config.parallel_config.pipeline_parallel_size > 1
            and not scheduler_config.async_scheduling
        ),
        **releases.behaviors(vllm_config),
        "log_stats": log_stats,
        "block_size": block_size,
        "hash_block_size": hash_block_size,
        **states.core_config(vllm_config, kv_cache_config, hash_block_size),
        "num_blocks": kv_cache_config.num_blocks,
        "watermark_blocks": int(scheduler_config.watermark * kv_cache_config.num_blocks),
        "groups": [_core_group(spec, vllm_config) for spec in specs],
        "group_block_sizes": [spec.block_size for spec in specs],
        "lookup_groups": _lookup_groups(specs),
        "eagle_groups": eagle_groups(vllm_config, kv_cache_config),
        "retention_interval": kv_cache_config.prefix_cache_retention_interval,
        "hash_algorithm": (
            cache_config.prefix_caching_hash_algo if cache_config.enable_prefix_caching else None
        ),
        "num_hash_lookahead_tokens": releases.num_hash_lookahead_tokens(vllm_config),
        "enable_kv_cache_events": bool(events_config and events_config.enable_kv_cache_events),
        "kv_cache_metrics": vllm_config.observability_config.kv_cache_metrics,
        "kv_transfer": kv_transfer,
        "transfers_encoder_outputs": vllm_config.ec_transfer_config is not None,
        "collects_aux_output": vllm_config.aux_output_config.enabled,
    }


def _speculation(vllm_config: VllmConfig) -> dict[str, Any]:
    """Return the settings of speculative decoding; zeros without it."""
    config = vllm_config.speculative_config
    by_batch_size = None
    if config is not None and config.num_speculative_tokens_per_batch_size:
        by_batch_size = build_dynamic_sd_schedule_lookup(
            config.num_speculative_tokens_per_batch_size,
            vllm_max_batch_size=vllm_config.scheduler_config.max_num_seqs,
            vllm_num_speculative_tokens=vllm_config.num_speculative_tokens,
        )
    observability_config = vllm_config.observability_config
    return {
        "num_spec_tokens": vllm_config.num_speculative_tokens,
        "num_lookahead_tokens": vllm_config.num_lookahead_tokens,
        "num_prefill_lookahead_tokens": vllm_config.num_prefill_lookahead_tokens,
        "num_draft_slots": 0 if config is None else config.max_num_new_slots_for_drafting,
        "num_spec_tokens_by_batch_size": by_batch_size,
        "per_request_spec_decode_metrics": observability_config.per_request_spec_decode_metrics,
    }


def _decode_stagger(vllm_config: VllmConfig) -> int:
    """Return the steps between two tokens of a request that Model Runner V2 wants; 0 for V1."""
    if not vllm_config.use_v2_model_runner:
        return 0
    if current_platform.is_xpu() and not envs.VLLM_XPU_PP_MICROBATCH:
        return 1
    return int(vllm_config.parallel_config.pipeline_parallel_size)


def _core_group(spec: KVCacheSpec, vllm_config: VllmConfig) -> tuple[str, int, int, int]:
    """Return a group's kind, window or chunk, retained tokens, and most blocks at admission."""
    if isinstance(spec, FullAttentionSpec):
        return "full", 0, 0, 0
    if isinstance(spec, MambaSpec):
        return states.core_group(spec)
    if isinstance(spec, CircularBufferSpec):
        return "circular", 0, 0, 0
    max_admission_blocks = spec.max_admission_blocks_per_request(
        max_in_flight_tokens=vllm_config.max_in_flight_tokens,
        max_model_len=vllm_config.model_config.max_model_len,
    )
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return "chunked", spec.attention_chunk_size, 0, max_admission_blocks
    return "sliding", spec.sliding_window, spec.extra_retained_tokens, max_admission_blocks


def _lookup_groups(specs: list[KVCacheSpec]) -> list[list[int]]:
    """Return the ids of groups with equal specs together, full attention first.

    Those outside the prefix cache are not looked up.
    """
    groups: list[tuple[KVCacheSpec, list[int]]] = []
    for group_id, spec in enumerate(specs):
        if not spec.prefix_cacheable:
            continue
        ids = next((ids for known, ids in groups if known == spec), None)
        if ids is None:
            groups.append((spec, [group_id]))
        else:
            ids.append(group_id)
    groups.sort(key=lambda group: not isinstance(group[0], FullAttentionSpec))
    return [ids for _, ids in groups]
