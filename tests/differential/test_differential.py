"""SparkScheduler decides exactly as vLLM's own scheduler does, on seeded scenarios."""

from __future__ import annotations

import pytest

from .runner import Coverage, run_scenario
from .world import NAMED_SETTINGS, sparksched_scheduler_class

NUM_SEEDS = 10
NUM_ENCODED_SEEDS = 4
NUM_STEPS = 120
SCENARIOS = [(name, seed) for name in NAMED_SETTINGS for seed in range(NUM_SEEDS)]

# What the scenarios together must have reached, and how often at the least. A change of the
# trace generator that stops exercising one of these would otherwise go unnoticed.
EXPECTED_SITUATIONS = {
    "steps": 15_000,
    "empty steps": 50,
    "steps while PAUSED_NEW": 20,
    "steps while PAUSED_ALL": 20,
    "prefill chunks": 500,
    "prefix cache hits": 200,
    "cached blocks in use again": 200,
    "blocks behind a window": 500,
    "preemptions": 1000,
    "preemptions ahead of a running request": 20,
    "preemptions between equal requests": 3,
    "prefills limited by the threshold": 200,
    "prefills exempt from the threshold": 50,
    "resumptions": 200,
    "stale outputs delivered": 30,
    "stale outputs dropped": 10,
    "outputs of finished requests": 50,
    "steps whose output was lost": 5,
    "stops by EOS": 50,
    "stops by stop token": 50,
    "stops by max_tokens": 200,
    "stops by max_model_len": 10,
    "stops by repetition": 10,
    "stops by rejected token": 5,
    "stops by grammar that does not compile": 10,
    "requests that wait for a grammar": 100,
    "grammar bitmasks": 200,
    "sampling deferred for a grammar": 100,
    "aborts of all requests": 3,
    "aborts of a single string": 10,
    "aborts of duplicates": 10,
    "aborts of unknown or finished": 50,
    "aborts of WAITING": 20,
    "aborts of RUNNING": 50,
    "aborts of PREEMPTED": 5,
    "aborts of WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR": 5,
    "aborts of requests in flight": 50,
    "aborts while the model runs": 30,
    "resets that succeed": 10,
    "resets that fail": 5,
    "resets that preempt running requests": 5,
    "request ids used again": 5,
    "outputs to several clients": 100,
    "outputs with logprobs": 100,
    "outputs with prompt logprobs": 10,
    "outputs with NaN counts": 50,
    "outputs with trace headers": 100,
    "outputs with events": 100,
    "finished request sets": 50,
    "scheduler statistics": 1000,
}


class CoveredScenarios:
    """What the scenarios of this test run have reached so far."""

    def __init__(self) -> None:
        self.coverage = Coverage()
        self.finished: set[tuple[str, int]] = set()


@pytest.fixture(scope="module")
def covered() -> CoveredScenarios:
    return CoveredScenarios()


@pytest.mark.parametrize(("name", "seed"), SCENARIOS)
def test_decides_as_vllm_does(name: str, seed: int, covered: CoveredScenarios) -> None:
    run_scenario(name, seed, NUM_STEPS, sparksched_scheduler_class, coverage=covered.coverage)
    covered.finished.add((name, seed))


@pytest.mark.parametrize("seed", range(NUM_SEEDS, NUM_SEEDS + NUM_ENCODED_SEEDS))
@pytest.mark.parametrize("name", NAMED_SETTINGS)
def test_writes_the_messages_that_vllm_does(name: str, seed: int) -> None:
    run_scenario(name, seed, NUM_STEPS, sparksched_scheduler_class, encoded=True)


def test_scenarios_reach_every_situation(covered: CoveredScenarios) -> None:
    if covered.finished != set(SCENARIOS):
        pytest.skip("only meaningful after all scenarios have passed")
    too_rare = {
        situation: covered.coverage[situation]
        for situation, expected in EXPECTED_SITUATIONS.items()
        if covered.coverage[situation] < expected
    }
    assert not too_rare
