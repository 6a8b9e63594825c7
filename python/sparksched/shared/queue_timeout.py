"""How long a request may wait to be scheduled for the first time, and how its client is told."""

from typing import Any, Final

from vllm.exceptions import VLLMValidationError
from vllm.v1.engine import EngineCoreOutput

from sparksched.environment import MAX_QUEUE_TIMEOUT_S

ARGUMENT: Final = "queue_timeout_s"
"""What a client limits its own request with, in `vllm_xargs`."""

CODE: Final = "queue_timeout"
"""The stop reason beside the finish reason `error`, and the code where an output has an error."""


class QueueTimeoutArgumentError(VLLMValidationError, ValueError):  # type: ignore[misc]
    """A request that limits its time in the queue by something else than seconds."""


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


def own_limit_s(sampling_params: Any) -> float | None:
    """Return for how many seconds a request itself is ready to wait; None if it doesn't say.

    Args:
        sampling_params: vLLM's `SamplingParams`, or None for a pooling request.

    Raises:
        QueueTimeoutArgumentError: if it says something else.

    """
    arguments = getattr(sampling_params, "extra_args", None)
    if not arguments or (limit := arguments.get(ARGUMENT)) is None:
        return None
    is_number = isinstance(limit, int | float) and not isinstance(limit, bool)
    if not is_number or not 0 < limit <= MAX_QUEUE_TIMEOUT_S:
        raise QueueTimeoutArgumentError(
            f"{ARGUMENT}={limit!r} in vllm_xargs is not a number of seconds above 0, "
            f"{MAX_QUEUE_TIMEOUT_S:g} at most"
        )
    return float(limit)
