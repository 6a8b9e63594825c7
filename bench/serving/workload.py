"""The requests that a server is given: always the same of a specification."""

import random
import zlib
from dataclasses import dataclass, replace
from typing import Any

NUM_RESERVED = 3
"""Ids that no prompt uses; the first ones are special tokens in many vocabularies."""


@dataclass(frozen=True)
class Request:
    """Token ids in, and how many come out: requests don't end before that."""

    prompt: list[int]
    max_tokens: int


@dataclass(frozen=True)
class Workload:
    """A set of requests that are sent all at once, their lengths evenly between two bounds."""

    num_requests: int
    vocab_size: int
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    seed: int = 0

    def seeded(self, *what: Any) -> "Workload":
        """Return the same with other prompts: no two rounds share a prefix by accident."""
        seed = zlib.crc32(repr((self.num_requests, *what)).encode())
        return replace(self, seed=seed)

    def shortened(self, output_tokens: int) -> "Workload":
        """Return the same with shorter outputs, for a warm-up."""
        first, last = self.output_tokens
        bounds = (min(first, output_tokens), min(last, output_tokens))
        return replace(self, output_tokens=bounds)

    @property
    def lengths(self) -> dict[str, tuple[int, int]]:
        """What a row tells of them: others don't compare with it."""
        return {"prompt_tokens": self.prompt_tokens, "output_tokens": self.output_tokens}

    @property
    def max_context(self) -> int:
        """Tokens that the longest request may come to have."""
        return self.prompt_tokens[1] + self.output_tokens[1]

    def requests(self) -> list[Request]:
        """Return the requests."""
        source = random.Random(self.seed)
        requests: list[Request] = []
        for _ in range(self.num_requests):
            prompt = self._tokens(source, source.randint(*self.prompt_tokens))
            requests.append(Request(prompt, source.randint(*self.output_tokens)))
        return requests

    def _tokens(self, source: random.Random, count: int) -> list[int]:
        # Special tokens are the last ones of a vocabulary, if not the first.
        last = max(NUM_RESERVED + 1, self.vocab_size * 9 // 10)
        return source.choices(range(NUM_RESERVED, last), k=count)
