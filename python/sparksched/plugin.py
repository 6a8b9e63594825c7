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
from typing import TYPE_CHECKING, Any

from sparksched import compat, environment
from sparksched.compat import patching, seams
from sparksched.compat.configuration import DIFFUSION
from sparksched.compat.seams import VARIABLES
from sparksched.compat.source import dotted

if TYPE_CHECKING:
    from _collections_abc import dict_items

    from vllm.config import SchedulerConfig

_SPARK_SCHEDULER = "sparksched.scheduler.SparkScheduler"
_DIFFUSION_SCHEDULERS = "vllm.v1.core.sched.diffusion_scheduler."


def register() -> None:
    """Make vLLM use sparksched if `VLLM_SCHEDULER` asks for it; else do nothing.

    Raises:
        ValueError: if one of our environment variables has a value that it can't have.
        RuntimeError: if the extension can't be loaded, or vLLM lacks what is to be replaced and
            `SPARKSCHED_STRICT=1`.

    """
    if not environment.is_selected():
        # `VLLM_SCHEDULER=vllm` is a way to say off, not an unknown variable.
        if environment.is_set() and "vllm.envs" in sys.modules:
            _declare_environment_variables()
        return
    _check_environment()
    _load_extension()
    _declare_environment_variables()
    is_known = compat.unsupported_version() is None
    for group in seams.GROUPS:
        if (is_known or group.any_release) and group.is_on() and not group.waits_for_scheduler:
            patching.install(group)


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


class _KnownVariables(dict[str, Callable[[], Any]]):
    """vLLM's environment variables, and ours.

    vLLM makes the key of its compilation cache of `items()`. Compiled graphs don't depend on who
    schedules, so ours aren't among them: whoever tries sparksched would compile everything anew.
    """

    def items(self) -> "dict_items[str, Callable[[], Any]]":
        """Return those of vLLM's own."""
        items = super().items()
        return {name: read for name, read in items if name not in environment.VARIABLES}.items()


def _declare_environment_variables() -> None:
    """Make vLLM know our variables.

    It warns about others that begin with VLLM_, and takes only those that it knows along to Ray's
    actors. In time: vLLM looks for unknown variables when it builds its configuration, which
    happens after its arguments, and with them the plugins, have been loaded.
    """
    import vllm.envs

    known = vars(vllm.envs).get("environment_variables")
    if isinstance(known, _KnownVariables):
        return
    if not isinstance(known, dict):
        compat.warn_or_raise(
            warning=f"sparksched: vLLM doesn't know its variables: {dotted(VARIABLES)} is missing",
            error=f"sparksched: {dotted(VARIABLES)} is missing",
        )
        return
    ours = {name: functools.partial(os.environ.get, name) for name in environment.VARIABLES}
    vllm.envs.environment_variables = _KnownVariables({**ours, **known})


# ----------------------------------------------------------------------------------------
# The choice of the scheduler
# ----------------------------------------------------------------------------------------


def _preferring_spark_scheduler(
    vllm_choice: Callable[["SchedulerConfig"], type[Any]],
) -> patching.Function:
    @functools.wraps(vllm_choice)
    def get_scheduler_cls(self: "SchedulerConfig") -> type[Any]:
        if not chooses_spark_scheduler(self.scheduler_cls):
            _report_other_choice(self.scheduler_cls)
            return vllm_choice(self)
        # Before the import: under another vLLM it may fail for want of a name.
        problem = compat.unsupported_vllm()
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
        compat.refuse(DIFFUSION)
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
