"""Exact comparison of what two schedulers return, and of their inner state.

Values are equal only if their types are: a decision that arrives as a tuple where vLLM gives a
list, or as None where vLLM gives an empty set, is a difference.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.kv_offload.base import LoadStoreSpec


@dataclass(frozen=True)
class Difference:
    """The first place at which two values differ."""

    path: str
    reference: Any
    candidate: Any

    def __str__(self) -> str:
        return (
            f"at {self.path}\n"
            f"  reference: {_abbreviate(self.reference)}\n"
            f"  candidate: {_abbreviate(self.candidate)}"
        )


def first_difference(
    reference: Any,
    candidate: Any,
    path: str,
    ignored_fields: Collection[str] = (),
) -> Difference | None:
    """Compare two values field by field, in order; return None if they are equal."""
    if type(reference) is not type(candidate):
        return Difference(f"type of {path}", reference, candidate)
    fields = _field_names(reference)
    if fields is not None:
        return _difference_of_fields(fields, reference, candidate, path, ignored_fields)
    if isinstance(reference, list | tuple):
        return _difference_of_sequences(reference, candidate, path, ignored_fields)
    if isinstance(reference, Mapping):
        return _difference_of_mappings(reference, candidate, path, ignored_fields)
    return None if _equal_leaves(reference, candidate) else Difference(path, reference, candidate)


def _difference_of_sequences(
    reference: list[Any] | tuple[Any, ...],
    candidate: list[Any] | tuple[Any, ...],
    path: str,
    ignored_fields: Collection[str],
) -> Difference | None:
    if len(reference) != len(candidate):
        return Difference(f"length of {path}", reference, candidate)
    if _are_equal_tokens(reference, candidate):
        return None
    for index, (ours, theirs) in enumerate(zip(reference, candidate, strict=True)):
        difference = first_difference(ours, theirs, f"{path}[{index}]", ignored_fields)
        if difference is not None:
            return difference
    return None


def _are_equal_tokens(
    reference: list[Any] | tuple[Any, ...], candidate: list[Any] | tuple[Any, ...]
) -> bool:
    """Compare the longest and commonest lists, those of token and block ids, in one go."""
    return {*map(type, reference), *map(type, candidate)} <= {int} and reference == candidate


def _difference_of_mappings(
    reference: Mapping[Any, Any],
    candidate: Mapping[Any, Any],
    path: str,
    ignored_fields: Collection[str],
) -> Difference | None:
    # The order of keys is the order in which requests were scheduled: part of the decision.
    if list(reference) != list(candidate):
        return Difference(f"keys of {path}", list(reference), list(candidate))
    for key, value in reference.items():
        difference = first_difference(value, candidate[key], f"{path}[{key!r}]", ignored_fields)
        if difference is not None:
            return difference
    return None


def _difference_of_fields(
    fields: tuple[str, ...],
    reference: Any,
    candidate: Any,
    path: str,
    ignored_fields: Collection[str],
) -> Difference | None:
    for name in fields:
        if name in ignored_fields:
            continue
        difference = first_difference(
            getattr(reference, name), getattr(candidate, name), f"{path}.{name}", ignored_fields
        )
        if difference is not None:
            return difference
    return None


def _field_names(value: Any) -> tuple[str, ...] | None:
    if isinstance(value, msgspec.Struct):
        return value.__struct_fields__
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return tuple(field.name for field in dataclasses.fields(value))
    if isinstance(value, LoadStoreSpec):
        return tuple(vars(value))
    # A named tuple's, or nothing.
    return getattr(value, "_fields", None)


def _equal_leaves(reference: Any, candidate: Any) -> bool:
    if isinstance(reference, float):
        return reference == candidate or (math.isnan(reference) and math.isnan(candidate))
    if isinstance(reference, np.ndarray):
        return reference.dtype == candidate.dtype and np.array_equal(reference, candidate)
    if isinstance(reference, torch.Tensor):
        return reference.dtype == candidate.dtype and torch.equal(reference, candidate)
    return bool(reference == candidate)


def _abbreviate(value: Any, limit: int = 600) -> str:
    text = f"{value!r} ({type(value).__name__})"
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def snapshot(scheduler: SchedulerInterface) -> dict[str, Any]:
    """Return a scheduler's full state as plain data, in an order that does not depend on it."""
    own_snapshot = getattr(scheduler, "snapshot", None)
    state = stock_snapshot(scheduler) if own_snapshot is None else own_snapshot()
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
