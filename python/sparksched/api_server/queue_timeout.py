"""Answers a request that waited too long in the engine's queue: HTTP 503, and when to try again."""

import math
import time
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from starlette.exceptions import HTTPException
from vllm.exceptions import GenerationError, GracefulHTTPError
from vllm.v1.engine import FinishReason

if TYPE_CHECKING:
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState
    from vllm.v1.metrics.stats import IterationStats

_MAX_RETRY_AFTER_S: Final = 60


class QueueTimeoutError(HTTPException, GracefulHTTPError, GenerationError):  # type: ignore[misc]
    """HTTP 503 with `Retry-After`.

    vLLM passes it on because it is a `GracefulHTTPError`. Its handler for these sets no header;
    FastAPI's for Starlette's `HTTPException`, the first class that has a handler, does. In a stream
    vLLM logs no traceback of a `GenerationError`.
    """

    def __init__(self, waited_s: float) -> None:
        message = (
            f"The request has waited for {waited_s:.1f} s in the engine's queue, longer than it "
            "may. Please try again later."
        )
        retry_after_s = max(1, min(math.ceil(waited_s), _MAX_RETRY_AFTER_S))
        status = HTTPStatus.SERVICE_UNAVAILABLE
        GracefulHTTPError.__init__(self, message, status)
        headers = {"Retry-After": str(retry_after_s)}
        HTTPException.__init__(self, status, message, headers)

    def __str__(self) -> str:
        return str(self.message)


def fail(
    processor: "OutputProcessor",
    state: "RequestState",
    iteration_stats: "IterationStats | None",
) -> list[str]:
    """Fail the stream of a request that has a queue; return the ids that are to be aborted.

    Of a request with `n` outputs all are failed: an HTTP answer is of all of them.
    """
    arrival_time = 0.0 if state.stats is None else state.stats.arrival_time
    error = QueueTimeoutError(time.time() - arrival_time)
    processor._update_stats_from_finished(state, FinishReason.ERROR, iteration_stats)
    aborted: list[str] = []
    if state.parent_req is None:
        processor._finish_request(state)
    else:
        aborted = processor.abort_requests([state.parent_req.request_id], internal=True)
        aborted.remove(state.request_id)
    # Last: it takes the place of whatever waits there.
    state.queue.put(error)
    return aborted
