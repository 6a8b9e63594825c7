"""A queue of very many large requests, all of which are aborted at once; others don't notice.

`SPARKSCHED_OVERLOAD_REQUESTS` says how many requests.
"""

import asyncio
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from scale import size
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from testkit.device import continuation

from .clients import ENDLESS, Reader, connected, endless_request, front_end, run_async, running_llm
from .conftest import make_config
from .engines import Engine, FrugalExecutor, running_engine
from .holdings import anonymous_bytes, show_books

NUM_REQUESTS = size("SPARKSCHED_OVERLOAD_REQUESTS", 200, 500)
LIMIT_S = 120 + NUM_REQUESTS // 10

PROMPT_TOKENS = 8000
NUM_PROMPTS = 16
"""Requests share them: in the client, and in the prefix cache."""

NUM_OTHERS = 4
NUM_PATIENT = 10
"""Requests at the end of the queue whose clients stay."""

NUM_AT_ONCE = 64
SLACK_MIB = 64
STEP_S = 0.002

SHM = {"SPARKSCHED_TRANSPORT": "shm"}
pytestmark = pytest.mark.timeout(2 * LIMIT_S + 60)


def prompt(number: int) -> list[int]:
    return [(number + position * position) % 200 for position in range(PROMPT_TOKENS)]


PROMPTS = [prompt(number) for number in range(NUM_PROMPTS)]


async def stream(llm: AsyncLLM, request_id: str, prompt: list[int], max_tokens: int) -> list[int]:
    params = SamplingParams(
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    tokens: list[int] = []
    rendered = {"type": "token", "prompt_token_ids": prompt}
    async for output in llm.generate(rendered, params, request_id):
        tokens += output.outputs[0].token_ids
    return tokens


def expected(prompt: list[int], count: int) -> list[int]:
    return list(itertools.islice(continuation(prompt), count))


@dataclass
class Overload:
    """An engine with a front end that is flooded, and a client that isn't."""

    engine: Engine
    llm: AsyncLLM
    other: Reader

    def __post_init__(self) -> None:
        self._memory_before = anonymous_bytes(self.engine.pid)
        self._flood: list[asyncio.Task[list[int]]] = []

    async def run(self) -> None:
        others = [f"other-{number}" for number in range(NUM_OTHERS)]
        await self.other.add(*(endless_request(it, client_index=1) for it in others))
        await self.other.begin(*others)
        first_mib, again_mib = [await self._flood_and_abort() for _ in range(2)]
        # What the heap has kept for later is used then, not added to.
        assert again_mib <= 1.1 * first_mib + SLACK_MIB
        await self._serve()
        # Each of theirs goes on, and none of the others is left.
        assert not self.other.finishes
        assert sorted(await self.other.unfinished()) == [(it, 1) for it in others]
        await self._check_others(others)
        assert not self.llm.output_processor.request_states

    async def _flood_and_abort(self) -> int:
        """Return by how many MiB the engine's own memory has grown when all are in its queue."""
        await self._queue()
        patient = [
            asyncio.create_task(stream(self.llm, f"patient-{number}", PROMPTS[number], 20))
            for number in range(NUM_PATIENT)
        ]
        await self.other.call_executor("echo", 1)
        queued_mib = (anonymous_bytes(self.engine.pid) - self._memory_before) >> 20
        for task in self._flood:
            task.cancel()
        await asyncio.wait(self._flood)
        assert all(task.cancelled() for task in self._flood)
        while await self.other.call("num_requests") > NUM_PATIENT + NUM_OTHERS:
            await asyncio.sleep(0.005)
        for number, task in enumerate(patient):
            assert await task == expected(PROMPTS[number], 20)
        return queued_mib

    async def _queue(self) -> None:
        self._flood.clear()
        for number in range(NUM_REQUESTS):
            prompt = PROMPTS[number % NUM_PROMPTS]
            flood = stream(self.llm, f"flood-{number}", prompt, ENDLESS)
            self._flood.append(asyncio.create_task(flood))
            if number % NUM_AT_ONCE == NUM_AT_ONCE - 1:
                # It comes after them: the front end is no faster than the engine takes them.
                await self.other.call_executor("echo", number)
        while await self.other.call("num_requests") < NUM_REQUESTS + NUM_OTHERS:
            await asyncio.sleep(0.01)

    async def _serve(self) -> None:
        prompts = [PROMPTS[number % NUM_PROMPTS][: 50 + number] for number in range(100)]
        streams = [
            stream(self.llm, f"later-{number}", prompt, 20) for number, prompt in enumerate(prompts)
        ]
        for prompt, tokens in zip(prompts, await asyncio.gather(*streams), strict=True):
            assert tokens == expected(prompt, 20)

    async def _check_others(self, others: list[str]) -> None:
        await self.other.client.abort_requests_async(others)
        while await self.other.unfinished():
            await asyncio.sleep(0.01)
        for it in others:
            tokens = self.other.tokens[it]
            own_prompt = endless_request(it).prompt_token_ids
            assert tokens == expected(own_prompt, len(tokens))


def test_an_abort_of_all_that_waits(model_directory: Path) -> None:
    config = make_config(model_directory, max_num_seqs=16, max_num_batched_tokens=4096)

    async def run(engine: Engine) -> None:
        async with (
            running_llm(config, engine, 0, count=2) as llm,
            connected(config, engine, 1, count=2) as other,
        ):
            await other.call_executor("set_step_s", STEP_S)
            await Overload(engine, llm, other).run()

    prepared: Any = {"executor_class": FrugalExecutor, "prepare": show_books}
    with front_end(**SHM), running_engine(config, num_clients=2, **prepared, **SHM) as engine:
        run_async(run(engine), timeout_s=LIMIT_S)
        assert "ERROR" not in engine.log
