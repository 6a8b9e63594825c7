"""Each step may be decided with a budget and a threshold of its own."""

from __future__ import annotations

from typing import Any

import pytest
from scale import FULL

from testkit.worlds.candidates import sparksched_scheduler_class, verifying_scheduler_class
from testkit.worlds.configuration import Configuration
from testkit.worlds.scenarios import NAMED_SETTINGS, is_verifiable

from .runner import run_scenario

NUM_SEEDS = 6 if FULL else 1
NAMES = list(NAMED_SETTINGS)[:: 1 if FULL else 3]
NUM_STEPS = 120


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_decides_as_vllm_does_with_the_same_knobs(name: str, seed: int) -> None:
    run_scenario(name, 100 + seed, NUM_STEPS, sparksched_scheduler_class, with_knobs=True)


@pytest.mark.release
@pytest.mark.parametrize(
    ("name", "shown_by"),
    [
        ("async-full", "num_decode_steps"),
        ("sync-hybrid", "num_decode_steps"),
        # A prompt needs more than a third of its small cache: no decode-only steps follow.
        ("async-preempting", "num_over_for_long"),
        ("kv-cache-metrics", "num_decode_steps"),
    ],
)
def test_what_paces_prompts_is_verified(name: str, shown_by: str) -> None:
    assert is_verifiable(name)
    built: list[Any] = []

    def paced_scheduler_class(configuration: Configuration) -> type[Any]:
        class PacedScheduler(verifying_scheduler_class(configuration)):  # type: ignore[misc]
            def __init__(self, *arguments: Any, **settings: Any) -> None:
                super().__init__(*arguments, **settings)
                # Whatever is drawn: some of it would not be paced otherwise.
                self.core.pace(1e-6, 5.0, 0, None)
                built.append(self)

        return PacedScheduler

    for seed in range(6):
        run_scenario(name, seed, NUM_STEPS, paced_scheduler_class)
    paced = [scheduler.pacing() for scheduler in built]
    assert sum(it[shown_by] for it in paced if it is not None) > 0
