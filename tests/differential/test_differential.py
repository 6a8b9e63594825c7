"""SparkScheduler decides exactly as vLLM's own scheduler does, on seeded scenarios.

One scenario in three compares the outputs themselves, one what workers in other processes get, and
one the messages for clients, with `SPARKSCHED_VERIFY` beside, which must raise no false alarm.
"""

from __future__ import annotations

import pytest
from scale import FULL
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request import RequestStatus

from testkit.worlds.candidates import sparksched_scheduler_class, verifying_scheduler_class
from testkit.worlds.scenarios import NAMED_SETTINGS, is_verifiable

from .runner import Reached, fields_of, run_scenario

NUM_SEEDS = 18 if FULL else 3
NUM_STEPS = 120
# Rare situations need scenarios of their own, where three of each configuration don't reach them:
# here, outputs of preempted pooling requests.
PINNED = [("pooling-preempting", 3), ("async-pooling", 6)]
SCENARIOS = [
    *((name, seed) for name in NAMED_SETTINGS for seed in range(NUM_SEEDS)),
    *(scenario for scenario in PINNED if scenario[1] >= NUM_SEEDS),
]

STRUCTURES = (
    *(SchedulerOutput, CachedRequestData, NewRequestData),
    *(EngineCoreOutputs, EngineCoreOutput, SchedulerStats),
)
# What is empty in all scenarios: workers, the engine and other schedulers fill it in.
EMPTY = {
    *("EngineCoreOutputs.engine_index", "EngineCoreOutputs.utility_output"),
    *("EngineCoreOutputs.start_wave", "EngineCoreOutputs.wave_complete"),
    *("EngineCoreOutput.mm_cache_miss_hashes", "EngineCoreOutput.prompt_token_id_logprobs"),
    *("FinishReason.ABORT", "NewRequestData.replay_start"),
    *("SchedulerOutput.ec_manager_metadata", "SchedulerOutput.num_common_prefix_blocks"),
    "SchedulerOutput.kv_connector_block_state",  # connectors take it
    *("SchedulerStats.current_wave", "SchedulerStats.step_counter"),
    *("SchedulerStats.running_lora_adapters", "SchedulerStats.waiting_lora_adapters"),
    "SchedulerStats.iteration_details",
}


class ReachedScenarios:
    """What the scenarios of this test run have come to so far."""

    def __init__(self) -> None:
        self.reached = Reached()
        self.finished: set[tuple[str, int]] = set()


@pytest.fixture(scope="module")
def seen() -> ReachedScenarios:
    return ReachedScenarios()


@pytest.mark.parametrize(("name", "seed"), SCENARIOS)
def test_decides_as_vllm_does(name: str, seed: int, seen: ReachedScenarios) -> None:
    broadcast, encoded = seed % 3 == 1, seed % 3 == 2
    verified = encoded and is_verifiable(name)
    run_scenario(
        name,
        seed,
        NUM_STEPS,
        verifying_scheduler_class if verified else sparksched_scheduler_class,
        reached=seen.reached,
        broadcast=broadcast,
        encoded=encoded,
    )
    seen.finished.add((name, seed))


def test_each_field_has_been_compared(seen: ReachedScenarios) -> None:
    """A trace generator that stopped exercising one of these would otherwise go unnoticed."""
    if seen.finished != set(SCENARIOS):
        pytest.skip("only meaningful after all scenarios have passed")
    fields = {f"{cls.__name__}.{name}" for cls in STRUCTURES for name in fields_of(cls)}
    unfinished = [it for it in RequestStatus if not RequestStatus.is_finished(it)]
    members = {f"{type(it).__name__}.{it.name}" for it in (*FinishReason, *unfinished)}
    assert (fields | members) - seen.reached.keys() <= EMPTY
