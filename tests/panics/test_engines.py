"""A panic in an engine: it stops, each request fails once, and its process ends.

Where a panic concerns one request alone, only that one fails.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transport.clients import (
    ENDLESS,
    front_end,
    outcome_of,
    run_async,
    running_llm,
)
from transport.engines import Engine, running_engine
from vllm.config import VllmConfig
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from .engines import prepare_engine

pytestmark = pytest.mark.timeout(180)

SHM = {"SPARKSCHED_TRANSPORT": "shm"}
NUM_STREAMS = 4


async def streams_of(llm: AsyncLLM, count: int) -> list[asyncio.Task[Any]]:
    """Start requests; return them when each has a token."""
    events = [asyncio.Event() for _ in range(count)]
    streams = [
        asyncio.create_task(outcome_of(llm, f"mine-{index}", ENDLESS, event.set))
        for index, event in enumerate(events)
    ]
    await asyncio.gather(*(event.wait() for event in events))
    return streams


async def arm(llm: AsyncLLM, entry: str, at_end: bool = False, num_spared: int = 0) -> None:
    """Let an entry point panic; its answer may be the first that does."""
    call = llm.engine_core.call_utility_async("arm_panic", entry, at_end, num_spared)
    tasks = [asyncio.create_task(call)]
    await asyncio.wait(tasks, timeout=2.0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# ----------------------------------------------------------------------------------------
# Panics that end an engine
# ----------------------------------------------------------------------------------------


Provoke = Callable[[AsyncLLM], Awaitable[Any]]


async def nothing(_llm: AsyncLLM) -> None:
    """Do nothing: a step, or what the loop calls by itself, is enough."""


async def another_request(llm: AsyncLLM) -> None:
    assert await outcome_of(llm, "another", 5) == [0, "EngineDeadError"]


async def an_abort(llm: AsyncLLM) -> None:
    await llm.engine_core.abort_requests_async(["mine-0"])


async def a_grammar(llm: AsyncLLM) -> None:
    grammar = StructuredOutputsParams(regex="[ab]+")
    assert await outcome_of(llm, "grammar", 50, structured_outputs=grammar) == [
        0,
        "EngineDeadError",
    ]


def calling(*call: Any) -> Provoke:
    """Return what calls a utility method; whether that has an answer depends on the panic."""

    async def call_utility(llm: AsyncLLM) -> None:
        answer = asyncio.create_task(llm.engine_core.call_utility_async(*call))
        # As over vLLM's sockets, a call is not answered any more once the engine is dead.
        await asyncio.wait([answer], timeout=1.0)
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)

    call_utility.__name__ = call[0]
    return call_utility


@dataclass(frozen=True)
class Case:
    """An entry point and what makes the engine call it."""

    entry: str
    provoke: Provoke = nothing
    at_end: bool = False
    num_spared: int = 0
    num_streams: int = NUM_STREAMS


CASES = [
    # The loop, in each step.
    Case("SchedulerCore.schedule"),
    Case("SchedulerCore.schedule", at_end=True),
    Case("SchedulerCore.update_from_output", num_spared=3),
    Case("SchedulerCore.update_from_output", at_end=True),
    Case("SchedulerCore.has_requests"),
    Case("SchedulerCore.structured_output_request_ids", a_grammar),
    Case("EngineRings.send_outputs"),
    Case("EngineRings.send_outputs", at_end=True),
    # The loop, because of a message.
    Case("SchedulerCore.add_request", another_request),
    Case("SchedulerCore.finish_requests", an_abort),
    Case("SchedulerCore.finish_requests", an_abort, at_end=True),
    # Answers to utility calls fail, and the scheduler can't go on.
    Case("SchedulerCore.set_pause_state", calling("pause_scheduler", "keep", False)),
    Case("SchedulerCore.set_pause_state", calling("pause_scheduler", "keep", False), at_end=True),
    Case("SchedulerCore.reset_prefix_cache", calling("reset_prefix_cache", False, False)),
    Case("SchedulerCore.preempt_running", calling("reset_prefix_cache", True, False)),
    # The way to the clients.
    Case("EngineRings.send", calling("is_sleeping")),
    Case("EngineRings.send", calling("answer_later"), num_spared=1),
    # The loop receives by itself, and another thread has something for it.
    Case("EngineRings.interrupt", calling("wake_later"), num_streams=0),
    # The input thread.
    Case("EngineRings.receive", calling("is_sleeping")),
    Case("EngineRings.receive", another_request, at_end=True),
    Case("EngineRings.is_closed", calling("is_sleeping")),
]


@pytest.mark.parametrize(
    "case",
    CASES,
    ids=lambda case: f"{case.entry}-{case.provoke.__name__}{'-end' * case.at_end}",
)
def test_the_engine_stops_and_each_request_fails_once(
    case: Case, extension: Path, config: VllmConfig
) -> None:
    async def run(engine: Engine) -> None:
        async with running_llm(config, engine) as llm:
            streams = await streams_of(llm, case.num_streams)
            await arm(llm, case.entry, case.at_end, case.num_spared)
            await case.provoke(llm)
            for num_tokens, *ends in await asyncio.gather(*streams):
                assert num_tokens > 0
                assert ends == ["EngineDeadError"]
            assert await outcome_of(llm, "too-late", 5) == [0, "EngineDeadError"]
            with pytest.raises(EngineDeadError):
                await llm.check_health()
            assert await asyncio.to_thread(engine.wait_for_exit) != 0

    prepare = functools.partial(prepare_engine, extension)
    with front_end(**SHM), running_engine(config, prepare=prepare, **SHM) as engine:
        run_async(run(engine))
        text = f"RuntimeError: sparksched found itself in an impossible state in {case.entry}: "
        assert text in engine.log
        assert "PanicException" not in engine.log
        assert engine.process.exitcode == 1, "it ended by itself, and not by a signal"


# ----------------------------------------------------------------------------------------
# Panics that concern one request, or one call
# ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", ["NativeBlockHasher.__call__", "read_prompt"])
@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_only_the_request_fails(
    entry: str, transport: str, extension: Path, config: VllmConfig
) -> None:
    """Whichever of the two input threads has prepared it."""

    async def run(engine: Engine) -> None:
        async with running_llm(config, engine) as llm:
            (other,) = await streams_of(llm, 1)
            await arm(llm, entry)
            assert await outcome_of(llm, "fails", 5) == [0, "error"]
            await arm(llm, "nowhere")
            assert await outcome_of(llm, "lives", 5) == [5, "length"]
            assert not other.done()
            await llm.check_health()
            other.cancel()

    variables = {"SPARKSCHED_TRANSPORT": transport}
    prepare = functools.partial(prepare_engine, extension)
    with front_end(**variables), running_engine(config, prepare=prepare, **variables) as engine:
        run_async(run(engine))
        assert f"impossible state in {entry}: " in engine.log


@pytest.mark.parametrize(
    ("entry", "call"),
    [
        ("SchedulerCore.pause_state", ("is_scheduler_paused",)),
        ("SchedulerCore.num_used_blocks", ("reset_prefix_cache", False, False)),
    ],
)
def test_only_the_call_fails(
    entry: str, call: tuple[Any, ...], extension: Path, config: VllmConfig
) -> None:
    """Nothing of the scheduler has changed."""

    async def run(engine: Engine) -> None:
        async with running_llm(config, engine) as llm:
            (other,) = await streams_of(llm, 1)
            await arm(llm, entry)
            with pytest.raises(Exception, match=f"impossible state in {entry}: "):
                await llm.engine_core.call_utility_async(*call)
            assert await outcome_of(llm, "lives", 5) == [5, "length"]
            assert not other.done()
            other.cancel()

    prepare = functools.partial(prepare_engine, extension)
    with front_end(**SHM), running_engine(config, prepare=prepare, **SHM) as engine:
        run_async(run(engine))
