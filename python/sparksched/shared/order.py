"""What a request says of its place in the order that `SPARKSCHED_ORDER` asks for.

The order itself is in `rust/core/src/order.rs`.
"""

import hashlib
from typing import Any, NamedTuple

from vllm.exceptions import VLLMValidationError


class OrderHints(NamedTuple):
    """What `SchedulerCore.add_request` is told."""

    tenant: str = ""
    """Empty for requests that don't say: they are of one tenant."""
    ttft_s: float | None = None
    """When the first token is due, in seconds from the arrival: of that name in `vllm_xargs`."""


def hints_of(request: Any) -> OrderHints:
    """Read whose a request is, and when its first token is due.

    The tenant is the first of these that the request has: `vllm_xargs.tenant`, its LoRA adapter,
    a digest of its cache salt, and its session, which a gateway can set by the header
    `X-Session-ID`.

    Args:
        request: A `Request`, or its `EngineCoreRequest`.

    Raises:
        VLLMValidationError: for a tenant that is no short text, or a time that is no number of
            seconds.

    """
    arguments = getattr(request.sampling_params, "extra_args", None) or {}
    tenant, ttft_s = arguments.get("tenant"), arguments.get("ttft_s")
    if tenant is None:
        tenant = _tenant_of(request)
    elif not isinstance(tenant, str) or not 0 < len(tenant) <= 256:
        raise _refusal("tenant", "a text of 1 to 256 characters")
    is_number = isinstance(ttft_s, int | float) and not isinstance(ttft_s, bool)
    if ttft_s is not None and not (is_number and 0 < ttft_s <= 86_400):
        raise _refusal("ttft_s", "a number of seconds above 0, 86400 at most")
    return OrderHints(tenant, ttft_s)


def _tenant_of(request: Any) -> str:
    if request.lora_request is not None:
        return str(request.lora_request.lora_name)
    if request.cache_salt:
        # A salt is a secret, and a tenant's name is a label of metrics.
        return f"salt-{hashlib.sha256(request.cache_salt.encode()).hexdigest()[:12]}"
    return str(getattr(request, "session_id", None) or "")


def _refusal(argument: str, expected: str) -> VLLMValidationError:
    return VLLMValidationError(f"{argument} in vllm_xargs is not {expected}", parameter=argument)
