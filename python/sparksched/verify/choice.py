"""What can't be verified, whatever the environment asks for."""

from typing import TYPE_CHECKING

from sparksched import compat

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def unverifiable(vllm_config: "VllmConfig") -> compat.Unsupported | None:
    """Return what keeps vLLM's scheduler from running beside ours, or None."""
    if (kv := vllm_config.kv_transfer_config) is not None:
        name = f"KV connector {kv.kv_connector}"
    elif (ec := vllm_config.ec_transfer_config) is not None:
        name = f"EC connector {ec.ec_connector}"
    else:
        return None
    reason = "it has one scheduler's side, and what that tells it moves data"
    return compat.Unsupported(f"the {name}", reason)
