"""What is said of a verification: that it runs, what it has found, and what it hasn't."""

from typing import Any, Final

from vllm.logger import init_logger

from sparksched import environment
from sparksched.verify.compare import Difference
from sparksched.verify.shown import shown

logger = init_logger("vllm.sparksched")

_GOING_ON: Final[dict[environment.Verification, str]] = {
    "1": "going on without verification",
    "stop": "stopping the engine",
}

_MILESTONES: Final = frozenset(10**exponent for exponent in range(2, 19))


class SchedulersDifferError(RuntimeError):
    """Ours has decided something else than vLLM's, and the engine was to stop then."""


class VerificationFailedError(RuntimeError):
    """Nothing is verified any more, and the engine was to stop at a difference."""


def announce(stock: Any, verification: environment.Verification) -> None:
    """Say at the start what happens and what it costs."""
    logger.info(
        "sparksched: vLLM's %s verifies each step, which makes steps slower than with vLLM alone. "
        "After a difference: %s.",
        type(stock).__name__,
        _GOING_ON[verification],
    )


def summarise(num_steps: int) -> None:
    """Say that nothing was found."""
    logger.info("sparksched: %d steps verified, no difference from vLLM's scheduler.", num_steps)


def note_progress(num_steps: int) -> None:
    """Say now and then that nothing was found yet: servers often kill their engine at the end."""
    if num_steps in _MILESTONES:
        summarise(num_steps)


def report(found: str | Exception, verification: environment.Verification) -> None:
    """Log a difference, or an error that is of neither scheduler; raise one if the engine stops.

    Raises:
        SchedulersDifferError: for a difference, if `verification` is "stop".
        VerificationFailedError: for an error, if `verification` is "stop".

    """
    going_on = _GOING_ON[verification]
    if isinstance(found, Exception):
        logger.error("sparksched: verification has failed: %s.", going_on, exc_info=found)
    else:
        logger.error("sparksched: %s; %s.", found, going_on)
    if verification == "1":
        return
    ends = f"{environment.VERIFY}=stop ends the engine"
    if isinstance(found, Exception):
        error = f"{type(found).__name__} in verification ({ends})"
        raise VerificationFailedError(error) from found
    raise SchedulersDifferError(f"{found} ({ends} at the first difference)")


def describe(difference: Difference, step: int) -> str:
    """Return a difference in words, without the tokens of requests.

    `step` is the number of the latest step that was scheduled, from 0.
    """
    name = f" (request {difference.names[0]!r})" if difference.names else ""
    return (
        f"the schedulers differ in step {step} at {difference.path}{name}: "
        f"vLLM's has {shown(difference.reference, difference.field)}, "
        f"sparksched's {shown(difference.candidate, difference.field)}"
    )
