"""Whether a scheduler is verified: what the environment asks for, and what can't be."""

from typing import TYPE_CHECKING, Any

from sparksched import compat, environment

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def verifying_cls(cls: type[Any], vllm_config: "VllmConfig") -> type[Any]:
    """Return the class to build in the place of `SparkScheduler` or a class below it.

    Raises:
        RuntimeError: if `SPARKSCHED_STRICT=1` and what `SPARKSCHED_VERIFY` asks for can't be had.

    """
    if environment.verification() is None:
        return cls
    from sparksched.scheduler import SparkScheduler
    from sparksched.verify.scheduler import VerifyingScheduler

    if issubclass(cls, VerifyingScheduler):
        return cls
    problem = unverifiable(vllm_config)
    if cls is not SparkScheduler:
        problem = compat.Unsupported(
            f"--scheduler-cls {cls.__module__}.{cls.__qualname__}",
            "what a class of one's own decides is not meant to be what vLLM's scheduler does",
        )
    if problem is None:
        return VerifyingScheduler
    compat.warn_or_raise(
        warning=f"sparksched: running without verification: {problem.feature}: {problem.reason}",
        error=f"sparksched can't be verified: {problem.feature}: {problem.reason}",
    )
    return cls


def unverifiable(vllm_config: "VllmConfig") -> compat.Unsupported | None:
    """Return what keeps vLLM's scheduler from running beside ours, or None."""
    if vllm_config.kv_transfer_config is not None:
        return compat.Unsupported(
            f"the KV connector {vllm_config.kv_transfer_config.kv_connector}",
            "it has one scheduler's side, and what that tells it moves data",
        )
    return None
