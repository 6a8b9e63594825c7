"""What can't be verified, whatever the environment asks for."""

from typing import TYPE_CHECKING

from sparksched import compat

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def unverifiable(vllm_config: "VllmConfig") -> compat.Unsupported | None:
    """Return what keeps vLLM's scheduler from running beside ours, or None."""
    if vllm_config.kv_transfer_config is not None:
        return compat.Unsupported(
            f"the KV connector {vllm_config.kv_transfer_config.kv_connector}",
            "it has one scheduler's side, and what that tells it moves data",
        )
    if vllm_config.ec_transfer_config is not None:
        return compat.Unsupported(
            f"the EC connector {vllm_config.ec_transfer_config.ec_connector}",
            "it has one scheduler's side, and what that tells it moves data",
        )
    return None
