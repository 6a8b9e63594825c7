"""What users of the front end see of the transport.

A ring that is full, an engine that doesn't run, and streams that catch up with what has piled up.
"""

import asyncio
import functools
import os
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

import vllm.envs
from vllm.exceptions import VLLMServerError
from vllm.v1.engine.exceptions import EngineDeadError

from sparksched.api_server.async_channel import MAX_OUTPUTS
from sparksched.api_server.channel import EngineBusyError
from sparksched.compat import patching
from sparksched.shared import queue_timeout

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.async_llm import AsyncLLM


_CHUNK_SIZE: Final = "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE"
"""vLLM's variable for how many outputs it processes before it gives streams a turn."""

_chunk_size: ContextVar[int | None] = ContextVar("sparksched_chunk_size", default=None)
"""What that variable is to be for the output handler that is being started; None: as it is."""


class EngineStuckError(EngineDeadError):  # type: ignore[misc]
    """The engine's process doesn't run, for example because it was stopped.

    Health checks treat it like a dead engine; unlike that one it may recover.
    """

    def __init__(self, rank: int, seconds: float) -> None:
        VLLMServerError.__init__(
            self, f"engine {rank} is stuck: its process hasn't run for {seconds:.1f} s"
        )


def _forgetting_refused_requests(original: patching.Function) -> patching.Function:
    @functools.wraps(original)
    async def add_request(
        self: "AsyncLLM",
        request: "EngineCoreRequest",
        *args: Any,
        **kwargs: Any,
    ) -> None:
        queue_timeout.own_limit_s(request.sampling_params)
        try:
            await original(self, request, *args, **kwargs)
        except (EngineBusyError, RuntimeError, asyncio.CancelledError):
            # vLLM has registered it, and doesn't expect that sending waits or fails, be it by an
            # internal error of the rings. For n > 1 it does, and cleans up itself.
            await self.abort(request.request_id, internal=True)
            raise

    return add_request


def _catching_up(original: patching.Function) -> patching.Function:
    """Let the outputs of several steps become one of each stream, once they have piled up.

    A stream's next output costs the API server ten times what it costs to add a token to one that
    is still to be taken. vLLM's collectors add them up, but with more than 128 streams none is left
    to add to, because its loop gives streams a turn after each 128 outputs. Here they get it when
    all is processed that the rings have handed over, which `MAX_OUTPUTS` bounds. While nothing
    piles up that is one step, and each token an output of its own.
    """
    _let_calls_choose(vllm.envs.environment_variables)

    @functools.wraps(original)
    def run_output_handler(self: "AsyncLLM") -> None:
        resources = getattr(self.engine_core, "resources", None)
        rings = getattr(resources, "sparksched_rings", None)
        # vLLM calls this with each request; it has something to do the first time.
        starts = self.output_handler is None
        if not starts or rings is None or not rings.channels or _CHUNK_SIZE in os.environ:
            original(self)
            return
        token = _chunk_size.set(MAX_OUTPUTS)  # read by vLLM when it starts the loop
        try:
            original(self)
        finally:
            _chunk_size.reset(token)

    return run_output_handler


def _let_calls_choose(variables: dict[str, Callable[[], Any]]) -> None:
    if not hasattr(variables[_CHUNK_SIZE], patching.MARK):
        variables[_CHUNK_SIZE] = _chosen_by_the_caller(variables[_CHUNK_SIZE])


def _chosen_by_the_caller(original: patching.Function) -> patching.Function:
    """Let a call choose what it reads of the environment, and nobody else beside it."""

    @functools.wraps(original)
    def read() -> int:
        chosen = _chunk_size.get()
        return int(original()) if chosen is None else chosen

    setattr(read, patching.MARK, original)
    return read


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
