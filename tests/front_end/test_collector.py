"""`RequestOutputCollector`, vLLM's and ours: the same tests hold for both, in both event loops."""

import asyncio
from collections.abc import Iterator

import pytest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import output_processor
from vllm.v1.engine.output_processor import RequestOutputCollector

from .event_loops import EVENT_LOOPS, NewEventLoop, run, turns
from .implementations import OURS, STOCK

pytestmark = pytest.mark.release


@pytest.fixture(params=[STOCK, OURS], ids=lambda it: it.name, autouse=True)
def implementation(request: pytest.FixtureRequest) -> Iterator[None]:
    with request.param.in_use():
        yield


def collector(kind: RequestOutputKind = RequestOutputKind.DELTA) -> RequestOutputCollector:
    return RequestOutputCollector(kind, "request")


def output(*token_ids: int, index: int = 0, finished: bool = False) -> RequestOutput:
    completion = CompletionOutput(index, "", list(token_ids), None, None)
    return RequestOutput("request", None, [0], None, [completion], finished)


def token_ids(output: RequestOutput) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


# ----------------------------------------------------------------------------------------
# Waiting
# ----------------------------------------------------------------------------------------


def chunk_end(*token_ids: int) -> RequestOutput:
    """Return the last output of a turn, behind which a session goes on."""
    last = output(*token_ids)
    last.outputs[0].finish_reason = "stop"
    return last


@EVENT_LOOPS
@pytest.mark.skipif(
    not hasattr(output_processor, "StreamingInputOutputCollector"), reason="since vLLM 0.33.0"
)
def test_turns_of_a_session_are_not_merged(new_event_loop: NewEventLoop) -> None:
    async def scene() -> None:
        queue = output_processor.StreamingInputOutputCollector(RequestOutputKind.DELTA, "request")
        consumer = asyncio.create_task(queue.get())
        await turns(1)
        for one in (output(1), chunk_end(2), output(3), chunk_end(4), output(5), output(6)):
            queue.put(one)
        assert token_ids(await consumer) == [[1, 2]]
        assert token_ids(await queue.get()) == [[3, 4]]
        assert token_ids(queue.get_nowait()) == [[5, 6]]
        assert queue.get_nowait() is None
        consumer = asyncio.create_task(queue.get())
        await turns(1)
        queue.put(output(7))
        assert token_ids(await consumer) == [[7]]

    run(new_event_loop, scene())


@EVENT_LOOPS
@pytest.mark.parametrize("cancelled", [None, 0, 1, 2])
def test_several_consumers_get_theirs_in_turn(
    new_event_loop: NewEventLoop, cancelled: int | None
) -> None:
    async def scene() -> None:
        queue = collector()
        consumers = [asyncio.create_task(queue.get()) for _ in range(3)]
        await turns(1)
        if cancelled is not None:
            consumers.pop(cancelled).cancel()
            await turns(4)
        for token_id, consumer in enumerate(consumers):
            assert not consumer.done()
            queue.put(output(token_id))
            assert token_ids(await consumer) == [[token_id]]
            await turns(4)

    run(new_event_loop, scene())
