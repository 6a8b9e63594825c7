"""A client that doesn't read for a while, with very many streams: memory is bounded for all that.

`SPARKSCHED_SLOW_CLIENT_S` says for how many seconds, up to 60, and `SPARKSCHED_SLOW_CLIENT_STREAMS`
how many streams.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from engine.harness import new_request
from scale import size
from sparksched.shared.offer import MAX_BACKLOG_BYTES, MAX_SLOW_BACKLOG_BYTES
from vllm.v1.engine import FinishReason

from .clients import (
    Ear,
    Reader,
    connected,
    expected_tokens,
    front_end,
    prompt_of,
    run_async,
)
from .conftest import MAX_MODEL_LEN, make_config
from .engines import Engine, FrugalExecutor, running_engine
from .holdings import anonymous_bytes

SECONDS = size("SPARKSCHED_SLOW_CLIENT_S", 4, 6)
NUM_STREAMS = size("SPARKSCHED_SLOW_CLIENT_STREAMS", 1024, 1024)
NUM_OTHER_STREAMS = 4
STEP_S = 0.0005
MAX_TOKENS = MAX_MODEL_LEN - 100
"""With steps of that length, enough for a minute of the few that are left to run alone."""

LIMIT_S = 120 + 20 * SECONDS

SHM = {"SPARKSCHED_TRANSPORT": "shm", "SPARKSCHED_STUCK_AFTER_S": "3"}

STATE_BYTES = 24 << 20
"""Besides what waits: messages on their way, and what the requests have but for their tokens."""

BYTES_PER_TOKEN = 20
"""What a request keeps of each of its tokens: ids, hashes, blocks. A fast engine makes more."""

pytestmark = pytest.mark.timeout(LIMIT_S + 60)


@dataclass
class Memory:
    """The memory of an engine's process, watched for a while."""

    pid: int

    def __post_init__(self) -> None:
        self.before = self.peak = anonymous_bytes(self.pid)

    @property
    def growth(self) -> int:
        return self.peak - self.before

    async def watch(self) -> None:
        while True:
            self.peak = max(self.peak, anonymous_bytes(self.pid))
            await asyncio.sleep(0.02)


async def read_nothing(ear: Ear) -> None:
    ear.close()
    await asyncio.sleep(SECONDS)
    ear.open()


async def read_slowly(ear: Ear) -> None:
    ear.close()
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        await asyncio.sleep(0.3)
        ear.listen()
    ear.open()


async def add_streams(reader: Reader, name: str, count: int) -> list[str]:
    ids = [f"{name}-{number}" for number in range(count)]
    await reader.add(*(new_request(it, prompt_of(1), MAX_TOKENS, ignore_eos=True) for it in ids))
    await reader.begin(*ids)
    return ids


async def check_slow(engine: Engine, slow: Reader, ids: list[str]) -> None:
    """All of its requests have failed, if too much waited for it, or none."""
    if engine.log_lines("takes no messages"):
        await slow.finish(ids)
        assert all(slow.finishes[it] == [FinishReason.ERROR] for it in ids)
        await slow.add(new_request("again", prompt_of(4), 30))
        await slow.finish(["again"])
        assert slow.tokens["again"] == expected_tokens(prompt_of(4), 30)
    else:
        # The first, because for the last there may be no blocks any more.
        num_tokens = len(slow.tokens[ids[0]])
        await slow.until(lambda: len(slow.tokens[ids[0]]) > num_tokens + 100)
        assert not slow.finishes
        await slow.client.abort_requests_async(ids)


def check_tokens(reader: Reader, ids: list[str]) -> None:
    longest = max(len(reader.tokens[it]) for it in ids)
    expected = expected_tokens(prompt_of(1), longest, ignore_eos=True)
    for it in ids:
        tokens = reader.tokens[it]
        assert tokens == expected[: len(tokens)], it


@pytest.mark.parametrize(
    ("behave", "max_bytes"),
    [(read_nothing, MAX_BACKLOG_BYTES), (read_slowly, MAX_SLOW_BACKLOG_BYTES)],
    ids=["nothing", "slowly"],
)
def test_memory_is_bounded(
    behave: Callable[[Ear], Awaitable[None]], max_bytes: int, model_directory: Path
) -> None:
    config = make_config(
        model_directory,
        max_num_seqs=NUM_STREAMS + NUM_OTHER_STREAMS + 1,
        max_num_batched_tokens=8192,
        num_gpu_blocks_override=400_000,
    )

    async def run(engine: Engine) -> None:
        async with (
            connected(config, engine, 0, count=2) as slow,
            connected(config, engine, 1, count=2) as other,
        ):
            other_ids = await add_streams(other, "other", NUM_OTHER_STREAMS)
            ids = await add_streams(slow, "slow", NUM_STREAMS)
            memory = Memory(engine.pid)
            watching = asyncio.create_task(memory.watch())
            num_tokens = len(other.tokens["other-0"])
            await other.call_executor("set_step_s", STEP_S)
            await other.call_executor("take_longest_gap")
            start = time.monotonic()
            await behave(Ear(slow))
            num_steps = len(other.tokens["other-0"]) - num_tokens
            watching.cancel()
            gap_s = await other.call_executor("take_longest_gap")
            print(
                f"{NUM_STREAMS} streams, {time.monotonic() - start:.1f} s: {num_steps} steps seen, "
                f"{memory.growth >> 20} MiB more, {gap_s:.3f} s at most between two steps"
            )
            await check_slow(engine, slow, ids)
            state_bytes = STATE_BYTES + BYTES_PER_TOKEN * num_steps * NUM_STREAMS
            assert memory.growth < max_bytes + state_bytes
            num_tokens = len(other.tokens["other-0"])
            await other.until(lambda: len(other.tokens["other-0"]) > num_tokens + 100)
            assert num_steps > 0
            assert not other.finishes
            await other.client.abort_requests_async(other_ids)
            async with asyncio.timeout(60):
                while await other.unfinished():
                    await asyncio.sleep(0.01)
            check_tokens(slow, ids)
            check_tokens(other, other_ids)
            print(f"{(anonymous_bytes(engine.pid) - memory.before) >> 20} MiB stay")
            assert "ERROR" not in engine.log

    with (
        front_end(**SHM),
        running_engine(config, num_clients=2, executor_class=FrugalExecutor, **SHM) as engine,
    ):
        run_async(run(engine), timeout_s=LIMIT_S)
