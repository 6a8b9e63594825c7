"""A request that was accepted is in vLLM's tables, and ahead of whatever is asked for later."""

import asyncio
import functools
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from sparksched.api_server.errors import ShuttingDownError
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.exceptions import EngineDeadError

from .clients import ENDLESS, bulk_of, front_end, prompt_of, run_async, running_llm
from .conftest import make_config
from .engines import Engine, running_engine

pytestmark = pytest.mark.timeout(180)

SHM = {"SPARKSCHED_TRANSPORT": "shm"}
SMALL_RINGS = {**SHM, "SPARKSCHED_RING_MIB": "1", "SPARKSCHED_STUCK_AFTER_S": "60"}


async def ask(llm: AsyncLLM, request_id: str, max_tokens: int, **settings: Any) -> tuple[int, str]:
    """Return how many tokens a request got, and how it ended."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, detokenize=False, **settings)
    # As vLLM's server hands it over: nothing of it waits for a tokenizer.
    prompt = {"type": "token", "prompt_token_ids": prompt_of(1)}
    async for output in llm.generate(prompt, params, request_id):
        (completion,) = output.outputs
    return len(completion.token_ids), completion.finish_reason


async def ask_endlessly(llm: AsyncLLM, count: int, **settings: Any) -> list[asyncio.Task[Any]]:
    """Start so many requests, and let each task have its first turn."""
    tasks = [
        asyncio.create_task(ask(llm, f"request-{number}", ENDLESS, **settings))
        for number in range(count)
    ]
    await asyncio.sleep(0)
    return tasks


async def abort_all(llm: AsyncLLM) -> None:
    await llm.abort(list(llm.output_processor.request_states), internal=True)


async def pause(llm: AsyncLLM) -> None:
    await llm.pause_generation(mode="abort")


async def sleep(llm: AsyncLLM) -> None:
    await llm.sleep(1)


def note_added_requests() -> None:
    """Give the engine a method that tells which requests it has got."""
    add_request = EngineCoreProc.add_request
    added: list[str] = []

    def noting_add_request(self: EngineCoreProc, request: Any, *args: Any) -> None:
        added.append(request.request_id)
        add_request(self, request, *args)

    EngineCoreProc.add_request = noting_add_request
    EngineCoreProc.added_requests = lambda self: added


CALLS = (
    "reset_prefix_cache",
    "reset_mm_cache",
    "reset_encoder_cache",
    "collective_rpc",
    "set_weight_version",
    "is_scheduler_paused",
)


def note_what_calls_find() -> None:
    """Give the engine a method that tells how many requests others found when they were called."""
    found: dict[str, int] = {}

    def noting(name: str) -> Callable[..., Any]:
        call = getattr(EngineCoreProc, name)

        @functools.wraps(call)
        def note(self: EngineCoreProc, *args: Any, **kwargs: Any) -> Any:
            found[name] = self.scheduler.get_num_unfinished_requests()
            return call(self, *args, **kwargs)

        return note

    for name in CALLS:
        setattr(EngineCoreProc, name, noting(name))
    EngineCoreProc.found_requests = lambda self: found


def play(
    config: VllmConfig,
    scenario: Callable[[AsyncLLM, Engine], Awaitable[None]],
    prepare: Callable[[], None] | None = None,
    **variables: str,
) -> None:
    async def run() -> None:
        async with running_llm(config, engine) as llm:
            # The first request of all asks the engine what it can do.
            assert await ask(llm, "before", 4) == (4, "length")
            await scenario(llm, engine)

    with front_end(**variables), running_engine(config, prepare=prepare, **variables) as engine:
        run_async(run())


@pytest.mark.parametrize("end_all", [abort_all, pause, sleep])
def test_all_that_is_in_flight_ends(
    end_all: Callable[[AsyncLLM], Awaitable[None]], config: VllmConfig
) -> None:
    """Nothing has to be resumed for that: who gathers before a resume would wait for ever."""
    count = 64

    async def scenario(llm: AsyncLLM, _: Engine) -> None:
        tasks = await ask_endlessly(llm, count)
        assert llm.output_processor.get_num_unfinished_requests() == count
        await end_all(llm)
        ends = await asyncio.wait_for(asyncio.gather(*tasks), 60)
        assert [reason for _, reason in ends] == ["abort"] * count
        assert not llm.output_processor.has_unfinished_requests()

    play(config, scenario, **SHM)


@pytest.mark.parametrize("is_needed", [False, True], ids=["unneeded", "needed-elsewhere"])
def test_what_waits_for_room_ends(is_needed: bool, config: VllmConfig) -> None:
    """It never runs; but another engine may keep blocks for it, until it is told of the abort."""
    settings = bulk_of(300_000)
    if is_needed:
        transfer = {"do_remote_prefill": True, "remote_engine_id": "other"}
        settings["extra_args"]["kv_transfer_params"] = transfer

    async def scenario(llm: AsyncLLM, engine: Engine) -> None:
        engine.signal(signal.SIGSTOP)
        tasks = await ask_endlessly(llm, 10, **settings)
        names = set(llm.output_processor.request_states)
        assert len(names) == len(tasks)
        await abort_all(llm)
        engine.signal(signal.SIGCONT)
        (channel,) = llm.engine_core.resources.sparksched_rings.channels.values()
        # There is room before any of them has had a turn.
        while channel._waiting:
            channel._on_event()
        assert await asyncio.wait_for(asyncio.gather(*tasks), 60) == [(0, "abort")] * len(tasks)
        assert await ask(llm, "after", 4) == (4, "length")
        # Three were in the ring when they were aborted, and a fourth was half in it.
        added = names & set(await llm.engine_core.call_utility_async("added_requests"))
        assert added == names if is_needed else len(added) <= 4
        assert await llm.engine_core.call_utility_async("unfinished_requests") == []

    play(config, scenario, note_added_requests, **SMALL_RINGS)


def test_what_is_asked_of_the_engine_later_finds_what_waits_for_room(config: VllmConfig) -> None:
    async def scenario(llm: AsyncLLM, engine: Engine) -> None:
        engine.signal(signal.SIGSTOP)
        tasks = await ask_endlessly(llm, 10, **bulk_of(300_000))
        calls = [
            llm.reset_prefix_cache(reset_running_requests=True),
            llm.reset_mm_cache(),
            llm.reset_encoder_cache(),
            llm.collective_rpc("echo", args=("update_weights",)),
            llm.update_weight_version("1"),
            llm.is_paused(),
        ]
        answers = asyncio.gather(*calls)
        await asyncio.sleep(0)
        assert llm.output_processor.get_num_unfinished_requests() == len(tasks)
        engine.signal(signal.SIGCONT)
        await asyncio.wait_for(answers, 60)
        found = await llm.engine_core.call_utility_async("found_requests")
        assert found == dict.fromkeys(CALLS, len(tasks))
        await pause(llm)
        ends = await asyncio.wait_for(asyncio.gather(*tasks), 60)
        assert [reason for _, reason in ends] == ["abort"] * len(tasks)

    play(config, scenario, note_what_calls_find, **SMALL_RINGS)


def test_what_waits_for_room_ends_if_the_engine_is_drained(model_directory: Path) -> None:
    """As in vLLM, what the engine hasn't added yet is refused, and what runs goes on to its end."""

    async def scenario(llm: AsyncLLM, engine: Engine) -> None:
        running = asyncio.create_task(ask(llm, "running", 100))
        while not await llm.engine_core.call_utility_async("unfinished_requests"):
            pass
        engine.signal(signal.SIGSTOP)
        tasks = await ask_endlessly(llm, 10, **bulk_of(300_000))
        engine.signal(signal.SIGTERM)
        engine.signal(signal.SIGCONT)
        ends = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        assert all(it == (0, "abort") or isinstance(it, EngineDeadError) for it in ends), ends
        assert await running == (100, "length")
        assert engine.wait_for_exit() == 0

    play(make_config(model_directory, shutdown_timeout=60), scenario, **SMALL_RINGS)


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_two_api_servers_answer_what_is_in_flight_before_they_end(
    model_directory: Path, transport: str
) -> None:
    """With vLLM's own `AsyncLLM.shutdown` no request that is in flight here would ever end.

    A signal to the whole process group reaches the engine, too: it drains itself meanwhile.
    """
    config = make_config(model_directory, shutdown_timeout=60)

    async def run(engine: Engine) -> None:
        async with (
            running_llm(config, engine, 0, count=2) as one,
            running_llm(config, engine, 1, count=2) as two,
        ):
            both = one, two
            asked = [asyncio.create_task(ask(it, "long", 2000)) for it in both for _ in range(2)]
            while len(await two.engine_core.call_utility_async("unfinished_requests")) < 4:
                await asyncio.sleep(0.01)
            ends = [asyncio.create_task(asyncio.to_thread(it.shutdown, 60)) for it in both]
            while not all(hasattr(it, "sparksched_shutdown_s") for it in both):
                await asyncio.sleep(0)
            engine.signal(signal.SIGTERM)
            for count in (1, 2):
                with pytest.raises(ShuttingDownError):
                    await ask(one, "late", 4, n=count)
            assert await asyncio.gather(*asked) == [(2000, "length")] * len(asked)
            await asyncio.gather(*ends)
        assert engine.wait_for_exit() == 0

    variables = {"SPARKSCHED_TRANSPORT": transport}
    with front_end(**variables), running_engine(config, num_clients=2, **variables) as engine:
        run_async(run(engine))
        assert "ERROR" not in engine.log


@pytest.mark.parametrize("in_the_loop", [False, True])
def test_who_is_not_answered_in_time_is_told(in_the_loop: bool, config: VllmConfig) -> None:
    """A shutdown without time is called in the loop itself; vLLM's requests would wait for ever."""

    async def scenario(llm: AsyncLLM, _: Engine) -> None:
        (endless,) = await ask_endlessly(llm, 1)
        if in_the_loop:
            llm.shutdown()
        else:
            await asyncio.to_thread(llm.shutdown, 0.5)
        with pytest.raises(EngineDeadError):
            await endless

    play(config, scenario, **SHM)
