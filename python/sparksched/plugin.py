"""The entry point by which vLLM loads sparksched: `vllm.general_plugins`.

vLLM calls `register()` in each of its processes, sometimes more than once: the API server,
the engine, the workers, and a short-lived process that inspects model classes. It therefore
allocates nothing and imports nothing that the process doesn't already have.
"""

import functools
import importlib
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from sparksched import compat, environment
from sparksched.compat import patching

if TYPE_CHECKING:
    from vllm.config import SchedulerConfig

_SPARK_SCHEDULER = "sparksched.scheduler.SparkScheduler"
_DIFFUSION_SCHEDULERS = "vllm.v1.core.sched.diffusion_scheduler."


def register() -> None:
    """Make vLLM use sparksched if `VLLM_SCHEDULER` asks for it; else do nothing."""
    if not environment.is_selected():
        # `VLLM_SCHEDULER=vllm` is a way to say off, not an unknown variable.
        if environment.is_set() and "vllm.envs" in sys.modules:
            _declare_environment_variables()
        return
    _check_environment()
    _load_extension()
    _declare_environment_variables()
    _select_scheduler()
    if environment.shows_metrics():
        _add_to_metrics_page()
    if compat.unsupported_version() is None:
        _replace_transport()
        if environment.recording() is not None:
            patching.after_import("vllm.v1.engine.utils", _wait_for_recordings)
        if environment.replaces_front_end():
            _replace_output_processing()
        if environment.shows_metrics():
            _time_deliveries()


def _check_environment() -> None:
    """Report mistyped values here, not when they are needed."""
    for read in environment.READERS:
        read()


def _load_extension() -> None:
    """Fail early: vLLM logs and swallows what fails while a plugin is imported, but not this."""
    try:
        importlib.import_module("sparksched._core")
    except ImportError as error:
        raise RuntimeError(
            "sparksched is selected, but its extension module sparksched._core cannot be "
            f"loaded: {error}. Reinstall sparksched, or unset {environment.SCHEDULER} to use "
            "vLLM's own scheduler."
        ) from error


# ----------------------------------------------------------------------------------------
# Environment variables
# ----------------------------------------------------------------------------------------


def _declare_environment_variables() -> None:
    """Make vLLM know our variables.

    It warns about others that begin with VLLM_, and takes only those that it knows along to Ray's
    actors. In time: vLLM looks for unknown variables when it builds its configuration, which
    happens after its arguments, and with them the plugins, have been loaded.
    """
    import vllm.envs

    for name in environment.VARIABLES:
        vllm.envs.environment_variables.setdefault(name, functools.partial(os.environ.get, name))
    patching.replace(vllm.envs, "compile_factors", _without_our_variables)


def _without_our_variables(original: patching.Function) -> patching.Function:
    """Keep the variables out of the key of vLLM's compilation cache.

    Compiled graphs don't depend on who schedules. Without this, the first start with
    sparksched would compile everything anew.
    """

    @functools.wraps(original)
    def compile_factors() -> dict[str, object]:
        return {
            name: value for name, value in original().items() if name not in environment.VARIABLES
        }

    return compile_factors


# ----------------------------------------------------------------------------------------
# The choice of the scheduler
# ----------------------------------------------------------------------------------------


def _select_scheduler() -> None:
    from vllm.config.scheduler import SchedulerConfig

    patching.replace(SchedulerConfig, "get_scheduler_cls", _preferring_spark_scheduler)


def _preferring_spark_scheduler(
    vllm_choice: Callable[["SchedulerConfig"], type[Any]],
) -> patching.Function:
    @functools.wraps(vllm_choice)
    def get_scheduler_cls(self: "SchedulerConfig") -> type[Any]:
        if not chooses_spark_scheduler(self.scheduler_cls):
            _report_other_choice(self.scheduler_cls)
            return vllm_choice(self)
        # Before the import: under another vLLM it may fail for want of a name.
        problem = compat.unsupported_version()
        if problem is not None and self.scheduler_cls is None:
            compat.refuse(problem)
            return vllm_choice(self)
        from sparksched.scheduler import SparkScheduler

        return SparkScheduler

    return get_scheduler_cls


def chooses_spark_scheduler(scheduler_cls: str | type[Any] | None) -> bool:
    """Return whether `--scheduler-cls` leaves the choice to sparksched, or asks for it."""
    if isinstance(scheduler_cls, type):
        scheduler_cls = f"{scheduler_cls.__module__}.{scheduler_cls.__qualname__}"
    return scheduler_cls in (None, _SPARK_SCHEDULER)


def _report_other_choice(scheduler_cls: str | type[Any]) -> None:
    """Say that a scheduler class which was asked for by name has won."""
    if isinstance(scheduler_cls, str) and scheduler_cls.startswith(_DIFFUSION_SCHEDULERS):
        # vLLM itself presets this for diffusion models: the user has asked for no class.
        compat.refuse(compat.DIFFUSION)
        return
    name = scheduler_cls if isinstance(scheduler_cls, str) else scheduler_cls.__qualname__
    compat.note_refusal(compat.Unsupported("--scheduler-cls", f"it asks for {name}"))
    compat.warn_or_raise(
        warning=(
            f"{environment.SCHEDULER}=sparksched is ignored, "
            f"because --scheduler-cls asks for {scheduler_cls}"
        ),
        error=(
            f"{environment.SCHEDULER}=sparksched contradicts --scheduler-cls {scheduler_cls}: "
            "choose one of them"
        ),
    )


# ----------------------------------------------------------------------------------------
# Rings in place of sockets
# ----------------------------------------------------------------------------------------


def _replace_transport() -> None:
    patching.after_import("vllm.v1.engine.core", _replace_engine_transport)
    patching.after_import("vllm.v1.engine.core_client", _replace_client_transport)
    patching.after_import("vllm.v1.engine.async_llm", _replace_front_end_errors)


def _replace_engine_transport(module: ModuleType) -> None:
    from sparksched.engine import core_proc

    core_proc.install(module)


def _replace_client_transport(module: ModuleType) -> None:
    from sparksched.api_server import client

    client.install(module)


def _replace_front_end_errors(module: ModuleType) -> None:
    from sparksched.api_server import overload, shutdown

    overload.install(module)
    shutdown.install(module)


def _wait_for_recordings(module: ModuleType) -> None:
    from sparksched.trace import engine_end

    engine_end.install_in_manager(module)


# ----------------------------------------------------------------------------------------
# A shorter way for most outputs
# ----------------------------------------------------------------------------------------


def _replace_output_processing() -> None:
    patching.after_import("vllm.v1.engine.output_processor", _replace_output_processor)
    patching.after_import("vllm.v1.metrics.loggers", _replace_latency_records)


def _replace_output_processor(module: ModuleType) -> None:
    from sparksched.api_server import output_processor

    output_processor.install(module)


def _replace_latency_records(module: ModuleType) -> None:
    from sparksched.api_server import token_metrics

    token_metrics.install(module)


# ----------------------------------------------------------------------------------------
# Metrics
# ----------------------------------------------------------------------------------------


def _add_to_metrics_page() -> None:
    """Show on `/metrics` what schedules, whatever release of vLLM this is."""
    patching.after_import("vllm.entrypoints.serve.instrumentator.metrics", _extend_registries)


def _extend_registries(module: ModuleType) -> None:
    from sparksched.api_server import metrics

    metrics.install(module)


def _time_deliveries() -> None:
    patching.after_import("vllm.v1.engine.output_processor", _time_processing)


def _time_processing(module: ModuleType) -> None:
    from sparksched.api_server import deliveries

    deliveries.install(module)
