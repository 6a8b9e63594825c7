"""Tenants that share a real engine: whose requests come in first, and what its metrics tell."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from .clients import ENDLESS, front_end, prompt_of, run_async, running_llm
from .conftest import make_config
from .engines import Engine, running_engine
from .test_queue_timeout import page_of, until

pytestmark = [pytest.mark.release, pytest.mark.timeout(180)]

VARIABLES = {"SPARKSCHED_TRANSPORT": "shm", "SPARKSCHED_ORDER": "fair", "SPARKSCHED_VERIFY": "stop"}


async def stream(llm: AsyncLLM, name: str, max_tokens: int, **arguments: Any) -> str:
    params = SamplingParams(
        max_tokens=max_tokens, ignore_eos=True, detokenize=False, extra_args=arguments
    )
    prompt = {"type": "token", "prompt_token_ids": prompt_of(1)}
    async for _ in llm.generate(prompt, params, name):
        pass
    return name


def test_a_burst_of_one_tenant_delays_no_other(model_directory: Path) -> None:
    config = make_config(model_directory, max_num_seqs=1)
    done: list[str] = []

    async def run(engine: Engine) -> None:
        async with running_llm(config, engine) as llm:
            first = asyncio.create_task(stream(llm, "first", ENDLESS, tenant="burst"))
            await until(lambda: page_of(engine).total("sparksched:requests_running"))
            later = []
            waiting = "sparksched:tenant_waiting_requests"
            for number in range(8):
                later.append(asyncio.create_task(stream(llm, f"burst-{number}", 4, tenant="burst")))
            await until(lambda: page_of(engine).total("sparksched:requests_waiting") == 8)
            later.append(asyncio.create_task(stream(llm, "quiet", 4, tenant="quiet")))
            waiting = "sparksched:tenant_waiting_requests"
            # Told of once a second.
            await until(lambda: page_of(engine).total(waiting, tenant="quiet"))
            assert page_of(engine).total(waiting, tenant="burst") == 8
            first.cancel()
            for task in asyncio.as_completed(later):
                done.append(await task)
            for wrong in ({"tenant": ["x"]}, {"tenant": "x" * 300}, {"ttft_s": "soon"}):
                with pytest.raises(VLLMValidationError, match="in vllm_xargs is not a"):
                    await stream(llm, "wrong", 1, **wrong)

    with front_end(**VARIABLES), running_engine(config, **VARIABLES) as engine:
        run_async(run(engine))
        assert "requests come in by fair" in engine.log
        assert "the schedulers differ" not in engine.log
    assert done[0] == "quiet"
