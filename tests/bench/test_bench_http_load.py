"""The process that loads a server over HTTP, against a server that is made up."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from bench.serving.http_load import HttpError, join_all, stream_all
from bench.serving.streams import FIRST_END, RUNNING
from bench.serving.workload import Workload

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def event(token_ids: list[int] | None, **more: Any) -> bytes:
    content = {"choices": [{"text": " a", "token_ids": token_ids, **more}]}
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"


def chunk(content: bytes) -> bytes:
    return f"{len(content):x}\r\n".encode() + content + b"\r\n"


def load(
    pieces: list[bytes], num_requests: int = 1, is_sampled: bool = False
) -> tuple[dict[str, Any], list[str], list[Any]]:
    """Stream from a server that answers in these pieces; return result, events and bodies."""
    events: list[str] = []

    async def stream(port: int) -> dict[str, Any]:
        workload = Workload(num_requests, 1000, (8, 8), (4, 4))
        return await stream_all(events.append, port, "a model", workload, 0, 1, is_sampled)

    result, bodies = answered(pieces, stream)
    return result, events, bodies


def answered(pieces: list[bytes], send: Callable[[int], Awaitable[Any]]) -> tuple[Any, list[Any]]:
    """Send to the port of a server that answers in these pieces; return result and bodies."""
    bodies: list[Any] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        bodies.append(json.loads(await reader.readexactly(size)))
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.005)
        writer.close()

    async def run() -> Any:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with asyncio.timeout(60), server:
            return await send(server.sockets[0].getsockname()[1])

    return asyncio.run(run()), bodies


def test_each_joining_request_is_sent_and_timed() -> None:
    workload = Workload(5, 1000, (8, 8), (1, 1), seed=1)
    pieces = [HEAD, chunk(event([1])), chunk(DONE)]
    logs, bodies = answered(
        pieces, lambda port: join_all(lambda event: None, port, "a model", workload, 0.2)
    )
    assert all(log.times[0] > log.sent_at for log in logs)
    sent = sorted(it["prompt"] for it in bodies)
    assert sent == sorted(it.prompt for it in workload.requests())


def test_tokens_are_counted_as_they_come() -> None:
    first = event([1], prompt_token_ids=[5, 6, 7, 8])
    pieces = [HEAD, chunk(first), chunk(event([2, 3])), chunk(event([4])), chunk(DONE)]
    result, events, bodies = load(pieces)
    (log,) = result["logs"]
    assert log.num_tokens.tolist() == [1, 2, 1]
    assert log.sent_at < log.times[0] < log.times[1] < log.times[2]
    assert events == [RUNNING, FIRST_END]
    assert bodies[0]["max_tokens"] == 4
    assert len(bodies[0]["prompt"]) == 8
    assert bodies[0]["temperature"] == 0


def test_requests_that_are_sampled_have_seeds_of_their_own_and_bring_their_tokens() -> None:
    pieces = [HEAD, chunk(event([1])), chunk(event([2, 3])), chunk(DONE)]
    result, _, bodies = load(pieces, num_requests=3, is_sampled=True)
    assert result["tokens"] == [[1, 2, 3]] * 3
    assert sorted((it["temperature"], it["seed"]) for it in bodies) == [(1, 0), (1, 1), (1, 2)]
    assert load(pieces)[0]["tokens"] == []


def test_events_may_come_in_any_pieces() -> None:
    whole = HEAD + chunk(event([1])) + chunk(event([2])) + chunk(event([3])) + chunk(DONE)
    for size in (1, 7, 100, len(whole)):
        pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
        result, _, _ = load(pieces)
        assert result["logs"][0].num_tokens.sum() == 3


def test_an_event_without_tokens_is_no_output() -> None:
    pieces = [HEAD, chunk(event([1])), chunk(event([])), chunk(event(None)), chunk(DONE)]
    assert load(pieces)[0]["logs"][0].num_tokens.tolist() == [1]


def test_many_streams_are_reported_once() -> None:
    result, events, _ = load([HEAD, chunk(event([1])), chunk(DONE)], num_requests=20)
    assert len(result["logs"]) == 20
    assert events == [RUNNING, FIRST_END]


@pytest.mark.parametrize(
    "pieces",
    [
        [b"HTTP/1.1 503 Service Unavailable\r\n\r\nbusy"],
        [HEAD, chunk(event([1]))],
        [HEAD, chunk(event([1])), chunk(b'data: {"error": {"message": "x"}}\n\n')],
        [],
    ],
    ids=["status", "no end", "error event", "no answer"],
)
def test_a_stream_that_fails_fails_the_round(pieces: list[bytes]) -> None:
    with pytest.raises(HttpError):
        load(pieces)
