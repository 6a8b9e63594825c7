"""A snapshot's blocks in the objects of vLLM's KV cache manager."""

from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock

Snapshot = dict[str, Any]


def write(manager: Any, snapshot: Snapshot) -> None:
    """Bring a `KVCacheManager` to the state of a snapshot."""
    pool = manager.block_pool
    _write_blocks(pool, snapshot)
    _write_free_blocks(pool, snapshot["free_blocks"])
    _write_prefix_cache(pool, snapshot["cached_blocks"])
    for group_id, group in enumerate(manager.coordinator.single_type_managers):
        _write_block_tables(group, pool.blocks, snapshot, group_id)


def _write_blocks(pool: Any, snapshot: Snapshot) -> None:
    for block in pool.blocks:
        block.prev_free_block = block.next_free_block = None
        if block is not pool.null_block:
            block.ref_cnt = snapshot["ref_counts"].get(block.block_id, 0)


def _write_free_blocks(pool: Any, free_blocks: list[int]) -> None:
    # Made anew in place, because tests hold on to it.
    queue = pool.free_block_queue
    queue.__init__([pool.blocks[block_id] for block_id in free_blocks])


def _write_prefix_cache(pool: Any, cached_blocks: dict[int, str]) -> None:
    for block in pool.blocks:
        block.reset_hash()
    index = pool.cached_block_hash_to_block
    index.__init__()
    for block_id, digits in cached_blocks.items():
        block = pool.blocks[block_id]
        block.set_block_hash(bytes.fromhex(digits))
        index.insert(block.block_hash, block)


def _write_block_tables(
    group: Any, blocks: list[KVCacheBlock], snapshot: Snapshot, group_id: int
) -> None:
    group.req_to_blocks.clear()
    group.num_cached_block.clear()
    for request_id, state in snapshot["requests"].items():
        table = [blocks[block_id] for block_id in state["block_ids"][group_id]]
        if table:
            group.req_to_blocks[request_id] = table
            group.num_cached_block[request_id] = sum(it.block_hash is not None for it in table)


def fingerprint(manager: Any) -> tuple[Any, ...]:
    """Return what changes if somebody else writes to a manager, or replaces a part of it."""
    pool = manager.block_pool
    groups = manager.coordinator.single_type_managers
    return (
        [sorted(vars(it)) for it in (manager, manager.coordinator, pool, *groups)],
        [(block.ref_cnt, block.block_hash) for block in pool.blocks],
        [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
        [_block_tables(group) for group in groups],
    )


def _block_tables(group: Any) -> dict[str, list[int]]:
    # A test that looks up a request without blocks adds it: the tables are a defaultdict.
    tables = group.req_to_blocks.items()
    return {
        request_id: [block.block_id for block in table] for request_id, table in tables if table
    }
