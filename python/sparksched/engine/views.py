"""What others read of a scheduler that isn't vLLM's own: the engine, connectors, users' code."""

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


class Scheduler(Protocol):
    """What a view asks its scheduler."""

    def num_used_blocks(self) -> int:
        """Count the KV blocks in use, without the null block."""

    def get_kv_cache_usage(self) -> float:
        """Return the share of KV blocks in use, 0 to 1."""


@dataclass(frozen=True)
class SingleTypeManagerView:
    """What vLLM's engine reads of a group's KV cache manager."""

    block_size: int
    kv_cache_spec: KVCacheSpec


class BlockPoolView:
    """What is known of the block pool from outside.

    KV connectors are handed this; those that would manage its blocks get vLLM's own scheduler.
    """

    def __init__(self, scheduler: Scheduler, num_gpu_blocks: int) -> None:
        self.num_gpu_blocks = num_gpu_blocks
        """All blocks, with the null block."""
        self._scheduler = weakref.proxy(scheduler)

    def get_num_free_blocks(self) -> int:
        """Count the blocks that can be allocated, as vLLM does: cached ones without a user too."""
        # The null block is never free.
        return self.num_gpu_blocks - 1 - int(self._scheduler.num_used_blocks())

    def get_usage(self) -> float:
        """Return the share of blocks in use, 0 to 1."""
        return float(self._scheduler.get_kv_cache_usage())

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise missing_attribute("kv_cache_manager.block_pool", self, name)


class KVCacheManagerView:
    """What is known of the KV cache manager from outside.

    It stays valid as long as its scheduler lives, and doesn't keep that alive.
    """

    def __init__(self, scheduler: Scheduler, kv_cache_config: KVCacheConfig) -> None:
        specs = (group.kv_cache_spec for group in kv_cache_config.kv_cache_groups)
        self.single_type_managers = tuple(
            SingleTypeManagerView(spec.block_size, spec) for spec in specs
        )
        self.block_pool = BlockPoolView(scheduler, kv_cache_config.num_blocks)

    @property
    def coordinator(self) -> "KVCacheManagerView":
        """The manager itself: one object answers for both of vLLM's."""
        return self

    @property
    def usage(self) -> float:
        """The share of blocks in use, 0 to 1."""
        return self.block_pool.get_usage()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise missing_attribute("kv_cache_manager", self, name)


_INSTEAD: Final = {
    "block_pool": "scheduler.kv_cache_manager.block_pool",
    "blocks": "scheduler.snapshot()['ref_counts']",
    "cached_block_hash_to_block": "scheduler.snapshot()['cached_blocks']",
    "deferred_waiting": "scheduler.waiting",
    "enable_kv_cache_events": "scheduler.get_kv_event_publisher_config()",
    "free_block_queue": "scheduler.snapshot()['free_blocks']",
    "get_block_ids": "scheduler.snapshot()['requests'][request_id]['block_ids']",
    "get_blocks": "scheduler.snapshot()['requests'][request_id]['block_ids']",
    "kv_event_publisher": "scheduler.get_kv_event_publisher_config()",
    "kv_holding_waiting": "scheduler.snapshot(): the first 'num_kv_holding' of 'waiting'",
    "lora_config": "scheduler.vllm_config.lora_config",
    "make_prefix_cache_stats": "scheduler.make_stats().prefix_cache_stats",
    "max_num_scheduled_tokens": "scheduler.scheduler_config.max_num_scheduled_tokens",
    "num_spec_tokens": "scheduler.vllm_config.num_speculative_tokens",
    "observability_config": "scheduler.vllm_config.observability_config",
    "parallel_config": "scheduler.vllm_config.parallel_config",
    "policy": "scheduler.scheduler_config.policy",
    "prefix_cache_stats": "scheduler.make_stats().prefix_cache_stats",
    "req_to_blocks": "scheduler.snapshot()['requests'][request_id]['block_ids']",
}
"""What to use for attributes of vLLM's scheduler, and of what hangs from it."""


def missing_attribute(path: str, obj: object, name: str) -> AttributeError:
    """Return the error for an attribute that vLLM's counterpart of `obj` may have.

    Args:
        path: What the user knows `obj` as.
        obj: What was asked.
        name: What it was asked for.

    """
    message = f"{path} of sparksched has no attribute {name!r}"
    if not name.startswith("_"):
        instead = _INSTEAD.get(name, "scheduler.snapshot(), scheduler.make_stats() or vllm_config")
        message += f": its state is in Rust. Use {instead} instead (docs/compatibility.md)"
    return AttributeError(message, name=name, obj=obj)
