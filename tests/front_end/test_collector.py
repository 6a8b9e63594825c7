"""`RequestOutputCollector`, vLLM's and ours: the same tests hold for both, in both event loops."""

import asyncio
from collections.abc import Iterator

import pytest
import torch
from vllm.outputs import CompletionOutput, PoolingOutput, PoolingRequestOutput, RequestOutput
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


def pooling_output(value: int) -> PoolingRequestOutput:
    return PoolingRequestOutput("request", PoolingOutput(torch.tensor(value)), [0], 0, True)


def token_ids(output: RequestOutput) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


# ----------------------------------------------------------------------------------------
# Without waiting
# ----------------------------------------------------------------------------------------


def test_there_is_nothing_at_first() -> None:
    assert collector().get_nowait() is None


def test_an_output_is_there_once() -> None:
    queue = collector()
    one = output(1)
    queue.put(one)
    assert queue.get_nowait() is one
    assert queue.get_nowait() is None


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(RequestOutputKind.DELTA, [[1, 2, 3]]), (RequestOutputKind.CUMULATIVE, [[3]])],
)
def test_outputs_are_merged_if_the_consumer_lags(
    kind: RequestOutputKind, expected: list[list[int]]
) -> None:
    queue = collector(kind)
    for token_id in (1, 2, 3):
        queue.put(output(token_id, finished=token_id == 3))
    merged = queue.get_nowait()
    assert token_ids(merged) == expected
    assert merged.finished


def test_outputs_of_different_sequences_stay_apart() -> None:
    queue = collector()
    for index in (0, 1, 0):
        queue.put(output(index, index=index))
    assert token_ids(queue.get_nowait()) == [[0, 0], [1]]


def test_the_last_pooling_output_counts() -> None:
    queue = collector(RequestOutputKind.FINAL_ONLY)
    for value in (1, 2):
        queue.put(pooling_output(value))
    assert queue.get_nowait().outputs.data == 2


def test_an_error_replaces_what_waits_and_is_replaced_by_no_output() -> None:
    queue = collector()
    queue.put(output(1))
    queue.put(KeyError("first"))
    queue.put(ValueError("second"))
    queue.put(output(2))
    with pytest.raises(ValueError, match="second"):
        queue.get_nowait()
    assert queue.get_nowait() is None


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
def test_what_is_there_is_got_at_once(new_event_loop: NewEventLoop) -> None:
    async def scene() -> None:
        queue = collector()
        one = output(1)
        queue.put(one)
        coroutine = queue.get()
        with pytest.raises(StopIteration) as got:
            coroutine.send(None)
        assert got.value.value is one

    run(new_event_loop, scene())


@EVENT_LOOPS
def test_the_consumer_wakes_in_the_next_turn(new_event_loop: NewEventLoop) -> None:
    async def scene() -> None:
        queue = collector()
        for token_id in range(3):
            consumer = asyncio.create_task(queue.get())
            await turns(3)
            assert not consumer.done()
            queue.put(output(token_id))
            await turns(1)
            assert token_ids(consumer.result()) == [[token_id]]

    run(new_event_loop, scene())


@EVENT_LOOPS
def test_what_comes_before_the_consumer_runs_is_merged(new_event_loop: NewEventLoop) -> None:
    async def scene() -> None:
        queue = collector()
        consumer = asyncio.create_task(queue.get())
        await turns(1)
        queue.put(output(1))
        queue.put(output(2))
        assert token_ids(await consumer) == [[1, 2]]

    run(new_event_loop, scene())


@EVENT_LOOPS
def test_an_error_wakes_the_consumer(new_event_loop: NewEventLoop) -> None:
    async def scene() -> None:
        queue = collector()
        consumer = asyncio.create_task(queue.get())
        await turns(1)
        queue.put(output(1))
        queue.put(ValueError("too late"))
        with pytest.raises(ValueError, match="too late"):
            await consumer

    run(new_event_loop, scene())


@EVENT_LOOPS
@pytest.mark.parametrize("woken", [False, True])
def test_nothing_is_lost_with_a_cancelled_consumer(
    new_event_loop: NewEventLoop, woken: bool
) -> None:
    async def scene() -> None:
        queue = collector()
        consumer = asyncio.create_task(queue.get())
        await turns(1)
        if woken:
            queue.put(output(1))
        consumer.cancel()
        if not woken:
            await turns(2)
            queue.put(output(1))
        with pytest.raises(asyncio.CancelledError):
            await consumer
        queue.put(output(2))
        assert token_ids(await queue.get()) == [[1, 2]]
        follower = asyncio.create_task(queue.get())
        await turns(1)
        queue.put(output(3))
        assert token_ids(await follower) == [[3]]

    run(new_event_loop, scene())


@EVENT_LOOPS
def test_a_consumer_that_was_forestalled_waits_on(new_event_loop: NewEventLoop) -> None:
    async def scene() -> None:
        queue = collector()
        consumer = asyncio.create_task(queue.get())
        await turns(1)
        queue.put(output(1))
        assert token_ids(queue.get_nowait()) == [[1]]
        await turns(3)
        assert not consumer.done()
        queue.put(output(2))
        assert token_ids(await consumer) == [[2]]

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


@EVENT_LOOPS
@pytest.mark.parametrize("closes", [False, True])
def test_the_task_of_streamed_input_ends_with_the_collector(
    new_event_loop: NewEventLoop, closes: bool
) -> None:
    async def scene() -> None:
        queue = collector()
        task = asyncio.create_task(asyncio.sleep(3600))
        queue._input_stream_task = task
        if closes:
            queue.close()
        del queue
        with pytest.raises(asyncio.CancelledError):
            await task

    run(new_event_loop, scene())
