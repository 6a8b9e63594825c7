"""What a request says of its place in the order that `SPARKSCHED_ORDER` asks for.

The order itself is in `rust/core/src/order.rs`.
"""

import hashlib
from typing import Any, Final, NamedTuple

from vllm.exceptions import VLLMValidationError

TENANT_ARGUMENT: Final = "tenant"
"""What names a request's tenant, in `vllm_xargs`."""

TTFT_ARGUMENT: Final = "ttft_s"
"""When a request's first token is due, in seconds from its arrival, in `vllm_xargs`."""

_MAX_CHARACTERS: Final = 256
_MAX_TTFT_S: Final = 86_400.0


class OrderHints(NamedTuple):
    """What `SchedulerCore.add_request` is told."""

    tenant: str
    """Empty for requests that don't say: they are of one tenant."""
    ttft_s: float | None


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
    return OrderHints(_tenant(request, arguments), _ttft_s(arguments))


def _tenant(request: Any, arguments: dict[str, Any]) -> str:
    tenant = arguments.get(TENANT_ARGUMENT)
    if tenant is None:
        adapter = request.lora_request
        if adapter is not None:
            return str(adapter.lora_name)
        if request.cache_salt:
            # A salt is a secret, and a tenant's name is a label of metrics.
            return f"salt-{hashlib.sha256(request.cache_salt.encode()).hexdigest()[:12]}"
        return str(getattr(request, "session_id", None) or "")
    if not isinstance(tenant, str) or not 0 < len(tenant) <= _MAX_CHARACTERS:
        raise VLLMValidationError(
            f"{TENANT_ARGUMENT} in vllm_xargs is not a text of 1 to {_MAX_CHARACTERS} characters",
            parameter=TENANT_ARGUMENT,
        )
    return tenant


def _ttft_s(arguments: dict[str, Any]) -> float | None:
    ttft_s = arguments.get(TTFT_ARGUMENT)
    if ttft_s is None:
        return None
    is_number = isinstance(ttft_s, int | float) and not isinstance(ttft_s, bool)
    if not is_number or not 0 < ttft_s <= _MAX_TTFT_S:
        raise VLLMValidationError(
            f"{TTFT_ARGUMENT}={ttft_s!r} in vllm_xargs is not a number of seconds above 0,"
            f" {_MAX_TTFT_S:g} at most",
            parameter=TTFT_ARGUMENT,
        )
    return float(ttft_s)
