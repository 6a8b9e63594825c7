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


class VerificationError(RuntimeError):
    """The schedulers differ, or nothing is verified any more, and the engine was to stop then."""


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
    """Log a difference, or an error that is of neither scheduler.

    Raises:
        VerificationError: if `verification` is "stop".

    """
    error = found if isinstance(found, Exception) else None
    what = found if error is None else "verification has failed"
    logger.error("sparksched: %s; %s.", what, _GOING_ON[verification], exc_info=error)
    if verification == "stop":
        raise VerificationError(f"{what} ({environment.VERIFY}=stop ends the engine)") from error


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
