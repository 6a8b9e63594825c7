"""One collection of garbage returns what a dropped front end held, as nobody closes an `LLM`."""

import asyncio
import copy
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.llm_engine import LLMEngine

from .clients import ENDLESS, engines_of_clients, front_end, outcome_of, prompt_of, run_async
from .engines import PacedExecutor, possessions, wait_until

pytestmark = pytest.mark.timeout(180)

SHM = {"SPARKSCHED_TRANSPORT": "shm"}
DIES = pytest.mark.parametrize("dies", [False, True], ids=["orderly", "dies"])


@pytest.fixture(name="processes")
def _processes(tmp_path: Path) -> Iterator[list[Any]]:
    with front_end(**SHM), engines_of_clients(tmp_path / "log", **SHM) as processes:
        yield processes
        for process in processes:
            process.kill()


@pytest.fixture
def _no_other_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def is_dead(engine: LLMEngine) -> bool:
    try:
        engine.step()
    except EngineDeadError:
        return True
    return False


def serve(config: VllmConfig, processes: list[Any], dies: bool) -> None:
    engine = LLMEngine(copy.deepcopy(config), PacedExecutor, log_stats=True, multiprocess_mode=True)
    prompt = {"prompt_token_ids": prompt_of(0)}
    engine.add_request("one", prompt, SamplingParams(max_tokens=ENDLESS if dies else 5))
    engine.step()
    if dies:
        processes[-1].kill()
        wait_until(lambda: is_dead(engine))
    while not dies and engine.has_unfinished_requests():
        engine.step()


@pytest.mark.usefixtures("_no_other_collection")
@DIES
def test_a_front_end_without_a_loop(config: VllmConfig, processes: list[Any], dies: bool) -> None:
    # Much is made when it is first needed, and stays.
    serve(config, processes, dies)
    processes.clear()
    gc.collect()
    gc.collect()
    before = wait_until_settled()
    serve(config, processes, dies)
    processes.clear()
    gc.collect()
    wait_until(lambda: possessions(os.getpid()).is_within(before), 20, f"for {before}")


def wait_until_settled() -> Any:
    """Return what this process holds, once it is the same for more than a second."""
    seen: list[Any] = []

    def is_settled() -> bool:
        seen.append(possessions(os.getpid()))
        return len(seen) > 150 and len(set(seen[-150:])) == 1

    wait_until(is_settled)
    return seen[-1]


async def serve_in_loop(config: VllmConfig, processes: list[Any], dies: bool) -> None:
    llm = AsyncLLM(
        vllm_config=copy.deepcopy(config),
        executor_class=PacedExecutor,
        log_stats=True,
        log_requests=False,
    )
    begun = asyncio.Event()
    request = asyncio.create_task(outcome_of(llm, "one", ENDLESS if dies else 5, begun.set))
    await begun.wait()
    if dies:
        processes[-1].kill()
    _, end = await request
    assert (end == "EngineDeadError") == dies


@pytest.mark.usefixtures("_no_other_collection")
@DIES
def test_a_front_end_in_a_loop(config: VllmConfig, processes: list[Any], dies: bool) -> None:
    async def run() -> None:
        await serve_in_loop(config, processes, dies)
        processes.clear()
        for _ in range(3):
            gc.collect()
            await asyncio.sleep(1.5)
        before = possessions(os.getpid())
        await serve_in_loop(config, processes, dies)
        processes.clear()
        gc.collect()
        async with asyncio.timeout(20):
            while not possessions(os.getpid()).is_within(before):
                await asyncio.sleep(0.01)

    run_async(run())
