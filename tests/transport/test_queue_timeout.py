"""Requests that wait in a real engine's queue for too long, and what its front end tells."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from engine.harness import new_request
from sparksched.api_server.errors import QueueTimeoutError
from sparksched.commands import local_engines
from sparksched.commands.top.page import Page, parse
from sparksched.shared import queue_timeout
from sparksched.shared.card import find
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from .clients import ENDLESS, connected, front_end, prompt_of, run_async, running_llm
from .conftest import make_config
from .engines import Engine, running_engine

pytestmark = [pytest.mark.release, pytest.mark.timeout(180)]

OWN = {queue_timeout.ARGUMENT: 0.3}


async def stream(llm: AsyncLLM, name: str, **settings: Any) -> None:
    settings = {"max_tokens": ENDLESS, "ignore_eos": True, "detokenize": False, **settings}
    prompt = {"type": "token", "prompt_token_ids": prompt_of(1)}
    async for _ in llm.generate(prompt, SamplingParams(**settings), name):
        pass


def page_of(engine: Engine) -> Page:
    return parse(local_engines.page(lambda: [it for it in find() if it.pid == engine.pid]), 0.0)


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_a_request_gives_up_in_time(model_directory: Path, transport: str) -> None:
    config = make_config(model_directory, max_num_seqs=1)
    variables = {"SPARKSCHED_TRANSPORT": transport, "SPARKSCHED_STUCK_AFTER_S": "0.1"}

    async def run(engine: Engine) -> None:
        async with running_llm(config, engine, log_stats=transport == "shm") as llm:
            await play(engine, llm)

    async def play(engine: Engine, llm: AsyncLLM) -> None:
        running = asyncio.create_task(stream(llm, "running", max_tokens=ENDLESS))
        await until(lambda: page_of(engine).total("sparksched:requests_running"))
        # Without statistics the front end doesn't know for how long.
        waited = r"has waited for \d" if transport == "shm" else "has waited in"
        first = asyncio.create_task(stream(llm, "first"))
        await until(lambda: "It waits for a place in the batch (--max-num-seqs)" in engine.log)
        first.cancel()
        await asyncio.wait([first])
        with pytest.raises(QueueTimeoutError, match=waited):
            await stream(llm, "waiting", extra_args=OWN)
        with pytest.raises(QueueTimeoutError):
            await stream(llm, "two", n=2, extra_args=OWN)
        with pytest.raises(VLLMValidationError, match="queue_timeout_s='x'"):
            await stream(llm, "wrong", extra_args={queue_timeout.ARGUMENT: "x"})
        await llm.pause_generation(mode="keep", clear_cache=False)
        with pytest.raises(QueueTimeoutError):
            await stream(llm, "paused", extra_args=OWN)
        await until(lambda: "It waits for scheduling to be resumed" in engine.log)
        # Without a limit it waits, and is counted.
        patient = asyncio.create_task(stream(llm, "patient"))
        await until(lambda: page_of(engine).total("sparksched:waiting_requests", reason="pause"))
        page = page_of(engine)
        assert page.total("sparksched:waiting_requests") == 1
        # Of two outputs, the second one is aborted unless its time is up by then, too.
        assert page.total("sparksched:queue_timeouts_total") in {3, 4}
        await llm.resume_generation()
        await until(
            lambda: page_of(engine).total("sparksched:waiting_requests", reason="pause") == 0
        )
        for task in (running, patient):
            task.cancel()
        await asyncio.wait([running, patient])
        await until(lambda: page_of(engine).total("sparksched:requests_running") == 0)
        assert not llm.output_processor.request_states
        assert not llm.output_processor.parent_requests
        await stream(llm, "later", max_tokens=2)

    with front_end(**variables), running_engine(config, **variables) as engine:
        run_async(run(engine))
        assert "It waits for a place in the batch (--max-num-seqs): 1 requests run" in engine.log
        assert "ERROR" not in engine.log


def test_the_operators_limit_is_verified(model_directory: Path) -> None:
    """It holds with vLLM's scheduler beside ours, which is told of the end."""
    config = make_config(model_directory, max_num_seqs=1)
    variables = {
        "SPARKSCHED_TRANSPORT": "shm",
        "SPARKSCHED_QUEUE_TIMEOUT_S": "0.2",
        "SPARKSCHED_VERIFY": "stop",
    }

    async def run(engine: Engine) -> None:
        async with connected(config, engine) as reader:
            await reader.add(new_request("a", prompt_of(1), ENDLESS, ignore_eos=True))
            await reader.begin("a")
            await reader.add(new_request("b", prompt_of(1), 2), new_request("c", prompt_of(1), 2))
            await reader.finish("bc")
            assert [it.name for it in reader.finishes["b"]] == ["ERROR"]
            assert reader.tokens["b"] == []
            await reader.client.abort_requests_async(["a"])
            await reader.add(new_request("d", prompt_of(1), 2))
            await reader.finish("d")
            assert len(reader.tokens["d"]) == 2

    with front_end(**variables), running_engine(config, **variables) as engine:
        run_async(run(engine))
        assert "the schedulers differ" not in engine.log
