"""The process that loads a server over HTTP: plain asyncio protocols, and no more work than needed.

It obeys a pipe: see `bench.serving.remote`. Each request has a connection of its own, made before
any is sent, and reads a stream of server-sent events of `/v1/completions`, text and token ids.
"""

import asyncio
import gc
import json
import os
import random
import re
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, cast

from bench.serving.streams import Recorder, StreamLog, clock
from bench.serving.workload import Request, Workload

END_OF_EVENT = b"\n\n"
TOKENS = re.compile(rb'"token_ids":\s*\[([^\]]*)\]')
DONE = b"data: [DONE]"
MAX_ERROR = 2000


class HttpError(RuntimeError):
    """The server has answered with an error, or not to the end."""


def serve(connection: "Connection[Any, Any]", cores: set[int] | None) -> None:
    """Load servers until the pipe closes."""
    import uvloop

    if cores:
        os.sched_setaffinity(0, cores)
    gc.freeze()
    while True:
        try:
            number, name, arguments = connection.recv()
        except EOFError:
            return

        def notify(event: str, number: int = number) -> None:
            connection.send((number, "event", event))

        try:
            command = {"stream": stream_all, "join": join_all}[name]
            connection.send((number, "ok", uvloop.run(command(notify, **arguments))))
        except Exception:
            connection.send((number, "error", traceback.format_exc()))


async def stream_all(
    notify: Callable[[str], None],
    port: int,
    model: str,
    workload: Workload,
    part: int,
    num_parts: int,
    is_sampled: bool = False,
) -> dict[str, Any]:
    """Send this process's part of the requests; return logs and tokens.

    Tokens are there of requests that are sampled, each with a seed of its own.
    """
    numbered = list(enumerate(workload.requests()))[part::num_parts]
    requests = [request for _, request in numbered]
    seeds = [seed if is_sampled else None for seed, _ in numbered]
    recorder = Recorder(len(requests), notify)
    loop = asyncio.get_running_loop()
    streams = [
        CompletionStream(
            number, encode(request, model, seeds[number]), recorder, loop.create_future()
        )
        for number, request in enumerate(requests)
    ]
    await asyncio.gather(
        *(loop.create_connection(stream.itself, "127.0.0.1", port) for stream in streams)
    )
    for stream in streams:
        stream.send()
    await asyncio.gather(*(stream.done for stream in streams))
    tokens = [stream.tokens() for stream in streams] if is_sampled else []
    return {"logs": recorder.logs(), "tokens": tokens}


async def join_all(
    notify: Callable[[str], None], port: int, model: str, workload: Workload, seconds: float
) -> list[StreamLog]:
    """Send requests at random times within some seconds, the same each time; return their logs."""
    requests = workload.requests()
    chance = random.Random(workload.seed)
    recorder = Recorder(len(requests), notify=lambda event: None)
    loop = asyncio.get_running_loop()
    start_s = loop.time()

    async def join(number: int, request: Request, after_s: float) -> None:
        stream = CompletionStream(number, encode(request, model), recorder, loop.create_future())
        await asyncio.sleep(start_s + after_s - loop.time())
        await loop.create_connection(stream.itself, "127.0.0.1", port)
        stream.send()
        await stream.done

    await asyncio.gather(
        *(join(number, it, chance.uniform(0, seconds)) for number, it in enumerate(requests))
    )
    return recorder.logs()


def encode(request: Request, model: str, seed: int | None = None) -> bytes:
    """Return a request for `/v1/completions` as it is sent; it is sampled if it has a seed."""
    body = {
        "model": model,
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "temperature": 0 if seed is None else 1,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    if seed is not None:
        body["seed"] = seed
    content = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


class CompletionStream(asyncio.Protocol):
    """Sends one request and notes what the server streams."""

    def __init__(
        self, number: int, request: bytes, recorder: Recorder, done: "asyncio.Future[None]"
    ) -> None:
        """Prepare; `done` is set at the end of the stream, or gets an HttpError."""
        self.done = done
        self._number = number
        self._request = request
        self._recorder = recorder
        self._buffer = b""
        self._tokens: list[bytes] = []
        self._is_answered = False
        self._transport: asyncio.Transport | None = None

    def itself(self) -> "CompletionStream":
        """Return itself: a protocol's factory."""
        return self

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the connection."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass

    def tokens(self) -> list[int]:
        """Return the ids of all tokens that have come."""
        return [int(token) for it in self._tokens for token in it.split(b",")]

    def send(self) -> None:
        """Send the request."""
        assert self._transport is not None
        self._recorder.send(self._number)
        self._transport.write(self._request)

    def hang_up(self) -> None:
        """End the stream before its time: the server aborts the request."""
        self._finish(None)

    def data_received(self, data: bytes) -> None:
        """Note the events that are complete."""
        now = clock()
        *events, self._buffer = (self._buffer + data).split(END_OF_EVENT)
        if not self._is_answered and not self._check_status(events):
            return
        for event in events:
            # In front of it stands the size of its HTTP chunk.
            tokens = TOKENS.search(event)
            if tokens is not None:
                num_tokens = tokens[1].count(b",") + 1 if tokens[1] else 0
                if num_tokens:
                    self._tokens.append(tokens[1])
                    self._recorder.note(self._number, now, num_tokens)
            elif DONE in event:
                self._recorder.end(self._number)
                self._finish(None)
            elif b'"error"' in event:
                self._finish(HttpError(event[-MAX_ERROR:].decode(errors="replace")))

    def _check_status(self, events: list[bytes]) -> bool:
        head = events[0] if events else self._buffer
        if b"\r\n" not in head:
            return False
        self._is_answered = True
        if b" 200 " in head.partition(b"\r\n")[0]:
            return True
        self._finish(HttpError(head[-MAX_ERROR:].decode(errors="replace")))
        return False

    def connection_lost(self, error: Exception | None) -> None:
        """Fail if the stream has no end yet."""
        self._finish(HttpError(f"the server hung up: {error}"))

    def _finish(self, error: Exception | None) -> None:
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)
        assert self._transport is not None
        self._transport.close()
