"""What others read of a scheduler that isn't vLLM's own: the engine, connectors, users' code."""

import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import KVCacheConfig


class BlockPoolView:
    """What is known of the block pool from outside.

    KV connectors are handed this; those that would manage its blocks get vLLM's own scheduler.
    """

    def __init__(self, scheduler: Any, num_gpu_blocks: int) -> None:
        self.num_gpu_blocks = num_gpu_blocks
        """All blocks, with the null block."""
        self._scheduler = weakref.proxy(scheduler)

    def get_num_free_blocks(self) -> int:
        """Count the blocks that can be allocated, as vLLM does: cached ones without a user too."""
        # The null block is never free.
        return self.num_gpu_blocks - 1 - int(self._scheduler.core.num_used_blocks())

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

    def __init__(self, scheduler: Any, kv_cache_config: KVCacheConfig) -> None:
        specs = (group.kv_cache_spec for group in kv_cache_config.kv_cache_groups)
        # What vLLM's engine reads of a group's manager.
        self.single_type_managers = tuple(
            SimpleNamespace(block_size=spec.block_size, kv_cache_spec=spec) for spec in specs
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


def missing_attribute(path: str, obj: object, name: str) -> AttributeError:
    """Return the error for an attribute that vLLM's counterpart of `obj` may have.

    Args:
        path: What the user knows `obj` as.
        obj: What was asked.
        name: What it was asked for.

    """
    message = f"{path} of sparksched has no attribute {name!r}"
    if not name.startswith("_"):
        message += (
            ": its state is in Rust. Use scheduler.snapshot(), scheduler.make_stats() or"
            " vllm_config instead (docs/compatibility.md)"
        )
    return AttributeError(message, name=name, obj=obj)
