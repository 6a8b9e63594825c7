"""Just-in-time scheduling in real engines: nothing is lost while a step is held back."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from engine.harness import new_request
from sparksched import _core
from sparksched.trace.session import open_trace, replay
from vllm.config import VllmConfig
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.executor import Executor

from .clients import Reader, connected, endless_request, expected_tokens, front_end, prompt_of
from .clients import run_async as run
from .conftest import make_config
from .engines import Engine, running_engine
from .timed import TimedExecutor, WorkerExecutor

pytestmark = pytest.mark.timeout(180)

STEP_S = 0.02
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def async_config(model_directory: Path) -> VllmConfig:
    return make_config(model_directory, async_scheduling=True)


def count_held_back(self: EngineCoreProc) -> int:
    """Return how many steps were held back: a utility method."""
    meters = self.sparksched.offer.engine.meters
    reader = _core.MeterReader(pid=os.getpid(), fd=meters.fd, id=int.from_bytes(meters.id))
    counts: list[int] = reader.steps()["held_back"][0]
    return sum(counts)


def count_steps_held_back() -> None:
    EngineCoreProc.count_held_back = count_held_back


Scenario = Callable[[Reader, Engine], Awaitable[None]]


def play(
    scenario: Scenario,
    config: VllmConfig,
    transport: str,
    executor_class: type[Executor] = TimedExecutor,
    **variables: str,
) -> None:
    variables = {"SPARKSCHED_TRANSPORT": transport, "SPARKSCHED_JUST_IN_TIME": "1", **variables}

    async def connect(engine: Engine) -> None:
        async with connected(config, engine) as reader:
            await reader.call_executor("set_step_s", STEP_S)
            await scenario(reader, engine)

    with (
        front_end(**variables),
        running_engine(
            config, executor_class=executor_class, prepare=count_steps_held_back, **variables
        ) as engine,
    ):
        run(connect(engine))
        # With its last client; only then a recording is whole.
        engine.wait_for_exit()


async def begin_to_hold_back(reader: Reader, *request_ids: str) -> None:
    """Have requests run, and wait until another step of theirs is held back."""
    before = await reader.call("count_held_back")
    await reader.add(*map(endless_request, request_ids))
    await reader.begin(*request_ids)
    while await reader.call("count_held_back") <= before:
        # A call ends a wait: some steps have to be made before the next.
        await asyncio.sleep(10 * STEP_S)


@pytest.mark.parametrize("transport", ["shm", "zmq", "verified", "recorded", "workers"])
def test_requests_aborts_and_pauses_get_through(
    transport: str, async_config: VllmConfig, tmp_path: Path
) -> None:
    """Also while vLLM's scheduler checks each step, and while they are recorded."""
    trace = tmp_path / "trace"
    variables = {
        "verified": {"SPARKSCHED_VERIFY": "stop"},
        "recorded": {"SPARKSCHED_RECORD": str(trace)},
    }.get(transport, {})

    async def scenario(reader: Reader, engine: Engine) -> None:
        await begin_to_hold_back(reader, "first", "second")
        requests = {f"r{number}": prompt_of(number) for number in range(6)}
        for request_id, prompt in requests.items():
            await reader.add(new_request(request_id, prompt, NUM_TOKENS, ignore_eos=True))
            await asyncio.sleep(STEP_S / 3)
        await reader.finish(requests)
        for request_id, prompt in requests.items():
            assert reader.tokens[request_id] == expected_tokens(prompt, NUM_TOKENS, ignore_eos=True)
        await reader.client.abort_requests_async(["first"])
        while await reader.unfinished() != [("second", 0)]:
            await asyncio.sleep(STEP_S)
        await reader.call("pause_scheduler", "keep", False)
        num_tokens = len(reader.tokens["second"])
        await reader.call("resume_scheduler")
        await reader.until(lambda: len(reader.tokens["second"]) > num_tokens + NUM_TOKENS)

    executor_class = WorkerExecutor if transport == "workers" else TimedExecutor
    play(
        scenario,
        async_config,
        transport if transport == "zmq" else "shm",
        executor_class,
        **variables,
    )
    if transport == "recorded":
        opened = open_trace(str(trace), partial=False)
        assert opened.past.schedule_us
        for outcome in replay(opened, ["vllm", "sparksched"]):
            assert outcome.mismatch is None


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_the_engine_ends_while_a_step_is_held_back(
    transport: str, async_config: VllmConfig
) -> None:
    async def scenario(reader: Reader, engine: Engine) -> None:
        await begin_to_hold_back(reader, "endless")
        engine.signal(signal.SIGTERM)
        assert await asyncio.to_thread(engine.wait_for_exit) == 0

    play(scenario, async_config, transport)


def test_an_engine_that_cannot_says_why(config: VllmConfig) -> None:
    async def scenario(reader: Reader, engine: Engine) -> None:
        (line,) = engine.log_lines("not scheduled just in time")
        assert "WARNING" in line
        assert line.endswith("scheduling is synchronous")

    play(scenario, config, "shm")


def test_it_is_off_by_default(async_config: VllmConfig) -> None:
    async def scenario(reader: Reader, engine: Engine) -> None:
        await reader.add(endless_request("endless"))
        await reader.until(lambda: len(reader.tokens.get("endless", ())) > 2 * NUM_TOKENS)
        assert await reader.call("count_held_back") == 0
        assert not engine.log_lines("just in time")

    play(scenario, async_config, "shm", SPARKSCHED_JUST_IN_TIME="")
