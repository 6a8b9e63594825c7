"""The schedulers and block hashers that a world can be run with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from .configuration import Configuration
from .scenarios import is_verifiable
from .world import SchedulerClass, World

BlockHasher = Callable[[Any], list[bytes]]
CandidateChooser = Callable[[Configuration], SchedulerClass]


def stock_scheduler_class(configuration: Configuration) -> SchedulerClass:
    """Return the class that vLLM itself would choose."""
    chosen: SchedulerClass = AsyncScheduler if configuration.async_scheduling else Scheduler
    return chosen


def sparksched_scheduler_class(_configuration: Configuration) -> SchedulerClass:
    """Return sparksched's class; it serves synchronous and asynchronous scheduling."""
    from sparksched.scheduler import SparkScheduler

    return SparkScheduler


def verifying_scheduler_class(configuration: Configuration) -> SchedulerClass:
    """Return sparksched's class that has vLLM's scheduler inside, and stops when they differ."""
    from sparksched.verify.scheduler import VerifyingScheduler

    if not is_verifiable(configuration.name):
        return sparksched_scheduler_class(configuration)
    return VerifyingScheduler


CANDIDATES: dict[str, CandidateChooser] = {
    "stock": stock_scheduler_class,
    "sparksched": sparksched_scheduler_class,
    "verifying": verifying_scheduler_class,
}


def stock_block_hasher(world: World) -> BlockHasher | None:
    """Return vLLM's own block hasher, as the engine core hands it to each request."""
    configuration = world.configuration
    if not configuration.needs_block_hashes:
        return None
    hash_function = get_hash_fn_by_name(configuration.prefix_caching_hash_algo)
    hasher: BlockHasher = get_request_block_hasher(
        world.hash_block_size, hash_function, *world.hash_lookahead
    )
    return hasher


def candidate_block_hasher(world: World, scheduler_class: SchedulerClass) -> BlockHasher | None:
    """Return the block hasher for the candidate's requests.

    The one place that knows of the candidate's own hasher. It is a variation that the seed draws,
    as sparksched must serve requests that were hashed by vLLM too. The block hashes of both sides
    are compared whichever is used.
    """
    configuration = world.configuration
    is_native = scheduler_class.__module__.startswith("sparksched.")
    if not (is_native and configuration.native_block_hasher and configuration.needs_block_hashes):
        return stock_block_hasher(world)
    from sparksched.engine.hashing import native_block_hasher

    return native_block_hasher(
        configuration.prefix_caching_hash_algo, world.hash_block_size, *world.hash_lookahead
    )
