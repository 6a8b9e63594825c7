"""How long a request may wait to be scheduled for the first time, and how its client is told."""

from typing import Any, Final

from vllm.exceptions import VLLMValidationError
from vllm.v1.engine import EngineCoreOutput

from sparksched.environment import MAX_QUEUE_TIMEOUT_S

ARGUMENT: Final = "queue_timeout_s"
"""What a client limits its own request with, in `vllm_xargs`."""

CODE: Final = "queue_timeout"
"""The stop reason beside the finish reason `error`, and the code where an output has an error."""


def outputs_say_why() -> bool:
    """Return whether an engine's outputs have a field for errors, which front ends pass on."""
    return "error" in EngineCoreOutput.__struct_fields__


def message(waited_s: float | None) -> str:
    """Return what the client of a request is told that has waited for too long, None if unknown."""
    how_long = "" if waited_s is None else f"for {waited_s:.1f} s "
    return (
        f"The request has waited {how_long}in the engine's queue, longer than it may. "
        "Please try again later."
    )


def seconds_of(sampling_params: Any, argument: str = ARGUMENT) -> float | None:
    """Return a time that a request gives in `vllm_xargs`, in seconds; None if it doesn't.

    Args:
        sampling_params: vLLM's `SamplingParams`, or None for a pooling request.
        argument: Its name there.

    Raises:
        VLLMValidationError: if it is no number of seconds, a day at most.

    """
    seconds = (getattr(sampling_params, "extra_args", None) or {}).get(argument)
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if seconds is not None and not (is_number and 0 < seconds <= MAX_QUEUE_TIMEOUT_S):
        raise VLLMValidationError(
            f"{argument}={seconds!r} in vllm_xargs is not a number of seconds above 0, "
            f"{MAX_QUEUE_TIMEOUT_S:g} at most",
            parameter=argument,
        )
    return None if seconds is None else float(seconds)
