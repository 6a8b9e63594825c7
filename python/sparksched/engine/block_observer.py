"""Makes KV cache events and residency metrics of what the core notes of its blocks.

Where vLLM's block pool makes an event or calls its metrics collector, the core writes a line into a
journal. This module reads the journal, in its order, after each call of the scheduler.
"""

import time

from vllm.config import VllmConfig
from vllm.distributed.kv_events import (
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventPublisher,
    KVCacheEvent,
    KVEventBatch,
)
from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    KVCacheBlock,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)
from vllm.v1.metrics.stats import KVCacheEvictionEvent
from vllm.v1.request import Request

from sparksched.compat import releases
from sparksched.engine.extra_keys import extra_keys_of_block


class BlockObserver:
    """Collects events and metrics. Its methods are called by the core."""

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, publisher: EventPublisher
    ) -> None:
        observability_config = vllm_config.observability_config
        self._publisher = publisher
        self._specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self._num_lookahead_tokens = releases.num_hash_lookahead_tokens(vllm_config)
        self._events: list[KVCacheEvent] = []
        self._metrics = KVCacheMetricsCollector(
            observability_config.kv_cache_metrics_sample
            if observability_config.kv_cache_metrics
            else 1.0
        )

    # ---- prefixes ----

    def on_stored(
        self,
        request: Request,
        group_id: int,
        block_size: int,
        positions: list[int],
        hashes: list[BlockHash],
        parent: BlockHash | None,
        token_ids: list[int],
        lookahead_token_ids: list[list[int]],
    ) -> None:
        """Note that the blocks at these positions of a request's sequence can be found.

        Positions are those of blocks of `block_size` tokens: the group's, or a hash's that ends
        within one of the group's blocks.
        `token_ids` are those from the first position looked at to the last, `lookahead_token_ids`
        those behind each block that its hash covers.
        """
        spec = self._specs[group_id]
        extra_keys, mm_index = [], 0
        for position in positions:
            start = position * block_size
            keys, mm_index = extra_keys_of_block(
                request, start, start + block_size, self._num_lookahead_tokens, mm_index
            )
            extra_keys.append(keys)
        lora = request.lora_request
        event = BlockStored(
            block_hashes=[maybe_convert_block_hash(block_hash) for block_hash in hashes],
            parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
            token_ids=token_ids,
            block_size=block_size,
            lora_id=lora.adapter_id if lora else None,
            medium=MEDIUM_GPU,
            lora_name=lora.name if lora else None,
            extra_keys=to_event_extra_keys(extra_keys),
            group_idx=group_id,
            session_id=request.session_id,
        )
        if self._num_lookahead_tokens:
            event.lookahead_token_ids = lookahead_token_ids
        event.kv_cache_spec_kind = get_kv_cache_spec_kind(spec).value
        event.kv_cache_spec_sliding_window = get_kv_cache_spec_sliding_window(spec)
        self._events.append(event)

    def on_removed(self, block_hash: BlockHash, group_id: int) -> None:
        """Note that a block can't be found any more."""
        hashes = [maybe_convert_block_hash(block_hash)]
        self._events.append(
            BlockRemoved(block_hashes=hashes, medium=MEDIUM_GPU, group_idx=group_id)
        )

    def on_cleared(self) -> None:
        """Note that no block can be found any more."""
        self._events.append(AllBlocksCleared())

    def publish(self, of_connector: list[KVCacheEvent]) -> None:
        """Publish the events since the last call, and a KV connector's, if there are any."""
        events, self._events = self._events + of_connector, []
        if events:
            self._publisher.publish(KVEventBatch(ts=time.time(), events=events))

    # ---- uses ----

    def on_allocated(self, block_id: int) -> None:
        """Note that a block was handed out."""
        self._metrics.on_block_allocated(KVCacheBlock(block_id))

    def on_accessed(self, block_id: int) -> None:
        """Note that a cached block got one more owner."""
        self._metrics.on_block_accessed(KVCacheBlock(block_id))

    def on_evicted(self, block_id: int) -> None:
        """Note that what a block held is about to be overwritten."""
        self._metrics.on_block_evicted(KVCacheBlock(block_id))

    def on_reset(self) -> None:
        """Note that all blocks were forgotten."""
        self._metrics.reset()

    def take_evictions(self) -> list[KVCacheEvictionEvent]:
        """Return the evictions of sampled blocks since the last call."""
        evictions: list[KVCacheEvictionEvent] = self._metrics.drain_events()
        return evictions
