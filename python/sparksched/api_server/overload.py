"""What users of the front end see of the transport: a full ring, and an engine that is stopped."""

import asyncio
import functools
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMServerError
from vllm.v1.engine.exceptions import EngineDeadError

from sparksched import environment
from sparksched.api_server.errors import EngineBusyError
from sparksched.compat import patching
from sparksched.shared import queue_timeout
from sparksched.shared.order import hints_of

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.async_llm import AsyncLLM


class EngineStuckError(EngineDeadError):  # type: ignore[misc]
    """The engine's process doesn't run, for example because it was stopped.

    Health checks treat it like a dead engine; unlike that one it may recover.
    """

    def __init__(self, rank: int, seconds: float) -> None:
        VLLMServerError.__init__(
            self, f"engine {rank} is stuck: its process hasn't run for {seconds:.1f} s"
        )


def _forgetting_refused_requests(original: patching.Function) -> patching.Function:
    is_ordered = environment.order() is not None

    @functools.wraps(original)
    async def add_request(
        self: "AsyncLLM",
        request: "EngineCoreRequest",
        *args: Any,
        **kwargs: Any,
    ) -> None:
        queue_timeout.seconds_of(request.sampling_params)
        if is_ordered:
            hints_of(request)
        try:
            await original(self, request, *args, **kwargs)
        except (EngineBusyError, RuntimeError, asyncio.CancelledError):
            # vLLM has registered it, and doesn't expect that sending waits or fails, be it by an
            # internal error of the rings. For n > 1 it does, and cleans up itself.
            await self.abort(request.request_id, internal=True)
            raise

    return add_request


def _checking_rings(original: patching.Function) -> patching.Function:
    @functools.wraps(original)
    async def check_health(self: "AsyncLLM") -> None:
        await original(self)
        resources = getattr(self.engine_core, "resources", None)
        rings = getattr(resources, "sparksched_rings", None)
        stuck = None if rings is None else rings.stuck_engine()
        if stuck is not None:
            raise EngineStuckError(*stuck)

    return check_health
