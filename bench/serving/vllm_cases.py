"""What `vllm bench` is asked to measure, as the result calls it: lengths of requests, and loads."""

import itertools
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from bench.serving.plan import ALL, ServerKey
from bench.serving.server import PYTHON, RUST

NUM_PREFIXES = 8
"""How many different ones the requests of a case share."""
ROOM = 64
"""How many more tokens than asked for a prompt may have, once it has been text."""
LEAST_PROMPTS = 32
"""Of a case whose requests come at a rate."""
LATENCY, THROUGHPUT = OFFLINE = ("latency", "throughput")
"""Commands that run the engine in a process of their own."""
NO_FRONT_END = "none"
_LENGTHS = re.compile(r"(?:(\d+)\+)?(\d+)/(\d+)")


class CaseError(ValueError):
    """A case has a name that means nothing."""


@dataclass(frozen=True)
class Lengths:
    """How many tokens a request has."""

    input_tokens: int
    """Of its own."""
    output_tokens: int
    prefix_tokens: int = 0
    """That it shares with others, before its own."""

    @classmethod
    def named(cls, name: str) -> "Lengths":
        """Return what names such as `1024/128` and `4096+256/128` mean.

        Raises:
            CaseError: if a name means nothing.

        """
        found = _LENGTHS.fullmatch(name)
        if found is None or not int(found[2]) or not int(found[3]):
            raise CaseError(f"{name!r} is no case: IN/OUT or SHARED+IN/OUT, in tokens")
        return cls(int(found[2]), int(found[3]), int(found[1] or 0))

    @property
    def name(self) -> str:
        """Return how it is written."""
        shared = f"{self.prefix_tokens}+" if self.prefix_tokens else ""
        return f"{shared}{self.input_tokens}/{self.output_tokens}"

    @property
    def max_context(self) -> int:
        """How many tokens a request may have at its end."""
        return self.prefix_tokens + self.input_tokens + self.output_tokens + ROOM


@dataclass(frozen=True)
class Wanted:
    """Lengths of requests, and the loads that they are to be measured with."""

    lengths: Lengths
    concurrencies: tuple[int, ...]
    rates: tuple[int, ...]
    """In percent of the rate that vLLM reaches."""

    @classmethod
    def named(cls, name: str, concurrencies: tuple[int, ...], rates: tuple[int, ...]) -> "Wanted":
        """Return what `1024/128` means, and `8192/256:64:80%`, which has loads of its own.

        Raises:
            CaseError: if a name means nothing.

        """
        lengths, *loads = name.split(":")
        if not loads:
            return cls(Lengths.named(lengths), concurrencies, rates)
        if wrong := [it for it in loads if not re.fullmatch(r"[1-9]\d*%?", it)]:
            raise CaseError(f"{wrong[0]!r} is no load: N at once, or P% of the rate vLLM reaches")
        return cls(
            Lengths.named(lengths),
            tuple(int(it) for it in loads if not it.endswith("%")),
            tuple(int(it[:-1]) for it in loads if it.endswith("%")),
        )


@dataclass(frozen=True)
class CaseKey:
    """One row of the result: one command on one engine.

    A command that measures a server has one of two loads: so many requests at once, each followed
    by another one, or requests that come at random at a share of the rate that vLLM's own scheduler
    reaches. `vllm bench latency` has one batch of so many requests.
    """

    server: ServerKey
    command: str
    lengths: str
    cores: str = ALL
    client: str = PYTHON
    concurrency: int | None = None
    rate_percent: int | None = None

    def as_row(self) -> dict[str, Any]:
        """Return it flat, as it stands in the result."""
        row = {name: value for name, value in vars(self).items() if name != "server"}
        return vars(self.server) | row

    @property
    def load(self) -> str:
        """What it is loaded with, in words."""
        if self.rate_percent is not None:
            return f"{self.rate_percent} % of vLLM's rate"
        return "" if self.concurrency is None else f"{self.concurrency:,} at once"

    @property
    def label(self) -> str:
        """What to call it in a progress bar."""
        rust = ", Rust front end" if self.server.front_end == RUST else ""
        cores = "" if self.cores == ALL else f", {self.cores} cores"
        command = "" if self.command == SERVE else f"{self.command} "
        load = f", {self.load}" if self.load else ""
        return (
            f"{self.server.model} {self.server.scheduler}{rust}{cores}: "
            f"{command}{self.lengths}{load}"
        )

    def seed(self, *more: Any) -> int:
        """Return a seed for prompts that no other case has, but the other scheduler's same one."""
        about = (self.command, self.lengths, self.cores, self.concurrency, self.rate_percent, more)
        return zlib.crc32(repr(about).encode()) >> 1


SERVE = "serve"


@dataclass(frozen=True)
class Plan:
    """What is asked for, of one model."""

    model: str
    mode: str
    schedulers: tuple[str, ...]
    front_ends: tuple[str, ...]
    wanted: tuple[Wanted, ...]
    cores: tuple[str, ...] = (ALL,)
    offline: tuple[str, ...] = ()
    batch: int = 8
    """Of `vllm bench latency`."""
    client: str = PYTHON

    def servers(self) -> Iterator[ServerKey]:
        """Yield the servers in the order in which they are to be started.

        vLLM's own comes before ours, which is then given the same rates.
        """
        for front_end, scheduler in itertools.product(self.front_ends, self.schedulers):
            yield ServerKey(self.model, scheduler, self.mode, front_end)

    def cases(self, server: ServerKey) -> Iterator[CaseKey]:
        """Yield a server's cases; those whose rate is measured before those that are given one."""
        ordered = sorted(self.cores, key=lambda it: -float("inf") if it == ALL else -int(it))
        for cores, wanted in itertools.product(ordered, self.wanted):
            case = CaseKey(server, SERVE, wanted.lengths.name, cores, self.client)
            yield from (replace(case, concurrency=it) for it in wanted.concurrencies)
            yield from (replace(case, rate_percent=it) for it in wanted.rates)

    def offline_cases(self) -> Iterator[CaseKey]:
        """Yield the cases that need no server."""
        for command, wanted in itertools.product(self.offline, self.wanted):
            if wanted.lengths.prefix_tokens:
                continue  # neither command has them
            batch = self.batch if command == LATENCY else None
            for scheduler in self.schedulers:
                server = ServerKey(self.model, scheduler, self.mode, NO_FRONT_END)
                yield CaseKey(server, command, wanted.lengths.name, concurrency=batch)

    @property
    def most_at_once(self) -> int:
        """The most requests that are to run at once."""
        counts = itertools.chain.from_iterable(it.concurrencies for it in self.wanted)
        return max((*counts, self.batch))


def num_prompts(case: CaseKey, times: float, least: int = LEAST_PROMPTS) -> int:
    """Return how many requests a case has: so many times those at once, or so many.

    There are as many with each of the shared prefixes.
    """
    count = max(least, round(times * (case.concurrency or 1)))
    return -(-count // NUM_PREFIXES) * NUM_PREFIXES
