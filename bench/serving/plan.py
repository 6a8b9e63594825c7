"""Which cells are to be measured, and in which order: servers are started as seldom as possible."""

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from bench.serving.drivers import HTTP
from bench.serving.models import Model
from bench.serving.server import PYTHON, RUST
from bench.serving.workload import Workload

ALL = "all"
"""All processors."""

PROMPT_TOKENS = 128
OUTPUT_TOKENS = ((8, 768), (64, 384), (256, 256), (1 << 30, 192))
"""Up to so many streams: so many tokens each. Few streams take more steps to the same figure."""
QUICK_TOKENS = 48


@dataclass(frozen=True)
class ServerKey:
    """One start of a server."""

    model: str
    scheduler: str
    mode: str
    front_end: str = PYTHON


@dataclass(frozen=True)
class CellKey:
    """One row of the result."""

    server: ServerKey
    cores: str
    concurrency: int
    driver: str

    def as_row(self) -> dict[str, Any]:
        """Return it flat, as it stands in the result."""
        row = asdict(self)
        server: dict[str, Any] = row.pop("server")
        return server | row

    @property
    def label(self) -> str:
        """What to call it in a progress bar."""
        cores = "" if self.cores == ALL else f", {self.cores} cores"
        rust = ", Rust front end" if self.server.front_end == RUST else ""
        return (
            f"{self.server.model} {self.server.scheduler} {self.server.mode}{rust}{cores}: "
            f"{self.concurrency:,} over {self.driver}"
        )


@dataclass(frozen=True)
class Plan:
    """What is asked for."""

    models: tuple[str, ...]
    schedulers: tuple[str, ...]
    modes: tuple[str, ...]
    cores: tuple[str, ...]
    concurrencies: tuple[int, ...]
    drivers: tuple[str, ...]
    front_ends: tuple[str, ...] = (PYTHON,)
    output_tokens: int | None = None
    """Of each stream; None: by concurrency."""
    is_quick: bool = False
    compares_streams: bool = False
    takes_turns: bool = False
    """Whether servers that differ in nothing but the scheduler run side by side."""

    def servers(self) -> Iterator[ServerKey]:
        """Yield the servers in the order in which they are to be started."""
        whole = itertools.product(self.models, self.modes, self.front_ends, self.schedulers)
        for model, mode, front_end, scheduler in whole:
            yield ServerKey(model, scheduler, mode, front_end)

    def groups(self) -> Iterator[list[ServerKey]]:
        """Yield the servers, those together that run side by side."""
        keys = list(self.servers())
        size = len(self.schedulers) if self.takes_turns else 1
        yield from (keys[at : at + size] for at in range(0, len(keys), size))

    def cells(self, server: ServerKey) -> Iterator[CellKey]:
        """Yield a server's cells; it is confined to fewer and fewer processors.

        There is no `AsyncLLM` in a front end in Rust.
        """
        drivers = self.drivers if server.front_end == PYTHON else (HTTP,)
        cells = itertools.product(self._ordered_cores(), self.concurrencies, drivers)
        for cores, count, driver in cells:
            yield CellKey(server, cores, count, driver)

    def _ordered_cores(self) -> list[str]:
        return sorted(self.cores, key=lambda it: -float("inf") if it == ALL else -int(it))

    @property
    def max_num_seqs(self) -> int:
        """The most requests that run at once."""
        return max(*self.concurrencies, 8)

    def workload(self, concurrency: int, model: Model) -> Workload:
        """Return the requests of a cell: all of the same lengths."""
        tokens = self.output_tokens or self._default_tokens(concurrency)
        prompt = (PROMPT_TOKENS, PROMPT_TOKENS)
        return Workload(concurrency, model.vocab_size, prompt, (tokens, tokens))

    def compared_workload(self, model: Model, streams: int, tokens: int) -> Workload:
        """Return the requests whose tokens are compared, of different lengths."""
        bounds = (min(10, tokens), tokens)
        return Workload(streams, model.vocab_size, (16, PROMPT_TOKENS), bounds)

    def _default_tokens(self, concurrency: int) -> int:
        if self.is_quick:
            return QUICK_TOKENS
        return next(tokens for most, tokens in OUTPUT_TOKENS if concurrency <= most)
