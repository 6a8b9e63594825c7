"""The KV caches that sparksched leaves to vLLM's own scheduler."""

from typing import TYPE_CHECKING, Final

from sparksched.compat import releases
from sparksched.compat.rule import TOO_MANY, Rule, Unsupported

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec


# The block hashes that pickle has a part in are computed over one pickle frame: a token
# takes up to five bytes in it, the rest of the record less than the margin.
_PICKLE_FRAME_BYTES: Final = 64 * 1024
_PICKLED_TOKEN_BYTES: Final = 5
_PICKLE_MARGIN_BYTES: Final = 128


def room_for_extra_keys(num_tokens: int) -> int:
    """Return how many bytes a block's hash may cover besides tokens; negative: not even those."""
    pickled_bytes = num_tokens * _PICKLED_TOKEN_BYTES + _PICKLE_MARGIN_BYTES
    return _PICKLE_FRAME_BYTES - 1 - pickled_bytes


_SPEC_MANAGERS: Final = {
    "FullAttentionSpec": "FullAttentionManager",
    "HiddenStateCacheSpec": "FullAttentionManager",
    "MLAAttentionSpec": "FullAttentionManager",
    "ChunkedLocalAttentionSpec": "ChunkedLocalAttentionManager",
    "CircularBufferSpec": "CircularBufferManager",
    "MambaSpec": "MambaManager",
    "SlidingWindowSpec": "SlidingWindowManager",
    "SlidingWindowMLASpec": "SlidingWindowManager",
}


def eagle_groups(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> list[int]:
    """Return the ids of the groups whose last cached block is computed again for the drafter."""
    if not releases.drops_eagle_blocks(vllm_config):
        return []
    return _drafter_groups(vllm_config, kv_cache_config)


def _drafter_groups(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> list[int]:
    """Return the ids of the groups that EAGLE, or another drafter of its kind, takes part in."""
    groups = kv_cache_config.kv_cache_groups
    flagged = [group_id for group_id, group in enumerate(groups) if group.is_eagle_group]
    config = vllm_config.speculative_config
    if not flagged and config is not None and config.use_eagle_block_drop():
        return list(range(len(groups)))
    return flagged


def has_drafter_groups(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> bool:
    """Return whether a drafter takes part in a group, dropped blocks or not."""
    is_flagged = any(group.is_eagle_group for group in kv_cache_config.kv_cache_groups)
    return is_flagged or bool(eagle_groups(vllm_config, kv_cache_config))


def _has_chunks(groups: "Sequence[KVCacheGroupSpec]") -> bool:
    return any(
        type(group.kv_cache_spec).__name__ == "ChunkedLocalAttentionSpec" for group in groups
    )


def _is_outside_the_prefix_cache(group: "KVCacheGroupSpec") -> bool:
    """Whether a group is left out of the prefix cache, circular buffers aside: they always are."""
    spec = group.kv_cache_spec
    return not spec.prefix_cacheable and type(spec).__name__ != "CircularBufferSpec"


def _is_refused_by_vllm(
    interval: int | None, groups: "Sequence[KVCacheGroupSpec]", block_size: int
) -> bool:
    """Whether vLLM's own scheduler would not start: then it is the one to say so."""
    if not interval:
        return False
    managers = {_SPEC_MANAGERS.get(type(group.kv_cache_spec).__name__) for group in groups}
    is_sparse = bool(managers & {"SlidingWindowManager", "MambaManager"})
    return not is_sparse or interval % block_size != 0


GROUP_RULES: Final = (
    Rule(
        "prefix replay",
        "only vLLM's own scheduler recomputes the last window after a prefix hit",
        lambda group: group.kv_cache_spec.prefix_replay_tokens != 0,
    ),
    Rule(
        "a KV cache group outside the prefix cache",
        "every group but circular buffers must be cacheable",
        _is_outside_the_prefix_cache,
    ),
    Rule(
        "this sliding window or chunk",
        "it has at least one token, and fewer than 2^31",
        lambda group: any(
            span is not None and not 1 <= span < TOO_MANY
            for span in (
                getattr(group.kv_cache_spec, "sliding_window", None),
                getattr(group.kv_cache_spec, "attention_chunk_size", None),
            )
        ),
    ),
)


def unsupported_kv_cache(
    kv_cache_config: "KVCacheConfig",
    block_size: int,
    hash_block_size: int | None,
    vllm_config: "VllmConfig",
) -> Unsupported | None:
    """Return the first property of the KV cache that the native scheduler lacks, else None.

    `block_size` and `hash_block_size` are those that vLLM hands to the scheduler's
    constructor, where no `hash_block_size` means that it is the block size.
    """
    has_chunks = _has_chunks(kv_cache_config.kv_cache_groups)
    if has_chunks and _drafter_groups(vllm_config, kv_cache_config):
        return Unsupported(
            "EAGLE with chunked local attention", "vLLM does not combine the two either"
        )
    for group in kv_cache_config.kv_cache_groups:
        problem = _unsupported_group(group)
        if problem is not None:
            return problem
    if vllm_config.cache_config.enable_prefix_caching and not any(
        group.kv_cache_spec.prefix_cacheable for group in kv_cache_config.kv_cache_groups
    ):
        return Unsupported("prefix caching without a KV cache", "there are no blocks to be found")
    if _is_refused_by_vllm(
        kv_cache_config.prefix_cache_retention_interval, kv_cache_config.kv_cache_groups, block_size
    ):
        return Unsupported(
            "this prefix cache retention interval",
            "vLLM takes 0 and, for models with sliding-window attention or recurrent states, "
            "multiples of the block size",
        )
    if hash_block_size is None:
        hash_block_size = block_size
    return _unsupported_block_sizes(kv_cache_config, block_size, hash_block_size, vllm_config)


def _unsupported_group(group: "KVCacheGroupSpec") -> Unsupported | None:
    from vllm.v1 import kv_cache_interface
    from vllm.v1.core import single_type_kv_cache_manager
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    spec_cls = type(group.kv_cache_spec)
    # A subclass would be managed by code of its own: only the very classes will do.
    if spec_cls is not getattr(kv_cache_interface, spec_cls.__name__, None) or (
        spec_cls.__name__ not in _SPEC_MANAGERS
    ):
        return Unsupported(
            f"a KV cache of type {spec_cls.__name__}",
            "only full, sliding-window and chunked local attention, multi-head latent or not, "
            "recurrent states and circular buffers are supported",
        )
    for rule in GROUP_RULES:
        if rule.applies(group):
            return rule.problem()
    manager_cls = KVCacheSpecRegistry.get_manager_class(group.kv_cache_spec, role=group.role)
    stock_manager_cls = getattr(single_type_kv_cache_manager, _SPEC_MANAGERS[spec_cls.__name__])
    if manager_cls is not stock_manager_cls:
        return Unsupported(
            "a custom KV cache manager",
            f"{getattr(manager_cls, '__name__', manager_cls)} is registered "
            f"for {spec_cls.__name__} in the place of vLLM's own",
        )
    return None


def _unsupported_block_sizes(
    kv_cache_config: "KVCacheConfig",
    block_size: int,
    hash_block_size: int,
    vllm_config: "VllmConfig",
) -> Unsupported | None:
    groups = kv_cache_config.kv_cache_groups
    enable_prefix_caching = vllm_config.cache_config.enable_prefix_caching
    specs = [group.kv_cache_spec for group in groups]
    sizes = {spec.block_size for spec in specs}
    # Circular buffers are hashed by nobody.
    hashed_sizes = {spec.block_size for spec in specs if spec.prefix_cacheable}
    are_equal = hashed_sizes <= {block_size} and block_size == hash_block_size
    is_hashed = enable_prefix_caching or vllm_config.kv_transfer_config is not None
    # vLLM's own scheduler ends in an assertion then, and is the one to say so.
    if any(block_size % size for size in sizes) or (
        (is_hashed and any(size % hash_block_size for size in {*hashed_sizes, block_size}))
        or (is_hashed and len(groups) == 1 and not are_equal)
    ):
        return Unsupported(
            "these block sizes",
            f"vLLM schedules blocks of {block_size} tokens and hashes {hash_block_size}, which "
            f"don't go with groups of {', '.join(map(str, sorted(sizes)))}",
        )
    if _has_chunks(groups) and not are_equal:
        return Unsupported(
            "chunked local attention beside blocks of another size", "vLLM does not combine the two"
        )
    keeps_others = kv_cache_config.has_mamba_layers or not all(
        spec.prefix_cacheable for spec in specs
    )
    if vllm_config.kv_transfer_config is not None and (
        keeps_others or not are_equal or kv_cache_config.needs_kv_cache_zeroing
    ):
        return Unsupported(
            "a KV connector for KV cache groups that differ",
            "recurrent states, circular buffers, blocks of different sizes and blocks that must be "
            "zeroed are handed over only by vLLM's own scheduler",
        )
    modes = {getattr(spec, "mamba_cache_mode", "align") for spec in specs}
    if enable_prefix_caching and not (
        modes <= {"align"} or (modes <= {"align", "all"} and releases.caches_states_of_all_modes())
    ):
        return Unsupported(
            "prefix caching in this Mamba cache mode",
            "recurrent states are kept for it only with --mamba-cache-mode align (or all, before "
            "vLLM 0.33.0)",
        )
    num_hashed_tokens = hash_block_size + releases.num_hash_lookahead_tokens(vllm_config)
    if enable_prefix_caching and room_for_extra_keys(num_hashed_tokens) < 0:
        return Unsupported(
            f"a block size of {hash_block_size}",
            "blocks of this size are too large to be hashed; choose a smaller --block-size "
            "or start with --no-enable-prefix-caching",
        )
    return None
