"""KV cache events: what the observer makes of the core's journal, against vLLM's."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sparksched.engine.block_observer import BlockObserver, publishes_events
from unit.bare_core import (
    BLOCK_SIZE,
    FULL_ATTENTION,
    LOOKAHEADS,
    LORA,
    build_core,
    build_request,
    images,
    run_to_the_end,
    stock_block_hasher,
)
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

pytestmark = pytest.mark.release

NUM_BLOCKS = 12
WINDOW = 8


def kv_cache_config(*specs: Any, num_blocks: int = NUM_BLOCKS) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer {index}"], spec) for index, spec in enumerate(specs)]
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        prefix_cache_retention_interval=0,
    )


def spec(cls: type[Any], **fields: Any) -> Any:
    shape = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    return cls(**shape, **fields)


HYBRID = kv_cache_config(
    spec(FullAttentionSpec), spec(SlidingWindowSpec, sliding_window=WINDOW), num_blocks=33
)


class Publisher:
    """Keeps what is published."""

    def __init__(self) -> None:
        self.batches: list[KVEventBatch] = []

    def publish(self, batch: KVEventBatch) -> None:
        self.batches.append(batch)

    def take(self) -> list[Any]:
        """Return the events of all batches so far."""
        batches, self.batches = self.batches, []
        return [event for batch in batches for event in batch.events]


def build_observer(
    config: KVCacheConfig = HYBRID, lookahead: int = 0
) -> tuple[BlockObserver, Publisher]:
    """Return an observer and where it publishes."""
    vllm_config = SimpleNamespace(
        num_hash_lookahead_tokens=lookahead,
        observability_config=SimpleNamespace(kv_cache_metrics=False),
    )
    publisher = Publisher()
    return BlockObserver(vllm_config, config, publisher), publisher


def stock_manager(config: KVCacheConfig = HYBRID, lookahead: int = 0) -> KVCacheManager:
    settings = {"num_hash_lookahead_tokens": lookahead} if lookahead else {}
    return KVCacheManager(
        config,
        max_model_len=128,
        scheduler_block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        enable_kv_cache_events=True,
        **settings,
    )


@pytest.mark.parametrize(
    ("config", "publishes"),
    [
        (None, False),
        (KVEventsConfig(enable_kv_cache_events=False), False),
        (KVEventsConfig(enable_kv_cache_events=True, publisher="null"), True),
    ],
    ids=["nothing", "off", "on"],
)
def test_publishes_events(config: KVEventsConfig | None, publishes: bool) -> None:
    assert publishes_events(SimpleNamespace(kv_events_config=config)) is publishes


# ----------------------------------------------------------------------------------------
# Events
# ----------------------------------------------------------------------------------------

REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "salt": {"cache_salt": "salt"},
    "LoRA": {"lora_request": LORA},
    "session": {"session_id": "a session"},
    "images": {"mm_features": images((1, 2), (3, 6), (9, 1))},
    "prompt embeddings": {"prompt_embeds": torch.ones(14, 2)},
    "everything": {
        "cache_salt": "salt",
        "lora_request": LORA,
        "session_id": "a session",
        "mm_features": images((9, 5)),
        "prompt_embeds": torch.ones(14, 2),
    },
}


@pytest.fixture(params=["0", "1"], ids=["bytes", "integers"])
def kind_of_hashes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", request.param)


def hashed_request(hasher: Callable[..., Any], lookahead: int = 0, **settings: Any) -> Request:
    request = build_request(
        prompt=[*range(14)], block_hasher=hasher("sha256", BLOCK_SIZE, lookahead), **settings
    )
    request.append_output_token_ids([1, 2, 3, 4, 5])
    return request


@pytest.mark.parametrize("algorithm", ["sha256"], indirect=True)
@pytest.mark.parametrize("settings", REQUESTS.values(), ids=REQUESTS)
@pytest.mark.parametrize("mask", [None, [True, False, True, True], [False] * 4], ids=str)
@pytest.mark.parametrize("num_known", [0, 1])
@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_stored_blocks(
    algorithm: str,
    kind_of_hashes: None,
    settings: dict[str, Any],
    mask: list[bool] | None,
    num_known: int,
    lookahead: int,
) -> None:
    request = hashed_request(stock_block_hasher, lookahead, **settings)
    tokens = request._all_token_ids
    manager = stock_manager(lookahead=lookahead)
    observer, publisher = build_observer(lookahead=lookahead)
    for group_id in range(2):
        blocks = manager.block_pool.get_new_blocks(4)
        manager.block_pool.cache_full_blocks(
            request, blocks, num_known, 4, BLOCK_SIZE, group_id, mask and mask[num_known:]
        )
        positions = [it for it in range(num_known, 4) if mask is None or mask[it]]
        ends = [(position + 1) * BLOCK_SIZE for position in positions]
        observer.on_stored(
            request,
            group_id,
            BLOCK_SIZE,
            positions,
            [request.block_hashes[position] for position in positions],
            request.block_hashes[num_known - 1] if num_known else None,
            tokens[num_known * BLOCK_SIZE : 4 * BLOCK_SIZE],
            [tokens[end : end + lookahead] for end in ends],
        )
    observer.publish([])
    assert publisher.take() == manager.take_events()


@pytest.mark.parametrize("algorithm", ["sha256"], indirect=True)
@pytest.mark.parametrize(
    "kv_cache_spec",
    [
        spec(FullAttentionSpec),
        spec(MLAAttentionSpec),
        spec(SlidingWindowSpec, sliding_window=WINDOW),
        spec(ChunkedLocalAttentionSpec, attention_chunk_size=8),
    ],
    ids=lambda it: type(it).__name__,
)
def test_kinds_of_groups(algorithm: str, kv_cache_spec: Any) -> None:
    config = kv_cache_config(kv_cache_spec)
    request = hashed_request(stock_block_hasher)
    manager = stock_manager(config)
    manager.block_pool.cache_full_blocks(
        request, manager.block_pool.get_new_blocks(1), 0, 1, BLOCK_SIZE, 0
    )
    observer, publisher = build_observer(config)
    observer.on_stored(
        request, 0, BLOCK_SIZE, [0], request.block_hashes[:1], None, [0, 1, 2, 3], [[]]
    )
    observer.publish([])
    (event,) = publisher.take()
    assert event.kv_cache_spec_kind is not None
    assert [event] == manager.take_events()


@pytest.mark.parametrize("algorithm", ["sha256"], indirect=True)
def test_removed_blocks_and_a_cleared_cache(algorithm: str, kind_of_hashes: None) -> None:
    request = hashed_request(stock_block_hasher)
    manager = stock_manager()
    pool = manager.block_pool
    observer, publisher = build_observer()
    for group_id in range(2):
        blocks = pool.get_new_blocks(2)
        pool.cache_full_blocks(request, blocks, 0, 2, BLOCK_SIZE, group_id)
        key = blocks[1].block_hash
        pool.evict_blocks({blocks[1].block_id})
        pool.free_blocks(blocks)
        observer.on_removed(get_block_hash(key), get_group_id(key))
    assert pool.reset_prefix_cache()
    observer.on_cleared()
    observer.publish([])
    events = [it for it in manager.take_events() if not isinstance(it, BlockStored)]
    assert [type(it) for it in events] == [BlockRemoved, BlockRemoved, AllBlocksCleared]
    assert publisher.take() == events


def test_events_are_published_once_and_in_their_order() -> None:
    observer, publisher = build_observer()
    observer.publish([])
    assert publisher.batches == []
    observer.on_removed(b"one", 0)
    observer.on_cleared()
    observer.on_removed(b"two", 1)
    before = time.time()
    for _ in range(2):
        observer.publish([])
    (batch,) = publisher.batches
    assert type(batch) is KVEventBatch
    assert before <= batch.ts <= time.time()
    assert batch.data_parallel_rank is None  # the publisher sets it
    assert [getattr(it, "group_idx", None) for it in batch.events] == [0, None, 1]
    # A publisher encodes the batch later.
    observer.on_cleared()
    assert len(batch.events) == 3


# ----------------------------------------------------------------------------------------
# With the core
# ----------------------------------------------------------------------------------------


class Journal:
    """Notes each call of an observer's methods."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def note(*args: object) -> list[Any]:
            self.calls.append((name, *args))
            return []

        return note


def test_what_is_observed_is_what_was_asked_for() -> None:
    names = {}
    for settings in ({}, {"enable_kv_cache_events": True}, {"kv_cache_metrics": True}):
        journal = Journal()
        core = build_core(
            block_observer=journal, groups=[FULL_ATTENTION], lookup_groups=[[0]], **settings
        )
        for name in "ab":  # the second finds the blocks of the first
            core.add_request(build_request(name), 1.0)
            run_to_the_end(core)
        core.reset_prefix_cache()
        names[next(iter(settings), None)] = {call[0] for call in journal.calls}
    always = {"publish", "take_evictions"}
    assert names == {
        None: always,
        "enable_kv_cache_events": always | {"on_stored", "on_cleared"},
        "kv_cache_metrics": always | {"on_evicted", "on_allocated", "on_accessed", "on_reset"},
    }
