"""What sparksched supports: vLLM's versions, structures and configurations.

Support is an allow-list. Everything here answers one question, "may the native scheduler
run?", with None for yes or with an `Unsupported` that names the first thing in the way.
vLLM's modules are imported only inside the functions that look at them.

Here is what a check that has failed leads to. `fingerprints` compares vLLM's code with that of the
releases that are known, `configuration` and `kv_cache` have a rule for each feature that is left
out.
"""

import importlib
from typing import TYPE_CHECKING, Any, Final

from sparksched import environment
from sparksched.compat import releases
from sparksched.compat.configuration import unsupported_config
from sparksched.compat.fingerprints import unsupported_code
from sparksched.compat.kv_cache import unsupported_kv_cache
from sparksched.compat.rule import Unsupported as Unsupported

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def first_unsupported(
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    block_size: int,
    hash_block_size: int | None = None,
) -> Unsupported | None:
    """Return the first thing that keeps the native scheduler from running, else None."""
    return unsupported_before_loading(vllm_config) or unsupported_kv_cache(
        kv_cache_config, block_size, hash_block_size, vllm_config
    )


def unsupported_before_loading(vllm_config: "VllmConfig") -> Unsupported | None:
    """Return what of it is known before the model is loaded, which its KV cache waits for."""
    return unsupported_vllm() or unsupported_config(vllm_config)


def unsupported_vllm() -> Unsupported | None:
    """Return what keeps the native scheduler from running with this vLLM, whatever is configured.

    Before this says None, the native scheduler must not be imported: it takes functions of vLLM's
    that another vLLM may not have.
    """
    return unsupported_version() or unsupported_code()


def unsupported_version() -> Unsupported | None:
    """Accept the supported releases in every local build of theirs, such as `0.32.0+cpu`."""
    from vllm.version import __version__

    if releases.installed() in releases.SUPPORTED:
        return None
    return Unsupported(
        f"vLLM {__version__}",
        f"sparksched knows vLLM {' and '.join(releases.SUPPORTED)}; "
        "install one of these or a sparksched made for your version",
    )


def refuse(problem: Unsupported) -> None:
    """Log the fallback to vLLM's own scheduler as one WARNING; in strict mode, raise instead."""
    note_refusal(problem)
    refusal = f"{problem.feature} is not supported: {problem.reason}"
    warn_or_raise(
        warning=f"sparksched: using vLLM's own scheduler: {refusal}",
        error=f"sparksched: {refusal}",
    )


_refused: Unsupported | None = None


def note_refusal(problem: Unsupported) -> None:
    """Remember what has led to vLLM's own scheduler in this process."""
    global _refused  # noqa: PLW0603 - an engine has one scheduler, and a process one engine
    _refused = problem


def refused() -> Unsupported | None:
    """Return the last that has led to vLLM's own scheduler in this process, or None."""
    return _refused


def warn_or_raise(warning: str, error: str) -> None:
    """Log `warning`; in strict mode, raise RuntimeError with `error` and the way out of it."""
    if environment.is_strict():
        raise RuntimeError(
            f"{error} ({environment.STRICT}=1 makes this an error; "
            f"unset it or set it to 0 to run with vLLM's own choice and a warning)"
        )
    warn(warning)


def warn(warning: str) -> None:
    """Log a WARNING."""
    from vllm.logger import init_logger

    # vLLM configures only the logger `vllm`: from any other name the line would not
    # reach vLLM's handlers.
    init_logger("vllm.sparksched").warning("%s", warning)


def stock_scheduler_cls(vllm_config: "VllmConfig") -> type[Any]:
    """Return the scheduler that vLLM chooses for this configuration if nobody asks for another."""
    is_diffusion = vllm_config.diffusion_config is not None
    is_async = bool(vllm_config.scheduler_config.async_scheduling)
    module, _, name = _STOCK_SCHEDULERS[is_diffusion, is_async].partition(":")
    cls: type[Any] = getattr(importlib.import_module(module), name)
    return cls


# By whether the model is a diffusion model, and whether scheduling is asynchronous.
_STOCK_SCHEDULERS: Final = {
    (False, False): "vllm.v1.core.sched.scheduler:Scheduler",
    (False, True): "vllm.v1.core.sched.async_scheduler:AsyncScheduler",
    (True, False): "vllm.v1.core.sched.diffusion_scheduler:DiffusionScheduler",
    (True, True): "vllm.v1.core.sched.diffusion_scheduler:DiffusionAsyncScheduler",
}
