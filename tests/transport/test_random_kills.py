"""Processes killed at random moments: the others notice, and nothing of them stays behind."""

import asyncio
import random
import re
import time
from typing import Any

import pytest
from scale import size
from sparksched import plugin
from vllm.config import VllmConfig
from vllm.v1.engine.exceptions import EngineDeadError

from .clients import (
    connected,
    endless_request,
    expected_tokens,
    front_end,
    prompt_of,
    run_async,
)
from .engines import (
    Engine,
    environment_with,
    nothing_stays_behind,
    running_engine,
    start_process,
    wait_until,
)

pytestmark = pytest.mark.timeout(300)

NUM_KILLS = size("SPARKSCHED_KILLS", 10, 30)
SEED = 1
SHM = {"SPARKSCHED_TRANSPORT": "shm", "SPARKSCHED_RING_MIB": "1"}
NUM_REQUESTS = 6


def test_killed_engines(config: VllmConfig) -> None:
    """Each client has one error to report, at whatever moment its engine died."""
    moments = random.Random(SEED)
    num_tokens = 0

    async def live_and_die(engine: Engine) -> None:
        nonlocal num_tokens
        async with connected(config, engine) as reader:
            loop = asyncio.get_running_loop()
            loop.call_later(moments.uniform(0.0, 0.2), engine.process.kill)
            for index in range(NUM_REQUESTS):
                try:
                    await reader.add(endless_request(f"endless-{index}"))
                except EngineDeadError:
                    break
            async with asyncio.timeout(60):
                while not reader.errors:
                    await asyncio.sleep(0.005)
            assert [type(error) for error in reader.errors] == [EngineDeadError]
            for tokens in reader.tokens.values():
                assert tokens == expected_tokens(prompt_of(1), len(tokens), ignore_eos=True)
                num_tokens += len(tokens)
            with pytest.raises(EngineDeadError):
                await reader.add(endless_request("too-late"))

    def kill_one() -> None:
        with running_engine(config, **SHM) as engine:
            run_async(live_and_die(engine))

    with front_end(**SHM):
        kill_one()
        with nothing_stays_behind():
            for _ in range(NUM_KILLS):
                kill_one()
    assert num_tokens > 0


def run_short_lived_client(
    config: VllmConfig, addresses: dict[str, str], index: int, count: int
) -> None:
    """Connect and send requests, for as long as the process is let live."""
    plugin.register()

    async def run() -> None:
        async with connected(config, addresses, index, count) as reader:
            for number in range(NUM_REQUESTS):
                await reader.add(endless_request(f"{index}-{number}"))
            await reader.until(lambda: False, timeout_s=600)

    asyncio.run(run())


def test_killed_clients(config: VllmConfig) -> None:
    """The engine goes on for the one that is left, which misses nothing."""
    moments = random.Random(SEED)
    count = NUM_KILLS + 1

    async def run(engine: Engine) -> None:
        async with connected(config, engine, NUM_KILLS, count) as reader:
            await reader.add(endless_request("mine"))
            await reader.begin("mine")
            num_with_requests = 0
            for index in range(NUM_KILLS):
                log_path = engine.directory / f"client-{index}.log"
                arguments = (config, engine.addresses(index), index, count)
                process: Any = start_process(
                    run_short_lived_client, log_path, environment_with(**SHM), *arguments
                )
                # Every third client is killed while it connects.
                if index % 3:
                    await until_attached(engine, index)
                    await asyncio.sleep(moments.uniform(0.0, 0.15))
                else:
                    await asyncio.sleep(moments.uniform(0.2, 0.8))
                num_with_requests += len(await reader.unfinished()) > 1
                process.kill()
                await asyncio.to_thread(process.join)
                await until_only_mine_is_left(reader)
            # Otherwise this has not tested much.
            assert num_with_requests > 0
            tokens = reader.tokens["mine"]
            assert tokens == expected_tokens(prompt_of(1), len(tokens), ignore_eos=True)
            assert not reader.finishes
            await reader.client.abort_requests_async(["mine"])
            assert await reader.unfinished() == []
        assert "Traceback" not in engine.log
        # The engine may not have noticed yet that the last ones, which had no requests, are dead.
        wait_until(lambda: killed(engine) == attached(engine) - {NUM_KILLS}, what="for all deaths")
        assert len(attached(engine)) > NUM_KILLS * 2 // 3

    with front_end(**SHM):
        with running_engine(config, **SHM) as engine:
            engine.wait_for_line("scheduling in Rust")
        with nothing_stays_behind(), running_engine(config, num_clients=count, **SHM) as engine:
            run_async(run(engine))


def attached(engine: Engine) -> set[int]:
    return indices_in(engine, r"API server (\d+) \(process")


def killed(engine: Engine) -> set[int]:
    """Return which of the clients died: the one that stays ends in good order."""
    return indices_in(engine, r"API server (\d+) is gone: its process died")


def indices_in(engine: Engine, pattern: str) -> set[int]:
    return {int(it) for it in re.findall(pattern, engine.log)}


async def until_attached(engine: Engine, index: int) -> None:
    deadline = time.monotonic() + 60
    while not engine.log_lines(f"API server {index} (process"):
        assert time.monotonic() < deadline, "a client doesn't connect"
        await asyncio.sleep(0.005)


async def until_only_mine_is_left(reader: Any) -> None:
    async with asyncio.timeout(60):
        while [request_id for request_id, _ in await reader.unfinished()] != ["mine"]:
            await asyncio.sleep(0.01)
