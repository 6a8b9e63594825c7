"""Recorded coding agents beside chats, in a closed loop.

Each agent goes through recorded sessions, one after the other: it sends a request, waits for the
reply, pauses as long as it was recorded, 8 s at most, and sends the next one. Chats send 300 tokens
and get 200, with a second between. A round of a server goes on where its last one has ended, so
that prefixes stay cached; replies under way at its end are given up, and asked for again. So it
begins with a burst that no users would make: each client begins at a random moment of its first
seconds, and what is sent then doesn't count.

`--trace FILE` names the recording, of one of two published forms:

- kv-cache-tester: a list of sessions `{id, tool, sys, r: [{i, o, th, h}]}`, with blocks of 64
  tokens. Sessions whose tools and system prompt have the same size have them in common.
- Mooncake: a line a request, `{timestamp, input_length, output_length, hash_ids}`, with blocks of
  512 tokens. A request that begins with all whole blocks of an earlier one continues its session.

A point has `agents`, `chats`, `round_s`, `warm_up_s`, `begin_s` and `max_input`. A round's metrics,
with `KIND` being `agent` or `chat`:

- `KIND_ttft_s`
- `KIND_gap_ms`: between outputs; `KIND_longest_gap_ms`: the longest one of each reply.
- `KIND_tokens_per_s`: of each reply, the median.
- `tokens_per_s`, `cached_share`, `preempted`: of the server.

    python -m bench.serving.agents --trace FILE [options of bench.serving]
"""

import asyncio
import gzip
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.serving.client import Reply, complete, percentiles
from bench.serving.mixed import random_prompt
from bench.serving.servers import Server

AGENT, CHAT = KINDS = ("agent", "chat")
LONGEST_PAUSE_S = 8.0
LONGEST_OUTPUT = 1500
CHAT_INPUT, CHAT_OUTPUT, CHAT_PAUSE_S = 300, 200, 1.0
WAITING_S = 1.0
"""A request without a token at the end of a round counts if it has waited so long."""
FEWEST_REQUESTS = 3
"""Of a session of Mooncake's."""
PREPARED_SESSIONS = 4
"""Of each agent: their text is made up before the first round, not while gaps are measured."""

_texts: dict[Hashable, str] = {}
"""Of blocks, by what they are: the same for all servers."""


@dataclass(frozen=True)
class Request:
    """What was recorded of one request."""

    blocks: tuple[Hashable, ...]
    """Equal ones have equal text, and so has all that precedes them."""
    input: int
    output: int
    pause_s: float
    """Before it."""


@dataclass(frozen=True)
class Session:
    """Requests of which each waits for the one before."""

    block_size: int
    requests: list[Request] = field(default_factory=list)


def read(path: Path) -> list[Session]:
    """Return the sessions of a recording of either form, `.gz` or not."""
    text = (gzip.open if path.suffix == ".gz" else open)(path, "rt").read()
    if text.lstrip().startswith("["):
        return [_agents_session(it) for it in json.loads(text)]
    return _mooncake_sessions([json.loads(it) for it in text.splitlines()])


def _agents_session(found: dict[str, Any]) -> Session:
    common = (found["tool"] + found["sys"]) // 64
    session = Session(64)
    for it in found["r"]:
        blocks = tuple(
            (found["tool"], found["sys"], block) if block <= common else (found["id"], block)
            for block in it["h"]
        )
        session.requests.append(Request(blocks, it["i"], it["o"], it["th"]))
    return session


def _mooncake_sessions(lines: list[dict[str, Any]]) -> list[Session]:
    sessions: list[Session] = []
    ends: dict[int, tuple[Session, float]] = {}
    """By the last whole block of its last request; with when that came."""
    for it in lines:
        ids, at = it["hash_ids"], it["timestamp"] / 1000
        known = next((block for block in reversed(ids) if block in ends), None)
        session, before = (Session(512), at) if known is None else ends.pop(known)
        if known is None:
            sessions.append(session)
        session.requests.append(
            Request(tuple(ids), it["input_length"], it["output_length"], at - before)
        )
        whole = it["input_length"] // 512
        if whole:
            ends[ids[whole - 1]] = session, at
    return [it for it in sessions if len(it.requests) >= FEWEST_REQUESTS]


def measure(server: Server, point: dict[str, Any], seed: int) -> dict[str, float]:
    """Measure one round; the first one of a server begins the sessions."""
    name = f"{point['agents']} agents"
    if name not in server.memory:
        server.memory[name] = _Load(server, point, seed)
    load: _Load = server.memory[name]
    return asyncio.run(load.round(point["warm_up_s"] if point["is_warm_up"] else point["round_s"]))


class _Load:
    """The agents and chats of one server."""

    def __init__(self, server: Server, point: dict[str, Any], seed: int) -> None:
        self._server = server
        self._point = point
        sessions = read(Path(point["trace"]))
        # The same sessions in the same order for each server.
        random.Random(point["agents"]).shuffle(sessions)
        prepared = itertools.islice(itertools.cycle(sessions), PREPARED_SESSIONS * point["agents"])
        for number, session in enumerate(prepared):
            for request in session.requests:
                if request.input <= point["max_input"]:
                    self._prompt(session, request, number // len(sessions))
        self._agents = [self._requests(sessions, number) for number in range(point["agents"])]
        self._next = [next(it) for it in self._agents]
        self._chance = random.Random(seed)

    def _requests(self, sessions: list[Session], number: int) -> Iterator[tuple[str, Request]]:
        """Yield an agent's prompts and requests: of every so many sessions, for ever."""
        step, limit = self._point["agents"], self._point["max_input"]
        for turn in itertools.count():
            index = number + turn * step
            session = sessions[index % len(sessions)]
            requests = list(itertools.takewhile(lambda it: it.input <= limit, session.requests))
            # The first one is joined at any place of its first half, so that not all are short.
            place = random.Random(index).randrange(max(1, len(requests) // 2))
            for request in requests[0 if turn else place :]:
                # A session that comes again is another one.
                yield self._prompt(session, request, index // len(sessions)), request

    def _prompt(self, session: Session, request: Request, repeated: int) -> str:
        texts = []
        left = request.input
        for block in request.blocks:
            if left <= 0:
                break
            size = min(left, session.block_size)
            key = (block, repeated, size)
            if key not in _texts:
                # A block that is cut off begins as the whole one.
                chance = random.Random(f"{block} {repeated}")
                _texts[key] = random_prompt(chance, self._server.model.vocab_size, size)
            texts.append(_texts[key])
            left -= size
        return ",".join(texts)

    async def round(self, seconds: float) -> dict[str, float]:
        replies: list[Reply] = []
        tasks = [
            *(asyncio.create_task(self._agent(it, replies)) for it in range(len(self._agents))),
            *(asyncio.create_task(self._chat(replies)) for _ in range(self._point["chats"])),
        ]
        try:
            await _let_run(tasks, self._point["begin_s"])
            before = await asyncio.to_thread(self._server.counters)
            start = time.perf_counter()
            await _let_run(tasks, seconds)
            end = time.perf_counter()
            after = await asyncio.to_thread(self._server.counters)
        finally:
            for one in tasks:
                one.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        delta = {name: after[name] - before.get(name, 0.0) for name in after}
        return self._evaluate(replies, start, end) | _of_server(delta)

    async def _begin(self) -> None:
        await asyncio.sleep(self._chance.uniform(0, self._point["begin_s"]))

    async def _agent(self, number: int, replies: list[Reply]) -> None:
        await self._begin()
        while True:
            prompt, request = self._next[number]
            wanted = max(1, min(request.output, LONGEST_OUTPUT))
            await self._ask(prompt, wanted, AGENT, replies)
            self._next[number] = prompt, request = next(self._agents[number])
            await asyncio.sleep(min(LONGEST_PAUSE_S, request.pause_s))

    async def _chat(self, replies: list[Reply]) -> None:
        await self._begin()
        while True:
            prompt = random_prompt(self._chance, self._server.model.vocab_size, CHAT_INPUT)
            await self._ask(prompt, CHAT_OUTPUT, CHAT, replies)
            await asyncio.sleep(CHAT_PAUSE_S)

    async def _ask(self, prompt: str, output: int, kind: str, replies: list[Reply]) -> None:
        reply = Reply(kind)
        replies.append(reply)
        server = self._server
        await complete(server.port, server.model.name, prompt, output, reply)

    def _evaluate(self, replies: list[Reply], start: float, end: float) -> dict[str, float]:
        tokens = sum(it.tokens_between(start, end) for it in replies)
        metrics = {"tokens_per_s": tokens / (end - start)}
        for kind in KINDS:
            of_kind = [it for it in replies if it.kind == kind and it.sent_at]
            gaps = [it.gaps_ms(start, end) for it in of_kind]
            chosen = [it for it in of_kind if it.sent_at >= start]
            waits = [it.ttft_s for it in chosen if it.times]
            silent = (end - it.sent_at for it in chosen if not it.times)
            waits += [waited for waited in silent if waited > WAITING_S]
            every = itertools.chain.from_iterable(gaps)
            longest = [max(it) for it in gaps if it]
            speeds = [
                sum(it.tokens[1:]) / (it.times[-1] - it.times[0])
                for it in chosen
                if len(it.times) > 20
            ]
            metrics |= percentiles(f"{kind}_ttft_s", waits, 50, 90, 99)
            metrics |= percentiles(f"{kind}_gap_ms", every, 50, 90, 99, 99.9)
            metrics |= percentiles(f"{kind}_longest_gap_ms", longest, 50, 90)
            metrics[f"{kind}_replies"] = sum(it.has_ended for it in chosen)
            if speeds:
                metrics[f"{kind}_tokens_per_s"] = statistics.median(speeds)
        return metrics


async def _let_run(tasks: list[asyncio.Task[None]], seconds: float) -> None:
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for one in done:
        one.result()


def _of_server(delta: dict[str, float]) -> dict[str, float]:
    found = {"preempted": delta["preempted"]} if "preempted" in delta else {}
    if delta.get("queried"):
        found["cached_share"] = delta["cached"] / delta["queried"]
    return found


if __name__ == "__main__":
    from bench.serving.__main__ import main

    sys.exit(main(["large", "--points=4 agents,9 agents,16 agents", *sys.argv[1:]]))
