"""What vLLM's engine reads of a scheduler that isn't its own: the KV cache manager's shape."""

from dataclasses import dataclass

from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


@dataclass(frozen=True)
class SingleTypeManagerView:
    """What vLLM's engine reads of a group's KV cache manager."""

    block_size: int
    kv_cache_spec: KVCacheSpec


@dataclass(frozen=True)
class KVCacheManagerView:
    """What vLLM's engine reads of a KV cache manager: `coordinator.single_type_managers`."""

    single_type_managers: tuple[SingleTypeManagerView, ...]
    block_pool = None
    """KV connectors are handed this; those that would use it get vLLM's own scheduler."""

    @classmethod
    def of(cls, kv_cache_config: KVCacheConfig) -> "KVCacheManagerView":
        """Build the view of a configuration's groups."""
        specs = (group.kv_cache_spec for group in kv_cache_config.kv_cache_groups)
        return cls(tuple(SingleTypeManagerView(spec.block_size, spec) for spec in specs))

    @property
    def coordinator(self) -> "KVCacheManagerView":
        """The manager itself: one object answers for both of vLLM's."""
        return self
