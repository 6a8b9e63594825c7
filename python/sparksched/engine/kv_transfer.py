"""A KV connector's scheduler side: the calls that vLLM's scheduler makes to it.

The core decides when. It asks here for each request, with a `Request` that is up to date. Mirrors
what vLLM's `v1/core/sched/scheduler.py` does with its `connector`.
"""

from collections.abc import Callable, Iterable
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.stats import KV_FETCH_STAGES, PrefixCacheStats
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

logger = init_logger("vllm.sparksched")

Block = tuple[int, int, bytes | None]
"""Number, owners, and hash with the KV cache group, if the block is cached."""

BlockIds = tuple[list[int], ...]
"""Numbers of blocks, by KV cache group."""


class KVTransfer:
    """A connector, and what is counted of it."""

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, log_stats: bool
    ) -> None:
        self.connector = KVConnectorFactory.create_connector(
            config=vllm_config, role=KVConnectorRole.SCHEDULER, kv_cache_config=kv_cache_config
        )
        transfer_config = vllm_config.kv_transfer_config
        self.core_config: dict[str, bool] = {
            # Loads are not ordered against steps in flight that still write to blocks.
            "defer_block_free": (
                vllm_config.max_concurrent_batches > 1 and transfer_config.is_kv_consumer
            ),
            "requires_kv_delivery": bool(self.connector.requires_kv_delivery),
            "recompute_load_failures": transfer_config.kv_load_failure_policy == "recompute",
        }
        self._hits = PrefixCacheStats() if log_stats else None
        self._stats: KVConnectorStats | None = None

    # ---- called by the core ----

    def find_external_hit(self, request: Request, num_local_tokens: int) -> tuple[int | None, bool]:
        """Ask how many tokens can be loaded behind the first ones, None for "not known yet".

        The other half of the answer is whether they are loaded between steps.
        """
        num_tokens, is_async = self.connector.get_num_new_matched_tokens(request, num_local_tokens)
        return num_tokens, bool(is_async)

    def note_allocation(
        self,
        request: Request,
        groups: tuple[list[Block], ...],
        num_external_tokens: int,
        num_queried_tokens: int,
    ) -> None:
        """Tell which blocks a request has, and how many of its tokens are to be loaded."""
        blocks = KVCacheBlocks(tuple([_block(*block) for block in group] for group in groups))
        self.connector.update_state_after_alloc(request, blocks, num_external_tokens)
        if self._hits is None or num_queried_tokens == 0:
            return
        is_preempted = request.num_preemptions > 0
        sources = None
        if num_external_tokens and not is_preempted:
            sources = self.connector.get_external_cache_hit_sources(request, num_external_tokens)
        self._hits.record(
            num_tokens=num_queried_tokens,
            num_hits=num_external_tokens,
            preempted=is_preempted,
            hits_by_source=sources,
        )

    def has_pending_block_frees(self) -> bool:
        """Return whether blocks will be free without a preemption."""
        return bool(self.connector.has_pending_block_frees())

    def finish_request(
        self, request: Request, block_ids: BlockIds
    ) -> tuple[bool, dict[str, Any] | None]:
        """Tell that a request has ended, with the blocks of its computed tokens.

        Returns whether they are to be kept, and what the client is told.
        """
        if isinstance(self.connector, SupportsHMA):
            keeps, params = self.connector.request_finished_all_groups(request, block_ids)
        else:
            (only_group,) = block_ids
            keeps, params = self.connector.request_finished(request, only_group)
        return bool(keeps), params

    def update(self, report: KVConnectorOutput) -> None:
        """Tell what the workers report."""
        self.connector.update_connector_output(report)

    def log_failures(self, num_requests: int, num_tokens: int, failed: set[str] | None) -> None:
        """Log that blocks could not be filled; the requests in `failed` fail for it."""
        if failed is None:
            logger.warning(
                "Blocks could not be loaded: %d requests compute %d tokens again.",
                num_requests,
                num_tokens,
            )
        else:
            logger.error(
                "Blocks of %d tokens could not be loaded: %d requests fail for it "
                "(kv_load_failure_policy=fail): %s",
                num_tokens,
                num_requests,
                ", ".join(sorted(failed)),
            )

    def collect_stats(self, report: KVConnectorOutput | None) -> None:
        """Add up the statistics of the workers and of the connector."""
        stats: KVConnectorStats | None = report.kv_connector_stats if report else None
        own = self.connector.get_kv_connector_stats()
        if own is not None and not own.is_empty():
            stats = own if stats is None else stats.aggregate(own)
        self._stats = stats

    def take_events(self) -> list[KVCacheEvent]:
        """Return the connector's KV cache events since the last call."""
        events: Iterable[KVCacheEvent] | None = self.connector.take_events()
        return list(events or ())

    def take_stats(
        self, num_fetches: list[int]
    ) -> tuple[dict[str, int], PrefixCacheStats | None, dict[str, Any] | None]:
        """Return what `SchedulerStats` says of the connector; counters start again at zero.

        Args:
            num_fetches: Requests with a load, in the order of `KV_FETCH_STAGES`.

        """
        hits, stats = self._hits, self._stats
        if hits is not None:
            self._hits = PrefixCacheStats()
        self._stats = None
        by_stage = dict(zip(KV_FETCH_STAGES, num_fetches, strict=True))
        return by_stage, hits, stats.to_dict() if stats else None

    # ---- called by the scheduler ----

    def plan_step(self, output: SchedulerOutput, block_ids: Callable[[str], BlockIds]) -> None:
        """Have the connector plan the transfers of a step that is not counted as computed yet."""
        output.kv_connector_block_state = KVConnectorBlockState(
            req_ids=set(output.num_scheduled_tokens),
            resolve_block_ids=block_ids,
            boundary_state_offloads={},
        )
        output.kv_connector_metadata = self.connector.build_connector_meta(output)

    def reset_cache(self) -> bool:
        """Have the connector forget what it has; return whether it did."""
        if self.connector.reset_cache() is False:
            return False
        if self._hits is not None:
            self._hits.reset = True
        return True


def _block(block_id: int, ref_cnt: int, block_hash: bytes | None) -> KVCacheBlock:
    return KVCacheBlock(block_id, ref_cnt, _block_hash=block_hash, is_null=block_id == 0)
