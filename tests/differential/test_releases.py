"""Each behaviour that a release of vLLM has of its own is noticed where it is left out.

Scenarios of the installed release reach none of these: mutants in them would go unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from sparksched.compat import releases
from sparksched.engine import encoder_inputs

from testkit.worlds.candidates import sparksched_scheduler_class
from testkit.worlds.draw import draw_configuration
from testkit.worlds.world import build_world, vllm_environment

from .runner import SchedulersDiffer, run_scenario

NUM_STEPS = 120

# By behaviour, a scenario that notices its absence: the configuration and the seed.
BEHAVIORS: dict[str, tuple[str, int]] = {
    "continues_after_self_preemption": ("preempting-by-priority", 3),
    "skips_held_up": ("multi-module-mtp", 3),
    "counts_loras_of_all_running": ("lora-throttled", 16),
    "caches_settled_output": ("sync-eagle", 1),
    "keeps_block_before_junction": ("eagle-without-lookahead", 23),
    "requeues_sessions_last": ("sessions-preempting", 1),
    "caches_state_tails_once": ("async-granite-4", 0),
    "caps_hits_to_aux_output": ("experts-preempting", 0),
    "can_skip_drafts": ("async-eagle-v2", 0),
    "local_prefill_interval": ("prefill-interval", 1),
}


def no_updates(*_arguments: Any) -> dict[str, Any]:
    return {}


# The same for functions that decide by release.
FUNCTIONS: list[tuple[Any, str, Callable[..., Any], str, int]] = [
    (releases, "num_hash_lookahead_tokens", lambda *_: 0, "eagle-hybrid", 1),
    (releases, "drops_eagle_blocks", lambda *_: True, "eagle-hybrid", 1),
    (encoder_inputs.EncoderInputs, "input_updates", no_updates, "multimodal-v2", 0),
]

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
    def behaviors(vllm_config: Any) -> dict[str, Any]:
        found = original(vllm_config)
        return found | {name: type(found[name])()}

    original = releases.behaviors
    with mock.patch.object(releases, "behaviors", behaviors):
        assert_is_noticed(*BEHAVIORS[name])


@pytest.mark.parametrize(("owner", "function", "substitute", "name", "seed"), FUNCTIONS)
def test_a_function_that_is_left_out_is_noticed(
    owner: Any, function: str, substitute: Callable[..., Any], name: str, seed: int
) -> None:
    with mock.patch.object(owner, function, substitute):
        assert_is_noticed(name, seed)


def assert_is_noticed(name: str, seed: int) -> None:
    with pytest.raises(SchedulersDiffer):
        run_scenario(name, seed, NUM_STEPS, sparksched_scheduler_class)
