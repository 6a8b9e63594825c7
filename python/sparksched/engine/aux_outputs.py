"""Auxiliary output, such as routed experts: calls vLLM's connector, and keeps what it looks up.

The core decides when, and hands over a `Request` that is up to date. Mirrors what vLLM's
`v1/core/sched/scheduler.py` does with its `aux_output_connector`.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from sparksched._core import CachedBlocks


class AuxOutputs:
    """The scheduler's side of what workers collect besides tokens."""

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        lookup_groups: Sequence[Sequence[int]],
        hash_block_size: int,
        kv_connector: KVConnectorBase_V1 | None,
    ) -> None:
        """Build vLLM's connector.

        Args:
            kv_cache_config: The KV cache groups and their size.
            lookup_groups: Ids of groups that are looked up together, full attention first.
            hash_block_size: Tokens that a hash covers more than the one before it.
            kv_connector: The KV connector, if there is one.

        """
        self.cached_blocks: CachedBlocks | None = None
        arguments: tuple[Any, ...] = ()
        if hasattr(AuxOutputSchedulerConnector, "max_cache_hit"):
            self.cached_blocks = CachedBlocks()
            specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
            first = lookup_groups[0][0]
            has_full_attention = isinstance(specs[first], FullAttentionSpec)
            # What the connector reads of vLLM's KV cache manager, and no more.
            block_pool = SimpleNamespace(
                get_cached_block=self.cached_blocks.get_cached_block,
                hash_block_size=hash_block_size,
            )
            coordinator = SimpleNamespace(
                full_attention_group_id=first if has_full_attention else None,
                single_type_managers=[
                    SimpleNamespace(block_pool=block_pool, block_size=spec.block_size)
                    for spec in specs
                ],
            )
            manager = SimpleNamespace(
                kv_cache_config=kv_cache_config, block_pool=block_pool, coordinator=coordinator
            )
            arguments = (manager, kv_connector)
        self.connector = AuxOutputSchedulerConnector(*arguments)
