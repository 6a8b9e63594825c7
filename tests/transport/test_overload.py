"""A queue of very many large requests, all of which are aborted at once; others don't notice.

`make test-all` does the same with vLLM's own scheduler and sockets, and shows the times side by
side: none is asserted. `SPARKSCHED_OVERLOAD_REQUESTS` says how many requests.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from scale import FULL, size
from vllm.config import VllmConfig
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
STOCK = {"VLLM_SCHEDULER": "vllm", "SPARKSCHED_TRANSPORT": "zmq"}

pytestmark = pytest.mark.timeout(2 * LIMIT_S + 60)


@dataclass
class Times:
    """Seconds of the second flood, and MiB of the engine's own memory beyond what it had before."""

    queueing_s: float = 0.0
    gap_while_queueing_s: float = 0.0
    abort_in_front_end_s: float = 0.0
    storm_s: float = 0.0
    gap_in_storm_s: float = 0.0
    service_s: float = 0.0
    queued_mib: int = 0
    left_mib: int = 0


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
        self.times = Times()
        self._memory_before = anonymous_bytes(self.engine.pid)
        self._flood: list[asyncio.Task[list[int]]] = []

    async def run(self) -> Times:
        others = [f"other-{number}" for number in range(NUM_OTHERS)]
        await self.other.add(*(endless_request(it, client_index=1) for it in others))
        await self.other.begin(*others)
        await self._flood_and_abort()
        first, self.times = self.times, Times()
        await self._flood_and_abort()
        # What the heap has kept for later is used then, not added to.
        assert self.times.queued_mib <= 1.1 * first.queued_mib + SLACK_MIB, (first, self.times)
        await self._serve()
        # Each of theirs goes on, and none of the others is left.
        assert not self.other.finishes
        assert sorted(await self.other.unfinished()) == [(it, 1) for it in others]
        self.times.left_mib = self._grown_mib()
        await self._check_others(others)
        assert not self.llm.output_processor.request_states
        return self.times

    async def _flood_and_abort(self) -> None:
        await self._queue()
        patient = [
            asyncio.create_task(stream(self.llm, f"patient-{number}", PROMPTS[number], 20))
            for number in range(NUM_PATIENT)
        ]
        await self._call("echo", 1)
        self.times.queued_mib = self._grown_mib()
        await self._abort_all()
        for number, task in enumerate(patient):
            assert await task == expected(PROMPTS[number], 20)

    async def _queue(self) -> None:
        self._flood.clear()
        await self._call("take_longest_gap")
        start = time.monotonic()
        for number in range(NUM_REQUESTS):
            prompt = PROMPTS[number % NUM_PROMPTS]
            flood = stream(self.llm, f"flood-{number}", prompt, ENDLESS)
            self._flood.append(asyncio.create_task(flood))
            if number % NUM_AT_ONCE == NUM_AT_ONCE - 1:
                # It comes after them: the front end is no faster than the engine takes them.
                await self._call("echo", number)
        while await self.other.call("num_requests") < NUM_REQUESTS + NUM_OTHERS:
            await asyncio.sleep(0.01)
        self.times.queueing_s = time.monotonic() - start
        self.times.gap_while_queueing_s = await self._call("take_longest_gap")

    async def _abort_all(self) -> None:
        start = time.monotonic()
        for task in self._flood:
            task.cancel()
        await asyncio.wait(self._flood)
        assert all(task.cancelled() for task in self._flood)
        self.times.abort_in_front_end_s = time.monotonic() - start
        while await self.other.call("num_requests") > NUM_PATIENT + NUM_OTHERS:
            await asyncio.sleep(0.005)
        self.times.storm_s = time.monotonic() - start
        self.times.gap_in_storm_s = await self._call("take_longest_gap")

    async def _serve(self) -> None:
        start = time.monotonic()
        prompts = [PROMPTS[number % NUM_PROMPTS][: 50 + number] for number in range(100)]
        streams = [
            stream(self.llm, f"later-{number}", prompt, 20) for number, prompt in enumerate(prompts)
        ]
        for prompt, tokens in zip(prompts, await asyncio.gather(*streams), strict=True):
            assert tokens == expected(prompt, 20)
        self.times.service_s = time.monotonic() - start

    async def _check_others(self, others: list[str]) -> None:
        await self.other.client.abort_requests_async(others)
        while await self.other.unfinished():
            await asyncio.sleep(0.01)
        for it in others:
            tokens = self.other.tokens[it]
            own_prompt = endless_request(it).prompt_token_ids
            assert tokens == expected(own_prompt, len(tokens))

    async def _call(self, method: str, *args: object) -> float:
        result: float = await self.other.call_executor(method, *args)
        return result

    def _grown_mib(self) -> int:
        return (anonymous_bytes(self.engine.pid) - self._memory_before) >> 20


@asynccontextmanager
async def overloaded(config: VllmConfig, engine: Engine) -> AsyncIterator[Overload]:
    async with (
        running_llm(config, engine, 0, count=2) as llm,
        connected(config, engine, 1, count=2) as other,
    ):
        overload = Overload(engine, llm, other)
        await overload._call("set_step_s", STEP_S)
        yield overload


def overload(config: VllmConfig, **variables: str) -> Times:
    async def run(engine: Engine) -> Times:
        async with overloaded(config, engine) as overload:
            return await overload.run()

    with (
        front_end(**variables),
        running_engine(
            config,
            num_clients=2,
            executor_class=FrugalExecutor,
            prepare=show_books,
            **variables,
        ) as engine,
    ):
        times: Times = run_async(run(engine), timeout_s=LIMIT_S)
        assert "ERROR" not in engine.log
    return times


def test_an_abort_of_all_that_waits(model_directory: Path) -> None:
    config = make_config(model_directory, max_num_seqs=16, max_num_batched_tokens=4096)
    ours = overload(config, **SHM)
    if not FULL:
        return
    stock = overload(config, **STOCK)
    print(f"{NUM_REQUESTS} requests of {PROMPT_TOKENS} tokens: sparksched, vLLM, ratio")
    for (name, value), theirs in zip(asdict(ours).items(), asdict(stock).values(), strict=True):
        print(f"{name:>22} {value:9.3f} {theirs:9.3f} {value / theirs if theirs else 0.0:9.2f}")
