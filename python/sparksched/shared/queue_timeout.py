"""How long a request may wait to be scheduled for the first time, and how its client is told."""

import math
from typing import Any, Final

from vllm.exceptions import VLLMValidationError

ARGUMENT: Final = "queue_timeout_s"
"""What a client limits its own request with, in `vllm_xargs`."""

STOP_REASON: Final = "queue_timeout"
"""Beside the finish reason `error`, of a request that has waited for too long."""


class QueueTimeoutArgumentError(VLLMValidationError, ValueError):  # type: ignore[misc]
    """A request that limits its time in the queue by something else than seconds."""


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
    if not is_number or not math.isfinite(limit) or limit <= 0:
        raise QueueTimeoutArgumentError(
            f"{ARGUMENT}={limit!r} in vllm_xargs is not a number of seconds above 0"
        )
    return float(limit)
