"""vLLM's releases: which ones are supported, which one is there, and what each decides differently.

This module and the tables of `compat` are all that knows of versions. Everything else asks for a
behaviour by its name, or looks whether a class has a field.
"""

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SUPPORTED: Final = ("0.32.0", "0.33.0")
"""In their order."""


def installed() -> str:
    """Return vLLM's version without its local part: `0.32.0` for `0.32.0+cpu`."""
    from vllm.version import __version__

    release, _, _local_build = __version__.partition("+")
    return str(release)


def is_since(release: str) -> bool:
    """Return whether the installed vLLM is this supported release or a later one."""
    return installed() in SUPPORTED[SUPPORTED.index(release) :]


def behaviors(vllm_config: "VllmConfig") -> dict[str, Any]:
    """Return what the installed release decides in its own way, for the core's `Behaviors`.

    Everything is False or 0 where it decides as vLLM 0.32.0 does.
    """
    since_0_33 = is_since("0.33.0")
    return {
        "continues_after_self_preemption": since_0_33,
        "skips_held_up": since_0_33,
        "counts_loras_of_all_running": since_0_33,
        "caches_settled_output": since_0_33,
        "keeps_block_before_junction": since_0_33,
        "requeues_sessions_last": since_0_33,
        "caches_state_tails_once": since_0_33,
        "caps_hits_to_aux_output": since_0_33 and vllm_config.aux_output_config.enabled,
        "can_skip_drafts": (
            since_0_33 and vllm_config.num_lookahead_tokens > 0 and vllm_config.use_v2_model_runner
        ),
        "local_prefill_interval": _local_prefill_interval(vllm_config) if since_0_33 else 0,
    }


def num_hash_lookahead_tokens(vllm_config: "VllmConfig") -> int:
    """Return how many tokens behind a block its hash covers: none before vLLM 0.33.0."""
    return int(vllm_config.num_hash_lookahead_tokens) if is_since("0.33.0") else 0


def hasher_lookahead(vllm_config: "VllmConfig") -> tuple[int, ...]:
    """Return what vLLM's factory of block hashers is given besides size and hash function."""
    return (num_hash_lookahead_tokens(vllm_config),) if is_since("0.33.0") else ()


def drops_eagle_blocks(vllm_config: "VllmConfig") -> bool:
    """Return whether groups that are flagged as a drafter's drop the last block of a prefix hit.

    vLLM 0.32.0 has them do so whenever they are flagged.
    """
    return not is_since("0.33.0") or drops_eagle_checkpoints(vllm_config)


def drops_eagle_checkpoints(vllm_config: "VllmConfig") -> bool:
    """Return whether a drafter has the end of a prefix hit computed again, states included."""
    config = vllm_config.speculative_config
    drops = config is not None and config.use_eagle_block_drop()
    return bool(drops) and num_hash_lookahead_tokens(vllm_config) == 0


def caches_states_of_all_modes() -> bool:
    """Return whether recurrent states are cached in every cache mode, not only if aligned."""
    return not is_since("0.33.0")


def _local_prefill_interval(vllm_config: "VllmConfig") -> int:
    """Return the steps between prefills where no data-parallel group coordinates them."""
    if vllm_config.parallel_config.data_parallel_size > 1:
        return 0
    return int(vllm_config.scheduler_config.prefill_schedule_interval)
