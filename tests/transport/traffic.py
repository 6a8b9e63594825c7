"""Requests of all kinds at random moments, whose streams are checked to the token."""

import asyncio
import enum
import itertools
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from engine.harness import new_request
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from testkit.device import EOS_TOKEN_ID, continuation

TIMEOUT_S = 60.0
NUM_PREFIXES = 8
LAST_PROMPT_TOKEN = 199
STOP_STRING = "e"


class Fate(enum.Enum):
    """How the client of a request behaves."""

    STAYS = "reads to the end"
    LEAVES = "goes away"
    ABORTS = "aborts"
    ABORTS_TWICE = "aborts twice"
    ABORTS_WHEN_DONE = "aborts what has ended"


FATES = {
    Fate.STAYS: 12,
    Fate.LEAVES: 3,
    Fate.ABORTS: 2,
    Fate.ABORTS_TWICE: 1,
    Fate.ABORTS_WHEN_DONE: 1,
}


@dataclass(frozen=True)
class Plan:
    """A request, and what its client will do."""

    request_id: str
    prompt: list[int]
    max_tokens: int
    num_sequences: int
    stop: str | None
    stop_token_ids: list[int]
    ignore_eos: bool
    priority: int
    fate: Fate
    num_tokens_to_fate: int
    """All sequences together. At 0 the fate doesn't wait: it comes while the request is on its
    way, in the queue or in its first step."""

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens,
            n=self.num_sequences,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            detokenize=self.stop is not None,
            output_kind=RequestOutputKind.DELTA,
        )

    @property
    def is_interrupted(self) -> bool:
        return self.fate in (Fate.LEAVES, Fate.ABORTS, Fate.ABORTS_TWICE)

    def expected(self, tokenizer: Any) -> tuple[list[int], str]:
        """Return each sequence's tokens, and why it ends."""
        # Whether a text holds the stop string is for vLLM to say: few of these are valid UTF-8.
        request = new_request("", self.prompt, self.max_tokens, stop=self.stop)
        detokenizer = IncrementalDetokenizer.from_new_request(
            tokenizer if self.stop is not None else None, request
        )
        stops = {*self.stop_token_ids, *([] if self.ignore_eos else [EOS_TOKEN_ID])}
        tokens: list[int] = []
        for token in itertools.islice(continuation(self.prompt), self.max_tokens):
            tokens.append(token)
            if detokenizer.update([token], token in stops) or token in stops:
                return tokens, "stop"
        return tokens, "length"


def plans(rng: random.Random, name: str) -> Iterator[Plan]:
    """Think of requests without end."""
    prefixes = [_tokens(rng, 10 * index) for index in range(NUM_PREFIXES)]
    number = 0
    while True:
        (fate,) = rng.choices(list(FATES), list(FATES.values()))
        # vLLM's front end keeps the parent of sequences for ever if they are aborted by its id.
        weights = [1, 0, 0] if fate in (Fate.ABORTS, Fate.ABORTS_TWICE) else [10, 1, 1]
        yield Plan(
            request_id=f"{name}-{number}",
            prompt=rng.choice(prefixes) + _tokens(rng, rng.randint(1, 40)),
            max_tokens=rng.choice([1, 2, 5, 10, 20, 40]),
            num_sequences=rng.choices([1, 2, 3], weights)[0],
            stop=STOP_STRING if rng.random() < 0.2 else None,
            stop_token_ids=rng.sample(range(256), 10) if rng.random() < 0.2 else [],
            ignore_eos=rng.random() < 0.2,
            priority=rng.choice([0, 0, 1, 5]),
            fate=fate,
            num_tokens_to_fate=rng.choice([0, 0, 1, 2, 5, 10]),
        )
        number += 1


def _tokens(rng: random.Random, length: int) -> list[int]:
    return [rng.randint(0, LAST_PROMPT_TOKEN) for _ in range(length)]


@dataclass
class Seen:
    """What a client saw of a request: tokens and ends of each of its sequences."""

    tokens: list[list[int]]
    ends: list[list[str]]
    is_cached: bool = False

    @classmethod
    def nothing(cls, num_sequences: int) -> "Seen":
        return cls([[] for _ in range(num_sequences)], [[] for _ in range(num_sequences)])

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))

    def add(self, output: RequestOutput) -> None:
        self.is_cached |= bool(output.num_cached_tokens)
        for completion in output.outputs:
            self.tokens[completion.index].extend(completion.token_ids)
            if completion.finish_reason is not None:
                self.ends[completion.index].append(completion.finish_reason)


@dataclass
class Traffic:
    """Clients of one front end."""

    llm: AsyncLLM
    rng: random.Random
    name: str
    counts: Counter[str] = field(default_factory=Counter)
    """What has happened, so that a test can tell that it has tested something."""

    def __post_init__(self) -> None:
        self._plans = plans(self.rng, self.name)
        # Pauses that abort all requests.
        self._num_massacres_begun = 0
        self._num_massacres_over = 0

    async def run(self, num_requests: int) -> None:
        """Let requests come and go until so many have come and all are gone."""
        clients: set[asyncio.Task[None]] = set()
        num_left = num_requests
        while num_left:
            burst = min(num_left, self.rng.choice([1, 1, 4, 16, 64]))
            num_left -= burst
            clients |= {
                asyncio.create_task(self._be_client(next(self._plans))) for _ in range(burst)
            }
            if self.rng.random() < 0.05:
                clients.add(asyncio.create_task(self._disturb(self.rng.randrange(8))))
            max_waiting = self.rng.choice([0, 16, 64])
            async with asyncio.timeout(TIMEOUT_S):
                while len(clients) > max_waiting:
                    done, clients = await asyncio.wait(clients, return_when=asyncio.FIRST_COMPLETED)
                    for client in done:
                        client.result()
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.gather(*clients)

    async def _be_client(self, plan: Plan) -> None:
        seen = Seen.nothing(plan.num_sequences)
        num_massacres_over = self._num_massacres_over
        if plan.is_interrupted and plan.num_tokens_to_fate == 0:
            await self._interrupt_at_once(plan, seen)
        else:
            await self._read(plan, seen)
        self._check(plan, seen, is_massacred=self._num_massacres_begun > num_massacres_over)
        if plan.fate is Fate.ABORTS_WHEN_DONE:
            await self.llm.abort(plan.request_id)
        self.counts["requests"] += 1
        self.counts["tokens"] += seen.num_tokens
        self.counts["prefix hits"] += seen.is_cached
        self.counts["sequences"] += plan.num_sequences
        self.counts.update(end for ends in seen.ends for end in ends or ["left"])

    async def _interrupt_at_once(self, plan: Plan, seen: Seen) -> None:
        reading = asyncio.create_task(self._read(plan, seen))
        for _ in range(len(plan.prompt) % 5):
            await asyncio.sleep(0)
        self.counts["interrupted before a token"] += not seen.num_tokens
        if plan.fate is Fate.LEAVES:
            reading.cancel()
            await asyncio.wait([reading])
            if not reading.cancelled():
                reading.result()
        else:
            await self._abort(plan)
            await reading

    async def _read(self, plan: Plan, seen: Seen) -> None:
        prompt = {"type": "token", "prompt_token_ids": plan.prompt}
        stream = self.llm.generate(prompt, plan.params, plan.request_id, priority=plan.priority)
        is_pending = plan.is_interrupted and plan.num_tokens_to_fate > 0
        async for output in stream:
            seen.add(output)
            if is_pending and seen.num_tokens >= plan.num_tokens_to_fate:
                is_pending = False
                if plan.fate is Fate.LEAVES:
                    await stream.aclose()
                    return
                await self._abort(plan)

    async def _abort(self, plan: Plan) -> None:
        internal = list(self.llm.output_processor.external_req_ids.get(plan.request_id, []))
        await self.llm.abort(plan.request_id)
        if plan.fate is Fate.ABORTS_TWICE:
            await self.llm.abort([plan.request_id] * 2)
            # The front end has forgotten it by now; this tells the engine again.
            await self.llm.engine_core.abort_requests_async(internal * 2)

    def _check(self, plan: Plan, seen: Seen, is_massacred: bool) -> None:
        tokens, reason = plan.expected(self.llm.tokenizer)
        for theirs, ends in zip(seen.tokens, seen.ends, strict=True):
            assert theirs == tokens[: len(theirs)], (plan, seen)
            match ends:
                case []:
                    assert plan.fate is Fate.LEAVES, (plan, seen)
                case ["abort"]:
                    assert plan.is_interrupted or is_massacred, (plan, seen)
                case _:
                    assert ends == [reason], (plan, seen)
                    assert len(theirs) == len(tokens), (plan, seen)

    async def _disturb(self, number: int) -> None:
        """Do what an operator may do at any time."""
        llm = self.llm
        match number:
            case 0 | 1:
                reset = await llm.reset_prefix_cache(reset_running_requests=number == 1)
                self.counts["resets"] += reset
            case 2 | 3 | 4:
                await self._pause(("keep", "wait", "abort")[number - 2])
            case 5:
                assert await llm.collective_rpc("echo", args=("text",)) == ["text"]
            case 6:
                assert await llm.is_sleeping() is False
            case _:
                await llm.check_health()
        self.counts["disturbances"] += 1

    async def _pause(self, mode: Any) -> None:
        self._num_massacres_begun += mode == "abort"
        await self.llm.pause_generation(mode=mode)
        self._num_massacres_over += mode == "abort"
        await asyncio.sleep(0.01)
        await self.llm.resume_generation()
        self.counts["pauses"] += 1
