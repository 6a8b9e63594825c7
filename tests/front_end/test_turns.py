"""No output comes a turn of the event loop later than with vLLM's functions, or with others."""

import asyncio
import os
import random
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from .event_loops import EVENT_LOOPS, NewEventLoop, Turns, run, turns
from .implementations import OURS, STOCK, Implementation
from .test_collector import output, token_ids

NUM_SEEDS = 25

# ----------------------------------------------------------------------------------------
# One consumer
# ----------------------------------------------------------------------------------------


async def consumer_scene(seed: int) -> list[Any]:
    """Return in which turn what happened to a consumer that is now and then cancelled."""
    rng = random.Random(seed)
    queue = RequestOutputCollector(rng.choice(list(RequestOutputKind)), "request")
    clock = Turns()
    seen: list[Any] = []

    async def consume() -> None:
        while True:
            try:
                got = queue.get_nowait() or await queue.get()
            except ValueError as error:
                seen.append((clock.count, str(error)))
            else:
                seen.append((clock.count, token_ids(got)))
            await turns(rng.choice([0, 0, 0, 1, 3]))

    consumer = asyncio.create_task(consume())
    for number in range(200):
        match rng.choices(["put", "fail", "wait", "cancel", "take"], [50, 2, 40, 4, 4])[0]:
            case "put":
                queue.put(output(number, index=rng.choice([0, 0, 1])))
            case "fail":
                queue.put(ValueError(number))
            case "wait":
                await turns(rng.choice([1, 2, 5]))
            case "cancel":
                consumer.cancel()
                await turns(rng.choice([0, 1]))
                seen.append((clock.count, "cancelled"))
                consumer = asyncio.create_task(consume())
            case "take" if not isinstance(queue.output, Exception):
                taken = queue.get_nowait()
                seen.append((clock.count, taken and token_ids(taken)))
    consumer.cancel()
    clock.stop()
    return seen


# ----------------------------------------------------------------------------------------
# AsyncLLM
# ----------------------------------------------------------------------------------------


class StubCore:
    """Stands for the engine's client: hands over what the test says."""

    def __init__(self) -> None:
        self.resources = SimpleNamespace(engine_dead=False)
        self.outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        self.added: list[str] = []
        self.aborted: list[str] = []

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self.added.append(request.request_id)

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self.outputs.get()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self.aborted += request_ids


class StubInputProcessor:
    """Takes requests that are ready for the engine."""

    def resolve_watermarking(self, params: SamplingParams) -> None:
        pass

    def apply_watermarking(self, params: SamplingParams, watermarking: None) -> None:
        pass

    def assign_request_id(self, request: EngineCoreRequest) -> None:
        request.external_req_id = request.request_id


def async_llm() -> AsyncLLM:
    """Return vLLM's front end, with nothing before and behind it."""
    llm = AsyncLLM.__new__(AsyncLLM)
    llm.vllm_config = SimpleNamespace(
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=False),
        kv_transfer_config=None,
        ec_transfer_config=None,
    )
    llm.scheduler_config = SimpleNamespace(max_num_queued_reqs=None, max_num_queued_tokens=None)
    llm.renderer = SimpleNamespace(mm_processor_cache=None, shutdown=lambda: None)
    llm.engine_core = StubCore()
    llm.engine_core.shutdown = lambda timeout: None  # type: ignore[attr-defined]
    llm.input_processor = StubInputProcessor()
    llm.output_processor = OutputProcessor(None, log_stats=True)
    llm.log_stats = True
    llm.log_requests = False
    llm.logger_manager = None
    llm.output_handler = None
    return llm


def new_request(request_id: str, kind: RequestOutputKind) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=[1, 2, 3],
        mm_features=None,
        sampling_params=SamplingParams(detokenize=False, output_kind=kind),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


async def streams_scene(seed: int) -> list[Any]:
    """Return in which turn which stream of several got what, or was given up by its client."""
    rng = random.Random(seed)
    llm = async_llm()
    clock = Turns()
    seen: list[Any] = []

    async def consume(name: str, kind: RequestOutputKind) -> None:
        request = new_request(name, kind)
        num_wanted = rng.choice([3, 100, 100])
        async with aclosing(llm.generate(request, request.sampling_params, name)) as outputs:
            async for out in outputs:
                (completion,) = out.outputs
                seen.append((clock.count, name, list(completion.token_ids), out.finished))
                num_wanted -= 1
                if num_wanted == 0:
                    break
                await turns(rng.choice([0, 0, 0, 2, 6]))

    kinds = [*[RequestOutputKind.DELTA] * 5, *RequestOutputKind]
    names = [f"stream-{index}" for index in range(len(kinds))]
    streams = [
        asyncio.create_task(consume(name, kind)) for name, kind in zip(names, kinds, strict=True)
    ]
    await turns(3)
    for step in range(40):
        outputs = [EngineCoreOutput(name, [step]) for name in names if rng.random() < 0.8]
        if step == 39:
            outputs = [EngineCoreOutput(it, [], finish_reason=FinishReason.LENGTH) for it in names]
        llm.engine_core.outputs.put_nowait(EngineCoreOutputs(outputs=outputs, timestamp=1.0 + step))
        await turns(rng.choice([0, 1, 2, 3, 8]))
    await asyncio.gather(*streams)
    llm.output_handler.cancel()
    clock.stop()
    return [seen, llm.engine_core.aborted, list(llm.output_processor.request_states)]


@EVENT_LOOPS
@pytest.mark.parametrize("scene", [consumer_scene, streams_scene])
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_all_happens_in_the_same_turn(scene: Any, seed: int, new_event_loop: NewEventLoop) -> None:
    def seen_with(implementation: Implementation) -> Any:
        # Small chunks: between them vLLM's handler lets others have their turn.
        chunks = mock.patch.dict(os.environ, {"VLLM_V1_OUTPUT_PROC_CHUNK_SIZE": "3"})
        with implementation.in_use(), chunks:
            return run(new_event_loop, scene(seed))

    stock = seen_with(STOCK)
    assert seen_with(OURS) == stock
    assert len(str(stock)) > 500
