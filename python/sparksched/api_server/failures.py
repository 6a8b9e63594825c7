"""Errors on their way to whoever waits, where vLLM's entry points lose them or make noise.

Errors of ours are raised into the stream of a request, as vLLM's own are. Most entry points answer
with them. These don't:

| request | vLLM | with these functions |
| --- | --- | --- |
| `/v1/responses`, background | handles errors that are returned; the response stays `queued` | `failed`, with the error |
| the same, streamed | the stream has no end | `response.failed`, and its end |
| `/v1/responses`, streamed | the connection breaks | `response.failed`, and its end |
| `/v1/messages` | logs a traceback of each error | none of a 503 |
"""  # noqa: E501

import contextlib
import functools
import logging
from collections.abc import AsyncGenerator
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from openai.types.responses import ResponseFailedEvent as OpenAIResponseFailedEvent
from pydantic import ValidationError
from vllm.entrypoints.openai.responses.protocol import ResponsesResponse
from vllm.exceptions import GenerationError
from vllm.logger import init_logger

from sparksched.compat import patching

if TYPE_CHECKING:
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses

logger = init_logger("vllm.sparksched")

FAILED: Final = "response.failed"

_MESSAGES_LOGGERS: Final = (
    "vllm.entrypoints.anthropic.api_router",
    "vllm.entrypoints.anthropic.serving",
)


class ResponseFailedEvent(OpenAIResponseFailedEvent):
    """The last event of a response's stream; vLLM has none for this."""

    response: ResponsesResponse


def prepare() -> None:
    """Have `/v1/messages` log no requests that are to be tried again: these are no faults."""
    for name in _MESSAGES_LOGGERS:
        logging.getLogger(name).addFilter(_is_worth_a_line)


def _failing_in_the_background(original: patching.Function) -> patching.Function:
    @functools.wraps(original)
    async def run_background_request(
        self: "OpenAIServingResponses", request: "ResponsesRequest", *args: Any, **kwargs: Any
    ) -> None:
        try:
            await original(self, request, *args, **kwargs)
        except Exception as error:
            await _fail(self, request, error)

    return run_background_request


def _ending_with_the_error(original: patching.Function) -> patching.Function:
    @functools.wraps(original)
    async def responses_stream_generator(
        self: "OpenAIServingResponses", request: "ResponsesRequest", *args: Any, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        response: ResponsesResponse | None = None
        number = -1
        async with contextlib.aclosing(original(self, request, *args, **kwargs)) as events:
            try:
                async for event in events:
                    response = response or event.response  # the first one has it
                    number = event.sequence_number
                    yield event
            except Exception as error:
                stored = await _fail(self, request, error)
                response = stored or response
                if response is None:
                    raise  # before the first event
                yield ResponseFailedEvent(
                    type=FAILED, sequence_number=number + 1, response=_failed(response, error)
                )

    return responses_stream_generator


def _ending_streams_of_the_background(original: patching.Function) -> patching.Function:
    @functools.wraps(original)
    async def responses_background_stream_generator(
        self: "OpenAIServingResponses", *args: Any, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        async with contextlib.aclosing(original(self, *args, **kwargs)) as events:
            async for event in events:
                yield event
                if event.type == FAILED:
                    return  # vLLM's own waits for an end that it knows

    return responses_background_stream_generator


async def _fail(
    serving: "OpenAIServingResponses", request: "ResponsesRequest", error: Exception
) -> ResponsesResponse | None:
    """Note in the store that a response has failed; return it as stored, None if it isn't."""
    if not isinstance(error, GenerationError) and _in_answer(error) is None:
        logger.error("sparksched: response %s failed", request.request_id, exc_info=error)
    async with serving.response_store_lock:
        response: ResponsesResponse | None = serving.response_store.get(request.request_id)
        if response is not None and response.status not in ("completed", "cancelled"):
            response = serving.response_store[response.id] = _failed(response, error)
    return response


def _failed(response: ResponsesResponse, error: Exception) -> ResponsesResponse:
    text = str((_in_answer(error) or {}).get("message") or error) or type(error).__name__
    # The field is OpenAI's. vLLM's class has it commented out, and takes others.
    why = {"code": "server_error", "message": text}
    return response.model_copy(update={"status": "failed", "error": why})


def _in_answer(error: BaseException) -> dict[str, Any] | None:
    """Return the error within a chunk of an answer that vLLM took for something else, or None.

    It makes an event of each chunk, and a chunk with an error isn't one.
    """
    if not isinstance(error, ValidationError):
        return None
    chunk = error.errors()[0]["input"]
    found = chunk.get("error") if isinstance(chunk, dict) else None
    return found if isinstance(found, dict) else None


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if error is None:
        return True
    code = (_in_answer(error) or {}).get("code")
    info = getattr(error, "error_info", None)  # since vLLM 0.33.0
    codes = (code, getattr(info, "code", None), getattr(error, "status_code", None))
    return HTTPStatus.SERVICE_UNAVAILABLE not in codes
