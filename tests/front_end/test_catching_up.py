"""Once outputs have piled up, a stream gets several tokens at once; others still get their turn."""

import asyncio
import collections
import itertools
import os
import uuid
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from sparksched import _core
from sparksched.api_server import client
from sparksched.api_server.async_channel import MAX_OUTPUTS, AsyncChannel
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.serial_utils import MsgpackEncoder

from .event_loops import EVENT_LOOPS, NewEventLoop, Turns, run, turns
from .test_turns import async_llm as new_async_llm
from .test_turns import new_request

pytestmark = pytest.mark.release

CHUNK_SIZE = "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE"
NUM_STREAMS = 300  # more than vLLM processes in one go
NUM_STEPS = 8
NAMES = [f"stream-{index}" for index in range(NUM_STREAMS)]

# ----------------------------------------------------------------------------------------
# Streams
# ----------------------------------------------------------------------------------------


async def backlog_scene() -> dict[str, list[list[int]]]:
    """Return the tokens that each stream got at once, when all of them had piled up."""
    llm = new_async_llm()
    seen: dict[str, list[list[int]]] = collections.defaultdict(list)

    async def consume(name: str) -> None:
        request = new_request(name, RequestOutputKind.DELTA)
        async with aclosing(llm.generate(request, request.sampling_params, name)) as outputs:
            async for out in outputs:
                seen[name].append(list(out.outputs[0].token_ids))

    streams = [asyncio.create_task(consume(name)) for name in NAMES]
    while len(llm.engine_core.added) < NUM_STREAMS:
        await turns(1)
    for step in range(NUM_STEPS):
        is_last = step == NUM_STEPS - 1
        reason = FinishReason.LENGTH if is_last else None
        outputs = [EngineCoreOutput(name, [step], finish_reason=reason) for name in NAMES]
        llm.engine_core.outputs.put_nowait(EngineCoreOutputs(outputs=outputs, timestamp=1.0))
    await asyncio.gather(*streams)
    llm.output_handler.cancel()
    return dict(seen)


def connect(channels: dict[bytes, None]) -> None:
    """Have a client reach engines through rings."""
    transport = mock.Mock(channels=channels)
    with mock.patch.object(client, "connect_all", return_value=transport):
        client._connecting(lambda _: None)(SimpleNamespace(resources=SimpleNamespace()))


def seen_streams(new_event_loop: NewEventLoop, engines: int = 1) -> dict[str, list[list[int]]]:
    channels = {index.to_bytes(2, "little"): None for index in range(engines)}
    connect(channels)
    seen: dict[str, list[list[int]]] = run(new_event_loop, backlog_scene())
    assert list(seen) == NAMES
    for outputs in seen.values():
        assert list(itertools.chain(*outputs)) == list(range(NUM_STEPS))
    return seen


@EVENT_LOOPS
def test_what_has_piled_up_becomes_one_output(new_event_loop: NewEventLoop) -> None:
    with mock.patch.dict(os.environ):
        os.environ.pop(CHUNK_SIZE, None)
        seen = seen_streams(new_event_loop)
    assert {len(outputs) for outputs in seen.values()} == {1}


@EVENT_LOOPS
def test_a_users_chunk_size_is_left_alone(new_event_loop: NewEventLoop) -> None:
    with mock.patch.dict(os.environ, {CHUNK_SIZE: "128"}):
        seen = seen_streams(new_event_loop)
        assert os.environ[CHUNK_SIZE] == "128"
    assert max(len(outputs) for outputs in seen.values()) == NUM_STEPS


# ----------------------------------------------------------------------------------------
# Turns
# ----------------------------------------------------------------------------------------


class StubClient:
    """As much of vLLM's client as a channel needs."""

    def __init__(self) -> None:
        self.resources = SimpleNamespace(engine_dead=False, engine_manager=None)
        self.outputs_queue: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        self.utility_results: dict[int, Any] = {}


def new_rings(ring_bytes: int) -> tuple[_core.EngineRings, _core.ClientRings]:
    """Return both ends of a pair, which never gives up."""
    engine = _core.EngineRings(
        f"sparksched-{uuid.uuid4()}",
        num_clients=1,
        ring_bytes=ring_bytes,
        max_idle_backlog_bytes=1 << 30,
        max_backlog_bytes=1 << 30,
        stuck_after_s=60,
    )
    client = _core.ClientRings(engine.name, client_index=0, stuck_after_s=60)
    return engine, client


async def outputs_by_turn(num_messages: int, num_outputs: int) -> dict[int, int]:
    """Return how many outputs were handed over in each turn that handed over any, by its number."""
    rings, clients_rings = new_rings(1 << 25)  # enough for all: nobody makes room in it
    stub = StubClient()
    channel = AsyncChannel(stub, 0, clients_rings)
    outputs = [EngineCoreOutput(f"request-{index}", [index]) for index in range(num_outputs)]
    message = MsgpackEncoder().encode(EngineCoreOutputs(outputs=outputs, timestamp=1.0))
    while not rings.is_attached(0):
        await turns(1)
    channel.start_reading(stub)
    clock = Turns()
    counts: dict[int, int] = collections.defaultdict(int)
    rings.send(0, 0, message)  # from one message it is known how large the next ones will be
    for index in range(num_messages):
        taken = await stub.outputs_queue.get()
        if index == 0:
            for _ in range(num_messages - 1):
                rings.send(0, 0, message)
        else:
            counts[clock.count] += len(taken.outputs)
    clock.stop()
    channel.close()
    rings.close()
    return dict(counts)


@EVENT_LOOPS
@pytest.mark.parametrize("num_outputs", [1, 100, 1000, 5000])
def test_other_work_gets_its_turn(num_outputs: int, new_event_loop: NewEventLoop) -> None:
    most = max(min(64, MAX_OUTPUTS // num_outputs), 1) * num_outputs
    counts = run(new_event_loop, outputs_by_turn(101, num_outputs)).values()
    assert sum(counts) == 100 * num_outputs
    assert most in counts
    # Two turns of the channel may fall between two turns of whoever counts.
    assert max(counts) <= 2 * most
