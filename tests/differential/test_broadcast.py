"""A step's `SchedulerOutput` goes to workers in other processes: pickled, and whole, as vLLM's."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from testkit.worlds.world import (
    NAMED_SETTINGS,
    CandidateChooser,
    Configuration,
    SchedulerClass,
    sparksched_scheduler_class,
    stock_scheduler_class,
)

from .runner import run_scenario

NUM_SEEDS = 2
NUM_STEPS = 120
MOST_TIMES_STOCK = 1.05


def broadcasting(scheduler_class: SchedulerClass, sizes: list[int]) -> SchedulerClass:
    """Return a scheduler whose outputs have been in a message, as vLLM's executors make them."""

    class Broadcasting(scheduler_class):  # type: ignore[misc, valid-type]
        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            message = pickle.dumps(super().schedule(*args, **kwargs), pickle.HIGHEST_PROTOCOL)
            sizes.append(len(message))
            return pickle.loads(message)

    return Broadcasting


def broadcast(name: str, seed: int, choose: CandidateChooser) -> list[int]:
    """Run a scenario with broadcast outputs; return their sizes in bytes."""
    sizes: list[int] = []

    def candidate(configuration: Configuration) -> SchedulerClass:
        return broadcasting(choose(configuration), sizes)

    run_scenario(name, seed, NUM_STEPS, candidate)
    return sizes


@pytest.mark.parametrize("name", NAMED_SETTINGS)
def test_what_workers_get_is_whole_and_no_larger(name: str) -> None:
    for seed in range(NUM_SEEDS):
        stock = broadcast(name, seed, stock_scheduler_class)
        ours = broadcast(name, seed, sparksched_scheduler_class)
        # Pickle writes an object once that it meets twice, and which ones these are may differ with
        # drafts: by a few bytes, up or down.
        assert len(ours) == len(stock)
        assert sum(ours) <= MOST_TIMES_STOCK * sum(stock)
