"""`SPARKSCHED_VERIFY` on seeded scenarios: planted errors are found.

That there is no false alarm, `test_differential.py` shows.
"""

from __future__ import annotations

from unittest import mock

import pytest
from sparksched import compat
from sparksched.verify.report import SchedulersDifferError

from testkit.worlds.candidates import verifying_scheduler_class
from testkit.worlds.scenarios import NAMED_SETTINGS, is_verifiable

from .finding import find
from .runner import SchedulersDiffer, run_scenario
from .test_harness_catches import (
    FLAWS,
    MOST_SEEDS,
    NUM_STEPS,
    Flaw,
    counts_one_waiting_request_too_many,
    sends_statistics_to_the_last_client,
    stops_one_token_past_the_context,
)

VERIFIABLE = [name for name in NAMED_SETTINGS if is_verifiable(name)]

# What an engine can't see from outside, or what is left out by name.
UNSEEN = {
    # Times.
    "reads_the_clock_twice",
    # A random sample of blocks, of which each scheduler takes its own.
    "keeps_metrics_across_a_reset",
    "draws_at_each_access",
    "counts_allocation_as_access",
    # What was compared is changed later: vLLM's objects never leave the shadow.
    "reuses_a_returned_list",
    "recycles_outputs",
    "changes_published_events",
    # A connector is shown what it does not tell anybody.
    "plans_experts_behind_the_step",
    # State that these scenarios end without a decision on.
    "gives_back_inputs_of_the_held_up",
    "keeps_hashes_of_discarded_tokens",
}
SEEN = [(flaw, name) for flaw, name in FLAWS if name in VERIFIABLE and flaw.__name__ not in UNSEEN]


SEEN_IN_MESSAGES = [
    (counts_one_waiting_request_too_many, "async-full"),
    (stops_one_token_past_the_context, "sync-full"),
    (sends_statistics_to_the_last_client, "async-full"),
]


@pytest.mark.parametrize(("flaw", "name"), SEEN, ids=lambda value: getattr(value, "__name__", ""))
def test_planted_error_is_found(flaw: Flaw, name: str) -> None:
    find_verifying(flaw, name)


@pytest.mark.parametrize(("flaw", "name"), SEEN_IN_MESSAGES)
def test_planted_error_is_found_in_messages(flaw: Flaw, name: str) -> None:
    find_verifying(flaw, name, encoded=True)


def find_verifying(flaw: Flaw, name: str, encoded: bool = False) -> None:
    """Run scenarios until the error shows. It is vLLM's here, which is the same to a comparison."""

    def shows(seed: int) -> bool:
        try:
            run_scenario(name, seed, NUM_STEPS, verifying_scheduler_class, encoded=encoded)
        except SchedulersDifferError:
            return True
        except SchedulersDiffer as difference:
            # The harness has seen the error that the engine is to stop with.
            if "SchedulersDifferError" not in str(difference):
                raise
            return True
        return False

    stock_scheduler_cls = compat.stock_scheduler_cls
    with mock.patch.object(
        compat, "stock_scheduler_cls", lambda config: flaw(stock_scheduler_cls(config))
    ):
        what = "verified messages" if encoded else "verification"
        find(f"{flaw.__name__}, seen by {what},", name, MOST_SEEDS, shows)


def test_what_is_unseen_is_planted() -> None:
    assert {flaw.__name__ for flaw, _ in FLAWS} >= UNSEEN
