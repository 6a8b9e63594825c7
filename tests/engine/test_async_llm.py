"""`AsyncLLM` and an engine process of its own: streams, a shutdown, and a fatal error."""

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sparksched import plugin
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from testkit.device import EOS_TOKEN_ID, POISON, continuation
from testkit.executor import engine_args

from .harness import restored_vllm

pytestmark = pytest.mark.timeout(600)

STEP_TIMEOUT_S = 60
NUM_STREAMS = 12
NUM_FAILING_STREAMS = 5


@dataclass
class Stream:
    """What a client saw of one request."""

    token_ids: list[int]
    finish_reason: str | None


def prompt_of(index: int) -> list[int]:
    return [(7 * index + position) % 200 for position in range(10 + 15 * index)]


def expected_tokens(prompt: list[int], max_tokens: int) -> list[int]:
    """Return what a request must be given, whoever schedules it."""
    tokens = list(itertools.islice(continuation(prompt), max_tokens))
    return tokens[: tokens.index(EOS_TOKEN_ID) + 1] if EOS_TOKEN_ID in tokens else tokens


async def stream(
    llm: AsyncLLM, request_id: str, prompt: list[int], max_tokens: int, **settings: Any
) -> Stream:
    params = SamplingParams(
        max_tokens=max_tokens, output_kind=RequestOutputKind.DELTA, detokenize=False, **settings
    )
    seen = Stream([], None)
    async for output in llm.generate({"prompt_token_ids": prompt}, params, request_id):
        (completion,) = output.outputs
        seen.token_ids.extend(completion.token_ids)
        seen.finish_reason = completion.finish_reason
    return seen


async def in_time(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return await asyncio.wait_for(coroutine, STEP_TIMEOUT_S)


async def check_streams(llm: AsyncLLM) -> None:
    """Send many requests at once: each of them gets its own tokens."""
    streams = await asyncio.gather(
        *(stream(llm, f"stream-{index}", prompt_of(index), 40) for index in range(NUM_STREAMS))
    )
    for index, seen in enumerate(streams):
        assert seen.token_ids == expected_tokens(prompt_of(index), 40)
        stopped = seen.token_ids[-1] == EOS_TOKEN_ID
        assert seen.finish_reason == ("stop" if stopped else "length")
    assert {seen.finish_reason for seen in streams} == {"stop", "length"}


async def check_death(llm: AsyncLLM) -> None:
    """Make the scheduler raise in the middle: every request fails, once, and nothing hangs."""
    poisoned = stream(llm, "poisoned", [POISON, *[1] * 20], 20, ignore_eos=True)
    others = [
        stream(llm, f"dies-{index}", prompt_of(index), 230 - 15 * index, ignore_eos=True)
        for index in range(NUM_FAILING_STREAMS)
    ]
    results = await asyncio.gather(poisoned, *others, return_exceptions=True)
    assert [type(result) for result in results] == [EngineDeadError] * (1 + NUM_FAILING_STREAMS)
    assert llm.errored
    with pytest.raises(EngineDeadError):
        await stream(llm, "too-late", prompt_of(1), 5)
    with pytest.raises(EngineDeadError):
        await llm.check_health()
    await wait_until_processes_ended(llm)


async def wait_until_processes_ended(llm: AsyncLLM) -> None:
    processes = llm.engine_core.resources.engine_manager.processes
    while any(process.is_alive() for process in processes):
        await asyncio.sleep(0.05)


@asynccontextmanager
async def running_llm(model_directory: Path, **settings: Any) -> AsyncIterator[AsyncLLM]:
    llm = AsyncLLM.from_engine_args(engine_args(model_directory, **settings))
    try:
        yield llm
    finally:
        llm.shutdown()


async def check_shutdown(llm: AsyncLLM) -> None:
    """Shut down in the middle, in the loop itself: each request fails, where vLLM's would wait."""
    await llm.pause_generation(mode="keep")  # so that none ends before all have begun
    streams = [
        asyncio.create_task(stream(llm, f"left-{index}", prompt_of(index), 200, ignore_eos=True))
        for index in range(NUM_FAILING_STREAMS)
    ]
    while llm.get_num_unfinished_requests() < NUM_FAILING_STREAMS:
        await asyncio.sleep(0)
    llm.shutdown()
    results = await asyncio.gather(*streams, return_exceptions=True)
    assert [type(result) for result in results] == [EngineDeadError] * NUM_FAILING_STREAMS


async def live_and_die(model_directory: Path, async_scheduling: bool) -> None:
    async with running_llm(model_directory, async_scheduling=async_scheduling) as llm:
        await in_time(check_streams(llm))
        await in_time(check_death(llm))


def run_with(scheduler: str, scenario: Coroutine[Any, Any, None]) -> None:
    with restored_vllm():
        os.environ |= {
            "VLLM_SCHEDULER": scheduler,
            "SPARKSCHED_STRICT": "1",
            # As `vllm serve` does: the engine process finds the plugin by its entry point.
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "VLLM_NO_USAGE_STATS": "1",
        }
        plugin.register()
        asyncio.run(scenario)


def test_a_shutdown_leaves_no_request_waiting(model_directory: Path) -> None:
    async def scenario() -> None:
        async with running_llm(model_directory, async_scheduling=True) as llm:
            await in_time(check_shutdown(llm))

    run_with("sparksched", scenario())


@pytest.mark.parametrize(
    ("scheduler", "async_scheduling"),
    [
        pytest.param("vllm", True, marks=pytest.mark.full),
        ("sparksched", True),
        ("sparksched", False),
    ],
    ids=["stock-async", "sparksched-async", "sparksched-sync"],
)
def test_life_and_death_of_an_engine(
    scheduler: str,
    async_scheduling: bool,
    model_directory: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run_with(scheduler, live_and_die(model_directory, async_scheduling))
    log = capfd.readouterr().out
    kind = "asynchronous" if async_scheduling else "synchronous"
    assert (f"scheduling in Rust ({kind}" in log) == (scheduler == "sparksched")
    assert log.count("KeyError") > 0
