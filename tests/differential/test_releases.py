"""Scenarios that reach what each release decides in its own way, which few others do."""

import pytest
from sparksched.compat import releases

from testkit.worlds.candidates import sparksched_scheduler_class
from testkit.worlds.draw import draw_configuration
from testkit.worlds.world import build_world, vllm_environment

from .runner import run_scenario

pytestmark = [
    pytest.mark.release,
    pytest.mark.skipif(
        not releases.is_since("0.33.0"), reason="vLLM 0.32.0 is what all others are compared with"
    ),
]

# By behaviour, a configuration and a seed that differ without it.
BEHAVIORS = {
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
# What Python decides by release: lookahead of hashes, dropped blocks, encoders' updates.
FURTHER = [("eagle-hybrid", 1), ("multimodal-v2", 0)]


def test_each_behavior_has_a_scenario() -> None:
    configuration = draw_configuration("random", 0)
    with vllm_environment(configuration):
        assert set(BEHAVIORS) == set(releases.behaviors(build_world(configuration).vllm_config))


@pytest.mark.parametrize(("name", "seed"), [*BEHAVIORS.values(), *FURTHER])
def test_decides_as_vllm_does(name: str, seed: int) -> None:
    run_scenario(name, seed, 120, sparksched_scheduler_class)
