"""What the Rust core is told of groups that differ: states, zeroing, hits within a block."""

from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import partial_hash_hits_enabled
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from sparksched.compat import releases
from sparksched.compat.kv_cache import has_drafter_groups

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def core_config(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", hash_block_size: int
) -> dict[str, Any]:
    """Return the part of `sparksched.engine.config.core_config` about such groups."""
    cache_config = vllm_config.cache_config
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    states = [spec for spec in specs if isinstance(spec, MambaSpec)]
    partial_hits = _has_partial_hits(vllm_config, kv_cache_config, hash_block_size)
    return {
        "partial_hits": partial_hits,
        "zeroes_blocks": bool(kv_cache_config.needs_kv_cache_zeroing),
        "states": {
            "aligns_chunks": bool(states) and cache_config.mamba_cache_mode == "align",
            "block_size": cache_config.block_size,
            "has_checkpoint_blocks": bool(states)
            and all(spec.num_prefill_checkpoint_blocks > 0 for spec in states),
            "checkpoint_alignment": states[0].prefill_checkpoint_alignment if states else None,
            "drops_last_unit": releases.drops_eagle_checkpoints(vllm_config),
            "keeps_junctions": (
                cache_config.enable_mamba_shared_prefix_checkpoint
                and has_drafter_groups(vllm_config, kv_cache_config)
                and partial_hits
                # With several modules of MTP, what is cached ends before the chunk does.
                and vllm_config.num_prefill_lookahead_tokens <= 1
            ),
            "num_hash_lookahead_tokens": releases.num_hash_lookahead_tokens(vllm_config),
        },
    }


def core_group(spec: MambaSpec) -> tuple[str, int, int, int]:
    """Return a group's kind, its speculative blocks, and where checkpoints are within a chunk."""
    keeps_checkpoints = spec.mamba_cache_mode == "align" and spec.num_prefill_checkpoint_blocks > 0
    alignment = spec.prefill_checkpoint_alignment if keeps_checkpoints else None
    return f"states:{spec.mamba_cache_mode}", spec.num_speculative_blocks, alignment or 0, 0


def _has_partial_hits(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", hash_block_size: int
) -> bool:
    """Return whether prefix hits may end within a block, where a hash does."""
    groups = kv_cache_config.kv_cache_groups
    if not vllm_config.cache_config.enable_prefix_caching or len(groups) <= 1:
        return False
    manager_classes = [
        KVCacheSpecRegistry.get_manager_class(group.kv_cache_spec, group.role) for group in groups
    ]
    return bool(partial_hash_hits_enabled(groups, hash_block_size, manager_classes=manager_classes))
