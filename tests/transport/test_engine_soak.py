"""An engine that has served very many requests, however they came and went, is as it was at first.

`SPARKSCHED_SOAK_REQUESTS` says how many, `SPARKSCHED_SOAK_SEED` which ones.
"""

import asyncio
import os
import random
import time
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import pytest
from engine.harness import restored_vllm
from scale import size
from vllm.config import VllmConfig

from testkit.executor import engine_config

from .clients import ChildClient, child_client, front_end, run_async, running_llm
from .engines import Engine, FrugalExecutor, Possessions, possessions, running_engine
from .holdings import (
    anonymous_bytes,
    front_end_books,
    growth,
    heap_bytes,
    python_blocks,
    show_books,
)
from .traffic import Traffic

NUM_QUIET_POINTS = 20
WARM_UP = 5
"""Quiet points before which caches fill and heaps find their size."""

NUM_REQUESTS = size("SPARKSCHED_SOAK_REQUESTS", 5_000, 100_000, minimum=2 * NUM_QUIET_POINTS)
SEED = size("SPARKSCHED_SOAK_SEED", 1, 1, minimum=0)
LIMIT_S = 300 + NUM_REQUESTS // 50

NUM_BLOCKS = 60
"""So few that running requests are preempted."""

SHM = {"SPARKSCHED_TRANSPORT": "shm", "SPARKSCHED_RING_MIB": "1"}

VISITS = {0: "killed", 1: "stays to the end", 10: "killed", 15: "stays to the end"}
"""Other front ends: before which quiet point they attach, and how they go."""

GONE_CLIENT = Possessions(num_descriptors=3, num_threads=0, num_children=0, num_mappings=1)
"""What an engine keeps of a client that was there, until it ends itself."""

SIDES = ("engine", "front end")
MAX_BYTES_A_REQUEST = 50
MAX_OTHER_BYTES = 1 << 19
MAX_PYTHON_BLOCKS_A_REQUEST = 0.5

IDLE = {
    "requests": [],
    "running": [],
    "waiting": [],
    "blocks in use": 0,
    "free blocks": NUM_BLOCKS - 1,  # vLLM keeps one for nothing
    "sequences": 0,
    "has work": False,
}

pytestmark = pytest.mark.timeout(LIMIT_S + 120)


@dataclass(frozen=True)
class QuietPoint:
    """What the two processes hold while nothing is going on."""

    num_requests: int
    num_steps: int
    num_visitors: int
    num_tasks: int
    possessions: tuple[Possessions, Possessions]
    anonymous_bytes: tuple[int, int]
    heap_bytes: tuple[int, int]
    python_blocks: tuple[int, int]


@dataclass
class Soak:
    """A run, and what it finds when it stops for a moment."""

    config: VllmConfig
    engine: Engine
    traffic: Traffic
    points: list[QuietPoint] = field(default_factory=list)
    num_visitors: int = 0

    async def run(self) -> None:
        start = time.monotonic()
        for number in range(NUM_QUIET_POINTS):
            traffic = self.traffic.run(NUM_REQUESTS // 2 // NUM_QUIET_POINTS)
            if number in VISITS:
                await asyncio.gather(traffic, self._be_visited(VISITS[number]))
            else:
                await traffic
            self.points.append(await self._take_stock())
            print(f"{time.monotonic() - start:6.0f} s {self.points[-1]}", flush=True)

    async def _be_visited(self, how: str) -> None:
        """Let another front end come and go, in a process of its own."""
        self.num_visitors += 1
        index = self.num_visitors
        lengths = {f"visitor-{index}-{number}": 200 for number in range(20)}
        count = len(VISITS) + 1
        with child_client(self.config, self.engine, index, count, lengths, **SHM) as visitor:
            report = await report_of(visitor)
            if how == "killed":
                return
            # A pause may have ended all of them before each had a token.
            outcomes = await report_of(visitor) if report == "streaming" else report
            while visitor.process.is_alive():
                await asyncio.sleep(0.01)
        for num_tokens, *ends in outcomes.values():
            # A pause may end it before.
            assert ends == ["length"] if num_tokens == 200 else ends == ["abort"], outcomes

    async def _take_stock(self) -> QuietPoint:
        llm = self.traffic.llm
        call = llm.engine_core.call_utility_async
        pids = (self.engine.pid, os.getpid())
        async with asyncio.timeout(60):
            # Requests that were aborted leave the model runner with a step that follows.
            while (books := await call("books"))["has work"]:
                await asyncio.sleep(0.01)
            assert books == IDLE
            assert not any(front_end_books(llm).values()), front_end_books(llm)
            (totals,) = await llm.collective_rpc("get_totals")
            return QuietPoint(
                num_requests=self.traffic.counts["requests"],
                num_steps=totals["steps"],
                num_visitors=self.num_visitors,
                num_tasks=len(asyncio.all_tasks()),
                possessions=(await lasting_possessions(pids[0]), possessions(pids[1])),
                anonymous_bytes=(anonymous_bytes(pids[0]), anonymous_bytes(pids[1])),
                heap_bytes=(await call("heap_bytes"), heap_bytes()),
                python_blocks=(await call("python_blocks"), python_blocks()),
            )

    def check_points(self) -> None:
        """Nothing has grown since the warm-up."""
        first, *later = self.points[WARM_UP:]
        for number, point in enumerate(later, WARM_UP + 1):
            if number in VISITS:
                continue  # the last of a process that was here may take a moment to go
            assert point.num_tasks <= first.num_tasks, point
            assert point.possessions[1].is_within(first.possessions[1]), (first, point)
            num_gone = point.num_visitors - first.num_visitors
            allowed = first.possessions[0].plus(GONE_CLIENT, num_gone)
            assert point.possessions[0].is_within(allowed), (first, point)
        num_requests = later[-1].num_requests - first.num_requests
        for index, side in enumerate(SIDES):
            num_bytes, num_heap_bytes, num_blocks = (
                self._growth(name, index) * num_requests
                for name in ("anonymous_bytes", "heap_bytes", "python_blocks")
            )
            print(
                f"{side}, after {num_requests} requests more: {num_bytes:.0f} B resident, "
                f"{num_heap_bytes:.0f} B allocated, {num_blocks:.0f} Python blocks"
            )
            max_bytes = MAX_BYTES_A_REQUEST * num_requests + MAX_OTHER_BYTES
            assert num_bytes <= max_bytes, side
            assert num_heap_bytes <= max_bytes, side
            assert num_blocks <= MAX_PYTHON_BLOCKS_A_REQUEST * num_requests + 1000, side

    def _growth(self, name: str, side: int) -> float:
        points = self.points[WARM_UP:]
        values = [getattr(point, name)[side] for point in points]
        return growth([point.num_requests for point in points], values)

    async def check_variety(self) -> None:
        """Otherwise this has not tested much."""
        (totals,) = await self.traffic.llm.collective_rpc("get_totals")
        counts = self.traffic.counts
        print(dict(counts), totals)
        assert totals["preemptions"] > 0
        for what in (
            "stop",
            "length",
            "abort",
            "left",
            "prefix hits",
            "interrupted before a token",
        ):
            assert counts[what] > 0, what


async def lasting_possessions(pid: int) -> Possessions:
    """Count what a process holds for longer than ZMQ attempts to reach a client that is gone.

    Ten times a second it opens a socket for each of them, and closes it at once.
    """
    looks = []
    for _ in range(5):
        looks.append(possessions(pid))
        await asyncio.sleep(0.02)
    return Possessions(*map(min, *map(astuple, looks)))


async def report_of(visitor: ChildClient) -> Any:
    """Return the next report. No thread waits for it, which would count as one more."""
    async with asyncio.timeout(60):
        while not visitor.connection.poll():
            await asyncio.sleep(0.01)
    return visitor.receive()


@pytest.mark.parametrize(
    ("policy", "async_scheduling"),
    [
        pytest.param("fcfs", True, id="fcfs"),
        pytest.param("priority", False, id="priority", marks=pytest.mark.full),
    ],
)
def test_nothing_is_left_of_requests(
    policy: str, async_scheduling: bool, model_directory: Path
) -> None:
    with restored_vllm():
        config = engine_config(
            model_directory,
            async_scheduling=async_scheduling,
            scheduling_policy=policy,
            num_gpu_blocks_override=NUM_BLOCKS,
            max_num_seqs=16,
            max_num_batched_tokens=128,
            max_model_len=256,
        )

    async def run(engine: Engine) -> None:
        async with running_llm(config, engine, count=len(VISITS) + 1) as llm:
            soak = Soak(config, engine, Traffic(llm, random.Random(SEED), "soak"))
            try:
                await soak.run()
            except BaseException:
                print(f"SPARKSCHED_SOAK_SEED={SEED} SPARKSCHED_SOAK_REQUESTS={NUM_REQUESTS}")
                raise
            soak.check_points()
            await soak.check_variety()

    with (
        front_end(**SHM),
        running_engine(
            config,
            num_clients=len(VISITS) + 1,
            executor_class=FrugalExecutor,
            prepare=show_books,
            **SHM,
        ) as engine,
    ):
        run_async(run(engine), timeout_s=LIMIT_S)
