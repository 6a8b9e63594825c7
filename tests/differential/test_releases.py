"""Each behaviour that a release of vLLM has of its own is noticed where it is left out."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from sparksched.compat import releases
from sparksched.engine import encoder_inputs

from testkit.worlds.candidates import sparksched_scheduler_class
from testkit.worlds.draw import draw_configuration
from testkit.worlds.world import build_world, vllm_environment

from .finding import find
from .runner import SchedulersDiffer, run_scenario

MOST_SEEDS = 40
NUM_STEPS = 120

# By behaviour, a configuration that notices its absence, and what stands in its place then.
BEHAVIORS: dict[str, tuple[str, Any]] = {
    "continues_after_self_preemption": ("preempting-by-priority", False),
    "skips_held_up": ("multi-module-mtp", False),
    "counts_loras_of_all_running": ("lora-throttled", False),
    "caches_settled_output": ("sync-eagle", False),
    "keeps_block_before_junction": ("eagle-without-lookahead", False),
    "requeues_sessions_last": ("sessions-preempting", False),
    "caches_state_tails_once": ("async-granite-4", False),
    "caps_hits_to_aux_output": ("experts-preempting", False),
    "can_skip_drafts": ("async-eagle-v2", False),
    "local_prefill_interval": ("prefill-interval", 0),
}

pytestmark = [
    pytest.mark.release,
    pytest.mark.skipif(
        not releases.is_since("0.33.0"), reason="vLLM 0.32.0 is what all others are compared with"
    ),
]


def test_every_behavior_is_tested() -> None:
    configuration = draw_configuration("random", 0)
    with vllm_environment(configuration):
        assert set(BEHAVIORS) == set(releases.behaviors(build_world(configuration).vllm_config))


@pytest.mark.parametrize("name", BEHAVIORS)
def test_a_behavior_that_is_left_out_is_noticed(name: str) -> None:
    configuration, substitute = BEHAVIORS[name]

    def behaviors(vllm_config: Any) -> dict[str, Any]:
        return original(vllm_config) | {name: substitute}

    original = releases.behaviors
    with mock.patch.object(releases, "behaviors", behaviors):
        assert_is_noticed(f"{name} left out", configuration)


def test_hashes_without_lookahead_are_noticed() -> None:
    with mock.patch.object(releases, "num_hash_lookahead_tokens", return_value=0):
        assert_is_noticed("hashes without lookahead", "eagle-hybrid")


def test_groups_that_drop_blocks_as_in_0_32_0_are_noticed() -> None:
    with mock.patch.object(releases, "drops_eagle_blocks", return_value=True):
        assert_is_noticed("groups that drop blocks as in 0 32 0", "eagle-hybrid")


def test_updates_of_encoder_inputs_that_are_left_out_are_noticed() -> None:
    def no_updates(*_arguments: Any) -> dict[str, Any]:
        return {}

    with mock.patch.object(encoder_inputs.EncoderInputs, "input_updates", no_updates):
        assert_is_noticed("updates of encoder inputs that are left out", "multimodal-v2")


def test_encoder_inputs_that_are_not_sent_again_after_a_failed_load_are_noticed() -> None:
    input_updates = encoder_inputs.EncoderInputs.input_updates

    def only_those_to_forget(*arguments: Any) -> dict[str, Any]:
        forgotten = {
            request_id: {input_id: None for input_id, data in inputs.items() if data is None}
            for request_id, inputs in input_updates(*arguments).items()
        }
        return {request_id: inputs for request_id, inputs in forgotten.items() if inputs}

    with mock.patch.object(encoder_inputs.EncoderInputs, "input_updates", only_those_to_forget):
        assert_is_noticed(
            "inputs not sent again",
            "connector-failures-multimodal",
        )


def assert_is_noticed(what: str, configuration: str) -> None:
    """Check that a scenario of this configuration shows a difference."""

    def shows(seed: int) -> bool:
        try:
            run_scenario(configuration, seed, NUM_STEPS, sparksched_scheduler_class)
        except SchedulersDiffer:
            return True
        return False

    find(what, configuration, MOST_SEEDS, shows)
