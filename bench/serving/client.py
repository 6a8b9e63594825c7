"""A client over HTTP for loads that `vllm bench serve` can't send: one task for each request.

It streams `/v1/completions` of token ids, with as little work as possible around each output.
"""

import asyncio
import json
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

COUNT = re.compile(rb'"completion_tokens":\s*(\d+)')
IDS = re.compile(rb'"token_ids":\s*\[([^\]]+)\]')
DATA, DONE, ERROR = b"data: ", b"data: [DONE]", b'data: {"error"'
LONGEST_LINE = 2**24
"""Bytes. With `return_token_ids` the first event has the prompt in it."""


class RequestError(RuntimeError):
    """The server has answered with an error, or not to the end."""


@dataclass
class Reply:
    """What one request has brought so far. Times are of `time.perf_counter()`."""

    kind: str
    sent_at: float = 0.0
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """How many each output had."""
    ids: list[int] = field(default_factory=list)
    """The tokens, with `return_token_ids`."""
    has_ended: bool = False

    @property
    def ttft_s(self) -> float:
        """From sending it to its first token."""
        return self.times[0] - self.sent_at

    def gaps_ms(self, start: float = 0.0, end: float = float("inf")) -> list[float]:
        """Return the times between outputs that came between two moments."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return [1e3 * (now - before) for before, now in pairs if start <= now <= end]

    def tokens_between(self, start: float, end: float) -> int:
        """Return how many tokens came between two moments."""
        both = zip(self.times, self.tokens, strict=True)
        return sum(number for at, number in both if start < at <= end)


async def complete(
    port: int,
    model: str,
    prompt: str,
    max_tokens: int,
    reply: Reply,
    **more: Any,
) -> None:
    """Send a request and note its outputs until it has ended.

    Args:
        port: The server's, on this host.
        model: The name that it is served by.
        prompt: Token ids, joined by commas.
        max_tokens: All of them come: requests don't end before that.
        reply: What is filled.
        more: Other fields of the request.

    Raises:
        RequestError: if the server refuses it or breaks off.

    """
    fields = {"model": model, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    usage = {"include_usage": True, "continuous_usage_stats": True}
    fields |= {"stream": True, "stream_options": usage, **more}
    body = f'{json.dumps(fields)[:-1]}, "prompt": [{prompt}]}}'.encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=LONGEST_LINE)
    try:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        reply.sent_at = time.perf_counter()
        writer.write(head.encode() + body)
        status = await reader.readline()
        if b" 200 " not in status:
            raise RequestError((status + await reader.read(2000)).decode(errors="replace"))
        sum_of_tokens = 0
        while not (line := await reader.readline()).startswith(DONE):
            if not line:
                raise RequestError("the server has broken off")
            if line.startswith(ERROR):
                raise RequestError(line.decode(errors="replace"))
            if not line.startswith(DATA):
                continue
            count = COUNT.search(line)
            fresh = int(count[1]) - sum_of_tokens if count else 0
            if fresh > 0:
                reply.times.append(time.perf_counter())
                reply.tokens.append(fresh)
                sum_of_tokens += fresh
                # The last match: the prompt's ids come before the output's.
                if found := IDS.findall(line):
                    reply.ids += map(int, found[-1].split(b","))
        reply.has_ended = True
    finally:
        writer.close()


def percentiles(name: str, values: Iterable[float], *which: float) -> dict[str, float]:
    """Return metrics `NAME_p50`, `NAME_p99.9`, ... and `NAME_max`; none without values."""
    ordered = sorted(values)
    if not ordered:
        return {}
    last = len(ordered) - 1
    found = {f"{name}_p{it:g}": ordered[min(last, int(len(ordered) * it / 100))] for it in which}
    return found | {f"{name}_max": ordered[-1]}
