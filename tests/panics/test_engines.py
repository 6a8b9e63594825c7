"""A panic in an engine: it stops, each request fails once, and its process ends.

Where a panic concerns one request alone, only that one fails.
"""

import asyncio
import functools
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transport.clients import (
    ENDLESS,
    Ear,
    front_end,
    outcome_of,
    prompt_of,
    run_async,
    running_llm,
)
from transport.conftest import make_config
from transport.engines import Engine, PacedExecutor, running_engine
from vllm.config import VllmConfig
from vllm.engine.protocol import StreamingInput
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from .engines import DraftingExecutor, prepare_engine

pytestmark = pytest.mark.timeout(600)

SHM = {"SPARKSCHED_TRANSPORT": "shm"}
NUM_STREAMS = 4
ADD = 0
"""Kind of a message with a request."""
OBSERVABILITY = "vllm_config.observability_config"


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
    call = asyncio.create_task(
        llm.engine_core.call_utility_async("arm_panic", entry, at_end, num_spared)
    )
    async with asyncio.timeout(60):
        while not (call.done() or llm.errored):
            await asyncio.sleep(0.01)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


# ----------------------------------------------------------------------------------------
# Panics that end an engine
# ----------------------------------------------------------------------------------------


Provoke = Callable[[AsyncLLM, Engine], Awaitable[Any]]


async def nothing(_llm: AsyncLLM, _engine: Engine) -> None:
    """Do nothing: a step, or the answer to the call before, is enough."""


async def another_request(llm: AsyncLLM, _engine: Engine) -> None:
    _, *ends = await outcome_of(llm, "another", ENDLESS)
    assert ends == ["EngineDeadError"]


async def an_abort(llm: AsyncLLM, _engine: Engine) -> None:
    await llm.engine_core.abort_requests_async(["mine-0"])


async def a_grammar(llm: AsyncLLM, _engine: Engine) -> None:
    grammar = StructuredOutputsParams(regex="[ab]+")
    _, *ends = await outcome_of(llm, "grammar", 50, structured_outputs=grammar)
    assert ends == ["EngineDeadError"]


async def a_session(llm: AsyncLLM, _engine: Engine) -> None:
    """Give a session a second input once it has no other."""
    has_answered = asyncio.Event()

    async def inputs() -> AsyncGenerator[StreamingInput, None]:
        yield StreamingInput({"prompt_token_ids": prompt_of(2)})
        await has_answered.wait()
        yield StreamingInput({"prompt_token_ids": prompt_of(3)})

    params = SamplingParams(max_tokens=1, output_kind=RequestOutputKind.DELTA)
    try:
        async for _ in llm.generate(inputs(), params, "session"):
            has_answered.set()
    except EngineDeadError:
        return
    raise AssertionError("the session has ended well")


async def nonsense(llm: AsyncLLM, _engine: Engine) -> None:
    """Send what the engine can't read: it hangs up."""
    (channel,) = llm.engine_core.resources.sparksched_rings.channels.values()
    channel.rings.send(ADD, [b"nonsense"])


async def no_reading(llm: AsyncLLM, engine: Engine) -> None:
    """Take no messages until the engine fails, while more wait than may."""
    ear = Ear(SimpleNamespace(client=llm.engine_core))
    ear.close()
    answer = asyncio.create_task(llm.collective_rpc("make_bytes", args=(3 << 20,)))
    await asyncio.to_thread(engine.wait_for_line, "impossible state")
    ear.open()
    await asyncio.gather(answer, return_exceptions=True)


def calling(*call: Any) -> Provoke:
    """Return what calls a utility method, which may be answered before the engine dies or not."""

    async def call_utility(llm: AsyncLLM, _engine: Engine) -> None:
        answer = asyncio.create_task(llm.engine_core.call_utility_async(*call))
        await asyncio.wait([answer], timeout=60.0)
        assert answer.done()
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
    arms_itself: bool = False
    executor_class: type[PacedExecutor] = PacedExecutor
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the engine."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Its environment, beside what all have."""

    @property
    def failures(self) -> list[list[str]]:
        """How a request may fail: who takes nothing may be given up before the engine fails."""
        return [["EngineDeadError"], *([["error"]] if self.provoke is no_reading else [])]


FULL = {"max_num_seqs": NUM_STREAMS}
HURRIED = {"SPARKSCHED_QUEUE_TIMEOUT_S": "0.5"}
CONNECTOR = {
    "kv_transfer_config": {
        "kv_connector": "AskingConnector",
        "kv_connector_module_path": "panics.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": "/nonexistent"},
    },
    "disable_hybrid_kv_cache_manager": True,
}
SPECULATION = {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 2}}
ZMQ = {"SPARKSCHED_TRANSPORT": "zmq"}
IMPATIENT = {"SPARKSCHED_RING_MIB": "1", "SPARKSCHED_STUCK_AFTER_S": "0.5"}
WITH_DRAFTS = {"num_streams": 0, "executor_class": DraftingExecutor}

CASES = [
    # The loop, in each step.
    Case("SchedulerCore.schedule"),
    Case("SchedulerCore.schedule", at_end=True),
    Case("SchedulerCore.update_from_output", num_spared=3),
    Case("SchedulerCore.update_from_output", at_end=True),
    Case("SchedulerCore.has_requests"),
    Case("SchedulerCore.structured_output_request_ids", a_grammar),
    Case("EngineLinks.send_outputs"),
    Case("EngineLinks.send_outputs", at_end=True),
    Case("EngineLinks.send_outputs", variables=ZMQ),
    # The loop, in each step of some engines.
    Case("SchedulerCore.decide", settings=CONNECTOR),
    Case("SchedulerCore.block_ids", settings=CONNECTOR),
    Case("SchedulerCore.update_after_schedule", settings=CONNECTOR),
    Case(
        "SchedulerCore.update_draft_token_ids",
        another_request,
        settings=SPECULATION,
        **WITH_DRAFTS,
    ),
    Case(
        "SchedulerCore.valid_drafts",
        a_grammar,
        settings={**SPECULATION, "async_scheduling": True},
        **WITH_DRAFTS,
    ),
    Case(
        "StepOutputs.scheduler_stats",
        calling("change", f"{OBSERVABILITY}.enable_logging_iteration_details", True),
    ),
    Case(
        "SchedulerCore.make_stats",
        calling("collective_rpc", "fail"),
        settings={"async_scheduling": True},
    ),
    Case("SchedulerCore.request_counts", calling("change", "publish_dp_lb_stats", True)),
    Case("SchedulerCore.kv_cache_usage", calling("change", "publish_dp_lb_stats", True)),
    # The loop, because a request has waited for too long.
    Case("SchedulerCore.take_expired", another_request, settings=FULL, variables=HURRIED),
    Case("EngineMeters.count_queue_timeouts", another_request, settings=FULL, variables=HURRIED),
    # The loop, because of a message.
    Case("SchedulerCore.add_request", another_request),
    Case("SchedulerCore.is_waiting_for_input", a_session),
    Case("SchedulerCore.continue_session", a_session),
    Case("SchedulerCore.finish_requests", an_abort),
    Case("SchedulerCore.finish_requests", an_abort, at_end=True),
    # Answers to utility calls fail, and the scheduler can't go on.
    Case("SchedulerCore.set_pause_state", calling("pause_scheduler", "keep", False)),
    Case("SchedulerCore.set_pause_state", calling("pause_scheduler", "keep", False), at_end=True),
    Case("SchedulerCore.reset_prefix_cache", calling("reset_prefix_cache", False, False)),
    Case("SchedulerCore.preempt_running", calling("reset_prefix_cache", True, False)),
    # The way to the clients.
    Case("EngineLinks.is_attached", num_streams=0),
    Case("EngineLinks.send", calling("is_sleeping")),
    Case("EngineLinks.send", calling("answer_later"), num_spared=1),
    # A client that takes no messages.
    Case("StepOutputs.frames", no_reading, variables=IMPATIENT),
    Case("EngineLinks.backlog_bytes", no_reading, variables=IMPATIENT),
    Case("EngineLinks.take_back_newest", no_reading, variables=IMPATIENT),
    Case("EngineLinks.unblock", no_reading, variables=IMPATIENT),
    # The loop is idle: it has the input thread stop receiving, and another thread has something.
    Case("EngineRings.interrupt", calling("is_sleeping"), num_streams=0),
    Case(
        "EngineRings.interrupt",
        calling("wake_from_thread", "EngineRings.interrupt"),
        num_streams=0,
        arms_itself=True,
    ),
    # The input thread.
    Case("EngineRings.receive", calling("is_sleeping")),
    Case("EngineRings.receive", another_request, at_end=True),
    Case("EngineRings.is_closed", calling("is_sleeping")),
    Case("EngineRings.hang_up", nonsense),
]


@pytest.mark.parametrize(
    "case",
    CASES,
    ids=lambda case: f"{case.entry}-{case.provoke.__name__}{'-end' * case.at_end}",
)
def test_the_engine_stops_and_each_request_fails_once(
    case: Case, extension: Path, model_directory: Path
) -> None:
    async def run(engine: Engine) -> None:
        async with running_llm(config, engine) as llm:
            streams = await streams_of(llm, case.num_streams)
            if not case.arms_itself:
                await arm(llm, case.entry, case.at_end, case.num_spared)
            await case.provoke(llm, engine)
            await until_errored(llm)
            for num_tokens, *ends in await asyncio.gather(*streams):
                assert num_tokens > 0
                assert ends in case.failures
            assert await outcome_of(llm, "too-late", 5) == [0, "EngineDeadError"]
            with pytest.raises(EngineDeadError):
                await llm.check_health()
            assert await asyncio.to_thread(engine.wait_for_exit) != 0

    prepare = functools.partial(prepare_engine, extension)
    variables = {**SHM, **case.variables}
    with front_end(**variables):
        config = make_config(model_directory, **with_drafter(case.settings, model_directory))
        with running_engine(
            config, prepare=prepare, executor_class=case.executor_class, **variables
        ) as engine:
            run_async(run(engine))
            text = f"RuntimeError: sparksched found itself in an impossible state in {case.entry}: "
            assert text in engine.log
            assert "PanicException" not in engine.log
            assert engine.process.exitcode == 1, "it ended by itself, and not by a signal"


def with_drafter(settings: Mapping[str, Any], model_directory: Path) -> dict[str, Any]:
    """Name the model that drafts, which only a test has a folder of, if there is one."""
    speculation = settings.get("speculative_config")
    if speculation is None:
        return dict(settings)
    return {**settings, "speculative_config": {**speculation, "model": str(model_directory)}}


async def until_errored(llm: AsyncLLM) -> None:
    async with asyncio.timeout(60):
        while not llm.errored:
            await asyncio.sleep(0.01)


# ----------------------------------------------------------------------------------------
# Panics that concern one request, or one call
# ----------------------------------------------------------------------------------------


OF_ONE_REQUEST = ["NativeBlockHasher.__call__", "read_prompt"]


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_only_the_request_fails(transport: str, extension: Path, config: VllmConfig) -> None:
    """Whichever of the two input threads has prepared it."""

    async def run(engine: Engine) -> None:
        async with running_llm(config, engine) as llm:
            (other,) = await streams_of(llm, 1)
            for entry in OF_ONE_REQUEST:
                await arm(llm, entry)
                assert await outcome_of(llm, f"fails-{entry}", 5) == [0, "error"]
                await arm(llm, "nowhere")
                assert await outcome_of(llm, f"lives-{entry}", 5) == [5, "length"]
            assert not other.done()
            await llm.check_health()
            other.cancel()

    variables = {"SPARKSCHED_TRANSPORT": transport}
    prepare = functools.partial(prepare_engine, extension)
    with front_end(**variables), running_engine(config, prepare=prepare, **variables) as engine:
        run_async(run(engine))
        for entry in OF_ONE_REQUEST:
            assert f"impossible state in {entry}: " in engine.log


CALLS = {
    "SchedulerCore.pause_state": ("is_scheduler_paused",),
    "SchedulerCore.num_used_blocks": ("reset_prefix_cache", False, False),
    "SchedulerCore.has_unfinished_requests": ("reset_mm_cache",),
    # Of a scheduler that is recorded: the recording says who was running.
    "SchedulerCore.running_requests": ("reset_prefix_cache", False, False),
}
"""Calls that fail, by what panics in them: nothing of the scheduler has changed."""


def test_only_the_call_fails(extension: Path, config: VllmConfig, tmp_path: Path) -> None:
    async def run(engine: Engine) -> None:
        async with running_llm(config, engine) as llm:
            (other,) = await streams_of(llm, 1)
            for entry, call in CALLS.items():
                await arm(llm, entry)
                with pytest.raises(Exception, match=f"impossible state in {entry}: "):
                    await llm.engine_core.call_utility_async(*call)
            await arm(llm, "nowhere")
            assert await outcome_of(llm, "lives", 5) == [5, "length"]
            assert not other.done()
            other.cancel()

    variables = {**SHM, "SPARKSCHED_RECORD": str(tmp_path / "trace")}
    prepare = functools.partial(prepare_engine, extension)
    with front_end(**variables), running_engine(config, prepare=prepare, **variables) as engine:
        run_async(run(engine))


def test_a_forked_process_concerns_nobody(extension: Path, config: VllmConfig) -> None:
    """Python has nobody to tell of an error after a fork: it is only printed."""

    async def run(engine: Engine) -> None:
        async with running_llm(config, engine) as llm:
            await arm(llm, FORK)
            assert await llm.engine_core.call_utility_async("fork") == 7
            assert await outcome_of(llm, "lives", 5) == [5, "length"]

    prepare = functools.partial(prepare_engine, extension)
    with front_end(**SHM), running_engine(config, prepare=prepare, **SHM) as engine:
        run_async(run(engine))
        assert f"impossible state in {FORK}: " in engine.log


FORK = "note_fork"

ENTRIES = {*(case.entry for case in CASES), *OF_ONE_REQUEST, *CALLS, FORK}
"""All that panics in these tests."""
