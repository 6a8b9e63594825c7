"""A panic while an engine starts or stops: its process ends, and leaves nothing behind."""

import asyncio
import functools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transport.clients import ENDLESS, front_end, outcome_of, run_async, running_llm
from transport.engines import Engine, running_engine
from vllm.config import VllmConfig
from vllm.v1.engine.exceptions import EngineDeadError

from .engines import prepare_engine

pytestmark = pytest.mark.timeout(600)

SHM = {"SPARKSCHED_TRANSPORT": "shm"}
PACED = SHM | {"SPARKSCHED_MAX_STALL_MS": "100"}
ZMQ = {"SPARKSCHED_TRANSPORT": "zmq"}

STARTING = [
    "SchedulerCore.__new__",
    "SchedulerCore.pace",
    "SchedulerCore.set_none_hash",
    "NativeBlockHasher.__new__",
    "encode_like_scheduler",
    "EngineRings.__new__",
    "EngineRings.name",
    "EngineRings.report_to",
    "EngineMeters.__new__",
    "EngineMeters.fileno",
    "EngineMeters.time_steps",
    "QueueWatch.__new__",
    "EngineSockets.__new__",
]

WITH_ITS_FIRST_CLIENT = ["SchedulerCore.encode_outputs_for", "SchedulerCore.warm_up_pacing"]

STOPPING = [
    "EngineLinks.is_deserted",
    "SchedulerCore.num_unfinished_requests",
    "EngineLinks.close",
    "EngineSockets.wait",
]

IF_PACED = {"SchedulerCore.pace", "SchedulerCore.warm_up_pacing"}
"""What an engine calls that paces prompts."""

AT_THEIR_ENDS = {"EngineSockets.wait"}
"""What the engine is in the midst of when it is to panic."""

ENTRIES = {*STARTING, *WITH_ITS_FIRST_CLIENT, *STOPPING}
"""All that panics in these tests."""


def environment_of(entry: str) -> dict[str, str]:
    if entry.startswith("EngineSockets."):
        return ZMQ
    return PACED if entry in IF_PACED else SHM


def test_the_engine_does_not_start(extension: Path, config: VllmConfig) -> None:
    """All of them at once: vLLM looks after its input thread every ten seconds only."""

    def start(entry: str) -> None:
        prepare = functools.partial(prepare_engine, extension, entry)
        with (
            pytest.raises(AssertionError, match=f"(?s)an engine ended:.*state in {entry}: "),
            running_engine(config, prepare=prepare, **environment_of(entry)),
        ):
            pass

    with ThreadPoolExecutor(len(STARTING)) as threads:
        assert len(list(threads.map(start, STARTING))) == len(STARTING)


@pytest.mark.parametrize("entry", WITH_ITS_FIRST_CLIENT)
def test_the_engine_stops_with_its_first_client(
    entry: str, extension: Path, config: VllmConfig
) -> None:
    async def run(engine: Engine) -> None:
        async with running_llm(config, engine) as llm:
            assert await outcome_of(llm, "first", 5) == [0, "EngineDeadError"]
            with pytest.raises(EngineDeadError):
                await llm.check_health()

    prepare = functools.partial(prepare_engine, extension, entry)
    variables = environment_of(entry)
    with front_end(**variables), running_engine(config, prepare=prepare, **variables) as engine:
        run_async(run(engine))
        assert engine.wait_for_exit() == 1
        assert f"impossible state in {entry}: " in engine.log


@pytest.mark.parametrize("entry", STOPPING)
def test_an_engine_that_was_left_stops(entry: str, extension: Path, config: VllmConfig) -> None:
    at_end, transport = entry in AT_THEIR_ENDS, environment_of(entry)

    async def run(engine: Engine) -> None:
        async with running_llm(config, engine) as llm:
            await llm.engine_core.call_utility_async("arm_panic", entry, at_end, 0)
            has_begun = asyncio.Event()
            stream = asyncio.create_task(outcome_of(llm, "left", ENDLESS, has_begun.set))
            # What panics at its end may do so before the first token.
            begun = asyncio.create_task(has_begun.wait())
            await asyncio.wait([stream, begun], return_when=asyncio.FIRST_COMPLETED)
        stream.cancel()
        begun.cancel()

    prepare = functools.partial(prepare_engine, extension)
    with (
        front_end(**transport),
        running_engine(config, prepare=prepare, **transport) as engine,
    ):
        run_async(run(engine))
        assert engine.wait_for_exit() == 1
        assert f"impossible state in {entry}: " in engine.log
