"""Why a single request is refused where it arrives.

Since vLLM 0.33.0 its client is told; before, it only learns that the request has failed.
"""

from vllm.exceptions import VLLMValidationError


class UnsupportedRequestError(VLLMValidationError, ValueError):  # type: ignore[misc]
    """A request that the Rust core can't serve."""
