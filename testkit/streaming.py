"""Streams completions from a server, many at once, and records what came and when."""

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import httpx

TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Prompt:
    """A request as a user would send it: text or token ids, and how much may come back."""

    content: str | list[int] | list[list[int]]
    max_tokens: int
    extra: dict[str, Any] = field(default_factory=dict)
    path: ClassVar[str] = "/v1/completions"

    def body(self, model: str) -> dict[str, Any]:
        """Return the JSON body of a greedy, streamed completion request."""
        return {
            "model": model,
            "prompt": self.content,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **self.extra,
        }


@dataclass
class Completion:
    """What the server streamed for one prompt."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    prompt_token_ids: list[int] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    first_token_s: float | None = None  # since the request was sent
    gaps_s: list[float] = field(default_factory=list)  # between chunks that carry tokens
    logprobs: list[dict[str, float]] = field(default_factory=list)  # by token, for each position

    @property
    def outcome(self) -> tuple[list[int], str, str | None]:
        """What two servers that decide alike must agree on."""
        return self.token_ids, self.text, self.finish_reason


def mixed_prompts(count: int, *, vocab_size: int) -> list[Prompt]:
    """Return prompts of a few to several hundred tokens; half of them share a long prefix."""
    rng = random.Random(0)

    def tokens(length: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(length)]

    prefix = tokens(160)
    prompts: list[Prompt] = []
    for index in range(count):
        own = tokens(rng.choice((3, 17, 64, 130, 400)))
        content = prefix + own if index % 2 else own
        prompts.append(Prompt(content, max_tokens=rng.choice((8, 24, 48, 96))))
    return prompts


async def stream_all(base_url: str, model: str, prompts: Sequence[Prompt]) -> list[Completion]:
    """Send all prompts at once; return their completions in the order of the prompts."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=base_url, timeout=TIMEOUT_S, limits=limits) as client:
        return await asyncio.gather(*(stream_one(client, model, prompt) for prompt in prompts))


async def stream_one(client: httpx.AsyncClient, model: str, prompt: Prompt) -> Completion:
    """Send one prompt and read its completion to the end."""
    completion = Completion()
    sent_at = time.perf_counter()
    last_at: float | None = None
    async for chunk in stream_chunks(client, model, prompt):
        now = time.perf_counter()
        if _absorb(completion, chunk):
            if last_at is None:
                completion.first_token_s = now - sent_at
            else:
                completion.gaps_s.append(now - last_at)
            last_at = now
    return completion


async def stream_chunks(
    client: httpx.AsyncClient, model: str, prompt: Prompt
) -> AsyncGenerator[dict[str, Any]]:
    """Yield the server-sent events of one completion; leaving the loop early disconnects."""
    async with client.stream("POST", prompt.path, json=prompt.body(model)) as response:
        if response.is_error:
            body = (await response.aread()).decode(errors="replace")
            raise RuntimeError(f"the server answered {response.status_code}: {body}")
        async for line in _lines(response):
            if not line.startswith(b"data: "):
                continue
            data = line.removeprefix(b"data: ")
            if data == b"[DONE]":
                return
            chunk = json.loads(data)
            if "error" in chunk:
                raise RuntimeError(f"the stream ended with an error: {chunk['error']}")
            yield chunk
    raise RuntimeError("the stream ended without [DONE]")


async def _lines(response: httpx.Response) -> AsyncGenerator[bytes]:
    """Yield the lines; httpx's own end at U+0085 and U+2028, too, which may stand in JSON."""
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line


def _absorb(completion: Completion, chunk: dict[str, Any]) -> bool:
    """Add a chunk to the completion; return whether it carried tokens."""
    completion.usage = chunk.get("usage") or completion.usage
    has_tokens = False
    for choice in chunk["choices"]:
        token_ids = choice.get("token_ids") or []
        has_tokens = has_tokens or bool(token_ids)
        completion.token_ids += token_ids
        completion.text += choice["text"]
        completion.finish_reason = choice.get("finish_reason") or completion.finish_reason
        completion.logprobs += (choice.get("logprobs") or {}).get("top_logprobs", [])
        completion.prompt_token_ids = choice.get("prompt_token_ids") or completion.prompt_token_ids
    return has_tokens
