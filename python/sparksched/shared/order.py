"""What a request says of its place in the order that `SPARKSCHED_ORDER` asks for.

The order itself is in `rust/core/src/order.rs`.
"""

import hashlib
from typing import Any

from vllm.exceptions import VLLMValidationError

from sparksched.shared.queue_timeout import seconds_of


def hints_of(request: Any) -> tuple[str, float | None]:
    """Read a request's tenant, and in how many seconds its first token is due: `ttft_s`.

    The tenant is the first of these that the request has: `vllm_xargs.tenant`, its LoRA adapter,
    a digest of its cache salt, and its session, which a gateway can set by the header
    `X-Session-ID`. All that have none are of one tenant, whose name is empty.

    Args:
        request: A `Request`, or its `EngineCoreRequest`.

    Raises:
        VLLMValidationError: for a tenant that is no short text, or a time that is no number of
            seconds.

    """
    arguments = getattr(request.sampling_params, "extra_args", None) or {}
    tenant = arguments.get("tenant")
    if tenant is None:
        tenant = _tenant_of(request)
    elif not isinstance(tenant, str) or not 0 < len(tenant) <= 256:
        text = "tenant in vllm_xargs is not a text of 1 to 256 characters"
        raise VLLMValidationError(text, parameter="tenant")
    return tenant, seconds_of(request.sampling_params, "ttft_s")


def _tenant_of(request: Any) -> str:
    if request.lora_request is not None:
        return str(request.lora_request.lora_name)
    if request.cache_salt:
        # A salt is a secret, and a tenant's name is a label of metrics.
        return f"salt-{hashlib.sha256(request.cache_salt.encode()).hexdigest()[:12]}"
    return str(getattr(request, "session_id", None) or "")
