"""Which requests the engine refuses where they arrive, why, and how long others may wait.

Since vLLM 0.33.0 the client gets the reason. Before, it only learns that its request has failed.
"""

from typing import Any, Final

from vllm.exceptions import VLLMValidationError

from sparksched.environment import QUEUE_TIMEOUT_S
from sparksched.shared import queue_timeout

WAIT_S: Final = "sparksched_wait_s"
"""An attribute of vLLM's `Request`: for how many seconds it may wait to be scheduled, or None."""

HINTS: Final = "sparksched_order_hints"
"""The same: what it has said of its place in the order, read where it has arrived."""


class UnsupportedRequestError(VLLMValidationError, ValueError):  # type: ignore[misc]
    """A request that the Rust core can't serve."""


def refuse_limited_time(request: Any, limit_s: float | None) -> None:
    """Check that a request may wait as long as it takes: nobody would end it.

    Raises:
        UnsupportedRequestError: if its time in the queue is limited.

    """
    if limit_s is not None:
        raise UnsupportedRequestError(
            f"request {request.request_id} may wait for {limit_s:g} s only, and an engine in the "
            f"caller's own process gives up none: set VLLM_ENABLE_V1_MULTIPROCESSING=1, or neither "
            f"{QUEUE_TIMEOUT_S} nor {queue_timeout.ARGUMENT}"
        )


def refuse_unsupported_inputs(
    request: Any, *, takes_encoder_inputs: bool, takes_prompt_embeds: bool
) -> None:
    """Check the inputs of a request, as a message of vLLM's or as the engine's own.

    Raises:
        UnsupportedRequestError: if the model or the Rust core doesn't take them.

    """
    if request.mm_features and not takes_encoder_inputs:
        raise UnsupportedRequestError(
            f"request {request.request_id} has images or the like, but this model takes only text"
        )
    embeds = request.prompt_embeds
    if embeds is not None and not takes_prompt_embeds:
        raise UnsupportedRequestError(
            f"request {request.request_id} has prompt embeddings, but the server was started "
            "without --enable-prompt-embeds"
        )
    if not request.prompt_token_ids and (embeds is None or not len(embeds)):
        raise UnsupportedRequestError(
            f"request {request.request_id} is a request without a prompt, which is not supported "
            "by sparksched; start the server with VLLM_SCHEDULER=vllm"
        )
