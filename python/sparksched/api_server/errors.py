"""What clients are told that are to try again later: HTTP 503, and when."""

import math
from http import HTTPStatus
from typing import Final

from starlette.exceptions import HTTPException
from vllm.exceptions import GenerationError, GracefulHTTPError

from sparksched.shared import queue_timeout

_MAX_RETRY_AFTER_S: Final = 60


class TryAgainError(HTTPException, GracefulHTTPError, GenerationError):  # type: ignore[misc]
    """HTTP 503 with `Retry-After`: as long as it has taken to give up.

    vLLM passes it on because it is a `GracefulHTTPError`. Its handler for these sets no header;
    FastAPI's for Starlette's `HTTPException`, the first class that has a handler, does. In a stream
    vLLM logs no traceback of a `GenerationError`.
    """

    def __init__(self, message: str, after_s: float) -> None:
        status = HTTPStatus.SERVICE_UNAVAILABLE
        retry_after_s = math.ceil(min(max(after_s, 1), _MAX_RETRY_AFTER_S))
        GracefulHTTPError.__init__(self, message, status)
        HTTPException.__init__(self, status, message, {"Retry-After": str(retry_after_s)})

    def __str__(self) -> str:
        return str(self.message)


class EngineBusyError(TryAgainError):
    """The ring to the engine stays full."""

    def __init__(self, after_s: float) -> None:
        message = f"The engine takes no more messages: it has made no room for {after_s:g} s."
        super().__init__(f"{message} Please try again later.", after_s)


class QueueTimeoutError(TryAgainError):
    """A request has waited too long in the engine's queue."""

    def __init__(self, waited_s: float | None) -> None:
        after_s = _MAX_RETRY_AFTER_S if waited_s is None else waited_s
        super().__init__(queue_timeout.message(waited_s), after_s)


class ShuttingDownError(TryAgainError):
    """A request that comes while an API server answers its last ones."""

    def __init__(self, after_s: float) -> None:
        super().__init__("The server is shutting down. Please try again later.", after_s)
