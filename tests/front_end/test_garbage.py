"""Collections wait until streams have their outputs, and a user's thresholds stay a user's."""

import asyncio
import collections
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from sparksched.api_server import client, garbage
from sparksched.api_server.async_channel import AsyncChannel
from sparksched.api_server.garbage import RAISED, LaterCollections
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.serial_utils import MsgpackEncoder

from .event_loops import EVENT_LOOPS, NewEventLoop, run, turns
from .test_catching_up import StubClient, new_rings
from .test_turns import async_llm as new_async_llm
from .test_turns import new_request

USUAL = (700, *gc.get_threshold()[1:])
NUM_STEPS = 20

Thresholds = tuple[int, ...]


@pytest.fixture(autouse=True)
def usual_thresholds() -> Iterator[None]:
    found = gc.get_threshold()
    gc.set_threshold(*USUAL)
    yield
    gc.enable()
    gc.set_threshold(*found)


# ----------------------------------------------------------------------------------------
# Streams
# ----------------------------------------------------------------------------------------


class Server:
    """A front end, and an engine's end of the rings between the two."""

    def __init__(self) -> None:
        self.rings, rings = new_rings(1 << 22)
        self.llm = new_async_llm()
        self.client = StubClient()
        self.client.outputs_queue = self.llm.engine_core.outputs
        self.channel = AsyncChannel(self.client, 0, rings)
        channels = {b"\0\0": self.channel}
        self.llm.engine_core.resources.sparksched_rings = SimpleNamespace(channels=channels)
        self.taken: collections.Counter[Thresholds] = collections.Counter()
        """How many outputs streams have taken at which thresholds."""

    async def start(self) -> None:
        while not self.rings.is_attached(0):
            await turns(1)
        self.channel.start_reading(self.client)

    async def consume(self, name: str) -> None:
        request = new_request(name, RequestOutputKind.DELTA)
        async with aclosing(self.llm.generate(request, request.sampling_params, name)) as outputs:
            async for _ in outputs:
                self.taken[gc.get_threshold()] += 1

    def send(self, names: list[str], reason: FinishReason | None = None) -> None:
        outputs = [EngineCoreOutput(name, [1], finish_reason=reason) for name in names]
        self.rings.send(
            0, 0, MsgpackEncoder().encode(EngineCoreOutputs(outputs=outputs, timestamp=1e12))
        )

    def close(self) -> None:
        self.llm.output_handler.cancel()
        self.channel.close()
        self.rings.close()


async def streams_scene(num_streams: int) -> tuple[Server, int]:
    """Return what streams have seen, and how many collections there were per step."""
    server = Server()
    await server.start()
    names = [f"stream-{index}" for index in range(num_streams)]
    streams = [asyncio.create_task(server.consume(name)) for name in names]
    while len(server.llm.engine_core.added) < num_streams:
        await turns(1)
    for step in range(1 + NUM_STEPS):
        if step == 1:  # what vLLM's code makes once for each stream has been made
            before = gc.get_stats()[0]["collections"]
        server.send(names)
        while server.taken.total() < (1 + step) * num_streams:
            await turns(1)
        await turns(2)
        assert gc.get_threshold() == USUAL
    num_collections = gc.get_stats()[0]["collections"] - before
    server.send(names, FinishReason.LENGTH)
    await asyncio.gather(*streams)
    await turns(3)
    server.close()
    return server, num_collections


def seen_by_streams(new_event_loop: NewEventLoop, num_streams: int) -> tuple[set[Thresholds], int]:
    with mock.patch.dict(os.environ):
        client._let_streams_catch_up()
        server, num_collections = run(new_event_loop, streams_scene(num_streams))
    assert gc.get_threshold() == USUAL
    return set(server.taken), num_collections


@EVENT_LOOPS
def test_streams_take_many_outputs_before_a_collection(new_event_loop: NewEventLoop) -> None:
    thresholds, num_collections = seen_by_streams(new_event_loop, 1000)
    assert thresholds == {(RAISED, *USUAL[1:])}
    # One in a step is this test's own. Without raised thresholds there are six.
    assert num_collections <= 2 * NUM_STEPS


# ----------------------------------------------------------------------------------------
# Thresholds
# ----------------------------------------------------------------------------------------


def is_raised() -> bool:
    return gc.get_threshold() == (RAISED, *USUAL[1:])


async def receptions_scene() -> None:
    """Let two readers receive at times that overlap."""
    loop = asyncio.get_running_loop()
    one, other = LaterCollections(), LaterCollections()
    one.begin()
    assert is_raised()
    one.end_after_streams(loop)
    await turns(1)
    other.begin()
    other.end_after_streams(loop)
    await turns(1)
    assert is_raised()
    other.begin()
    other.end_after_streams(loop)
    await turns(1)
    assert is_raised()  # streams have yet to take what was received last
    await turns(2)
    assert gc.get_threshold() == USUAL


@EVENT_LOOPS
def test_the_last_reception_ends_it(new_event_loop: NewEventLoop) -> None:
    run(new_event_loop, receptions_scene())


@pytest.mark.parametrize("youngest", [0, RAISED + 1, 2 * RAISED])
def test_users_who_want_fewer_collections_get_what_they_have_set(youngest: int) -> None:
    gc.set_threshold(youngest, *USUAL[1:])
    reader = LaterCollections()
    reader.begin()
    assert gc.get_threshold() == (youngest, *USUAL[1:])
    reader.close()
    assert gc.get_threshold() == (youngest, *USUAL[1:])


class MeddledGC:
    """CPython's `gc`, with something that happens before or after one of its functions is called.

    As a collection does that finds a client which nobody has any more.
    """

    def __init__(self, moment: int, happens: Callable[[], None]) -> None:
        self.moment = moment
        self._happens = happens

    def __getattr__(self, name: str) -> Any:
        function = getattr(gc, name)

        def call(*arguments: int) -> Any:
            self._pass()
            result = function(*arguments)
            self._pass()
            return result

        return call

    def _pass(self) -> None:
        self.moment -= 1
        if self.moment == 0:
            self._happens()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("moment", range(1, 11))
@pytest.mark.parametrize("others", [0, 1])
def test_a_collection_meanwhile_may_close_readers(
    moment: int, others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, *rest = (LaterCollections() for _ in range(1 + others))
    for other in rest:
        other.begin()
    meddled = MeddledGC(moment, reader.close)
    monkeypatch.setattr(garbage, "gc", meddled)
    reader.begin()
    is_closed = meddled.moment <= 0
    assert is_raised() == (bool(others) or not is_closed)
    reader.close()
    for other in rest:
        other.close()
    assert gc.get_threshold() == USUAL
