"""Which schedulers a test has built: that decides what its passing says."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sparksched import compat

from . import names


@dataclass
class Census:
    """Schedulers that were built since the last reset."""

    num_native: int = 0
    num_stock: int = 0
    refused: list[str] = field(default_factory=list)
    """What sparksched has left to vLLM's, by the names that its warnings give."""
    is_paused: bool = False

    def reset(self) -> None:
        """Start a new test."""
        self.num_native = self.num_stock = 0
        self.refused = []

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the schedulers of vLLM's that are built here: they decide nothing."""
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False


CENSUS = Census()
IN_ENGINES = Census(num_native=1)
"""Of engines, which raise an error where a scheduler would fall back (`SPARKSCHED_STRICT`)."""


def start() -> None:
    """Count from now on, in this process, whoever builds a scheduler."""
    _count_stock_schedulers()
    _note_refusals()


def _count_stock_schedulers() -> None:
    build = names.Scheduler.__init__

    @functools.wraps(build)
    def counting_init(self: Any, *args: Any, **kwargs: Any) -> None:
        CENSUS.num_stock += not CENSUS.is_paused
        build(self, *args, **kwargs)

    names.Scheduler.__init__ = counting_init


def _note_refusals() -> None:
    refuse = compat.refuse

    def noting_refuse(problem: compat.Unsupported) -> None:
        CENSUS.refused.append(problem.feature)
        refuse(problem)

    compat.refuse = noting_refuse
