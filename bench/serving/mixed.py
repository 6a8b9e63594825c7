"""Measures who waits while a long prompt is computed beside streams.

A point has `streams`, `long` (tokens of the prompt) and `short_every` (seconds between short
requests of 100 tokens, which come all along). A round's metrics:

- `before_tokens_per_s`: of each stream, in the second before the long prompt comes.
- `stream_tokens_per_s`: of each stream, from the long prompt's arrival to its first token.
- `stream_tokens`: of all streams, from the long prompt's arrival on, in a time that is the same for
  all servers (`window_s`).
- `gap_ms`: between outputs of streams, until the long prompt's first token.
- `short_ttft_ms`, `long_ttft_s`: from sending a request to its first token.
"""

import asyncio
import random
import time
from typing import Any

from bench.serving.client import Reply, RequestError, complete, percentiles
from bench.serving.servers import Server

STREAM_PROMPT, SHORT_PROMPT, SHORT_OUTPUT, LONG_OUTPUT = 128, 100, 4, 8
SETTLE_S = 2.0
"""For how long streams decode before the long prompt comes."""
LATEST_S = 120.0
LINGER_S = 2.0
"""For how long short requests are waited for after the long prompt's first token."""


def measure(server: Server, point: dict[str, Any], seed: int) -> dict[str, float]:
    """Measure one round."""
    return asyncio.run(_Round(server, point, random.Random(seed)).run())


class _Round:
    def __init__(self, server: Server, point: dict[str, Any], chance: random.Random) -> None:
        self._server = server
        self._point = point
        self._chance = chance

    async def run(self) -> dict[str, float]:
        point = self._point
        streams: list[Reply] = []
        shorts: list[Reply] = []
        background = [
            self._send("stream", STREAM_PROMPT, point["stream_tokens"], streams)
            for _ in range(point["streams"])
        ]
        try:
            while not all(it.times for it in streams):
                _raise_failures(background)
                await asyncio.sleep(0.05)
            await asyncio.sleep(SETTLE_S)
            long: list[Reply] = []
            task = self._send("long", point["long"], LONG_OUTPUT, long)
            arrived = time.perf_counter()
            while not task.done() and time.perf_counter() - arrived < LATEST_S:
                await asyncio.wait([task], timeout=point["short_every"])
                if not task.done():
                    background.append(self._send("short", SHORT_PROMPT, SHORT_OUTPUT, shorts))
            await asyncio.wait_for(task, 1.0)
            left = point["window_s"] - (time.perf_counter() - arrived)
            await asyncio.sleep(max(LINGER_S, left))
            if any(it.has_ended for it in streams):
                raise RequestError("streams have ended too early: raise stream_tokens")
            _raise_failures(background)
        finally:
            for one in background:
                one.cancel()
            await asyncio.gather(*background, return_exceptions=True)
        return self._evaluate(streams, shorts, long[0], arrived)

    def _send(
        self, kind: str, length: int, max_tokens: int, replies: list[Reply]
    ) -> asyncio.Task[None]:
        server = self._server
        reply = Reply(kind)
        replies.append(reply)
        prompt = random_prompt(self._chance, server.model.vocab_size, length)
        return asyncio.create_task(
            complete(server.port, server.model.name, prompt, max_tokens, reply)
        )

    def _evaluate(
        self, streams: list[Reply], shorts: list[Reply], long: Reply, arrived: float
    ) -> dict[str, float]:
        first, number = long.times[0], len(streams)
        until = arrived + self._point["window_s"]
        during = sum(it.tokens_between(arrived, first) for it in streams)
        gaps = [gap for it in streams for gap in it.gaps_ms(arrived, first)]
        waits = [1e3 * it.ttft_s for it in shorts if it.times]
        # Those that have nothing yet have waited at least until now.
        waits += [1e3 * (time.perf_counter() - it.sent_at) for it in shorts if not it.times]
        before = sum(it.tokens_between(arrived - 1.0, arrived) for it in streams)
        return {
            "before_tokens_per_s": before / number,
            "stream_tokens_per_s": during / (first - arrived) / number,
            "stream_tokens": sum(it.tokens_between(arrived, until) for it in streams),
            "long_ttft_s": first - arrived,
            **percentiles("gap_ms", gaps, 50, 99),
            **percentiles("short_ttft_ms", waits, 50),
        }


def random_prompt(chance: random.Random, vocab_size: int, length: int) -> str:
    """Return token ids, joined by commas: none of the first and last ones, which may be special."""
    return ",".join(str(it) for it in chance.choices(range(3, vocab_size * 9 // 10), k=length))


def _raise_failures(tasks: list[asyncio.Task[None]]) -> None:
    for one in tasks:
        if one.done() and not one.cancelled():
            one.result()
