"""What there is of two schedulers' inner state to compare, as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from vllm.v1.core.sched.interface import SchedulerInterface


def snapshot(scheduler: SchedulerInterface) -> dict[str, Any]:
    """Return a scheduler's full state as plain data, in an order that does not depend on it."""
    own_snapshot = getattr(scheduler, "snapshot", None)
    state = stock_snapshot(scheduler) if own_snapshot is None else own_snapshot()
    state.pop("waiting_for", None)  # vLLM's notes no reasons
    # Queues are lists and keep their order; the rest is looked up by key.
    return {
        name: dict(sorted(value.items())) if isinstance(value, Mapping) else value
        for name, value in state.items()
    }


def stock_snapshot(scheduler: Any) -> dict[str, Any]:
    """Read the state of vLLM's own scheduler, in the shape of `SparkScheduler.snapshot()`."""
    block_pool = scheduler.kv_cache_manager.block_pool
    return {
        "requests": {
            request_id: _stock_request_state(scheduler, request)
            for request_id, request in scheduler.requests.items()
        },
        "running": [request.request_id for request in scheduler.running],
        "waiting": [
            request.request_id
            for queue in (scheduler.kv_holding_waiting, scheduler.waiting)
            for request in queue
        ],
        "num_kv_holding": len(scheduler.kv_holding_waiting),
        "free_blocks": [
            block.block_id for block in block_pool.free_block_queue.get_all_free_blocks()
        ],
        "ref_counts": {
            block.block_id: block.ref_cnt
            for block in block_pool.blocks
            if block.ref_cnt > 0 and not block.is_null
        },
        "cached_blocks": {
            block.block_id: block.block_hash.hex()
            for block in block_pool.blocks
            if block.block_hash is not None
        },
        "further_keys": {
            block_id: sorted(key.hex() for key in keys)
            for block_id, keys in block_pool.cached_block_hashes_by_block.items()
        },
    }


def _stock_request_state(scheduler: Any, request: Any) -> dict[str, Any]:
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return {
        "status": request.status.name,
        "num_computed_tokens": request.num_computed_tokens,
        "num_output_placeholders": request.num_output_placeholders,
        "num_in_flight_tokens": request.num_in_flight_tokens,
        "num_stale_output_tokens": request.num_stale_output_tokens,
        "num_tokens": request.num_tokens,
        "num_preemptions": request.num_preemptions,
        "block_ids": [
            # `get`, because looking up a defaultdict would add the request to it.
            [block.block_id for block in manager.req_to_blocks.get(request.request_id, ())]
            for manager in managers
        ],
        "spec_token_ids": list(request.spec_token_ids),
        "next_decode_eligible_step": request.next_decode_eligible_step,
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_queued_inputs": len(request.streaming_queue or ()),
        "spec_decode_metrics": (
            request.spec_decode_metrics and dataclasses.asdict(request.spec_decode_metrics)
        ),
    }
