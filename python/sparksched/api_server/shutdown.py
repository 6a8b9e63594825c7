"""How an API server shuts down: what is in flight is answered, what comes is refused.

vLLM's `handle_shutdown` (`entrypoints/launchers/launcher.py`) calls `AsyncLLM.shutdown` first, in a
thread. An API server that has started its engines itself waits there for the engines, and these for
their requests. One of several API servers waits for nobody: it would close its sockets at once, and
lose all answers that are in flight, whatever `--shutdown-timeout` says. Here it waits for them.

In the end vLLM's client reports a dead engine, and then cancels the task that would tell the
requests. If the task is cancelled first, they wait for ever. Here they are told.
"""

import asyncio
import contextlib
import functools
import time
from typing import TYPE_CHECKING, Any, Final

from vllm.v1.engine.exceptions import EngineDeadError

from sparksched.api_server.errors import ShuttingDownError
from sparksched.compat import patching

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector

_LOOK_EACH_S: Final = 0.05

_TELLING_S: Final = 1.0
"""Before the launcher kills API servers, so long at most is left to tell who was not answered."""


def _answering_what_is_in_flight(original: patching.Function) -> patching.Function:
    @functools.wraps(original)
    def shutdown(self: "AsyncLLM", timeout: float | None = None) -> None:
        if timeout:
            self.sparksched_shutdown_s = timeout
            _wait_for_answers(self, timeout)
        try:
            original(self, timeout=timeout)
        finally:
            # There is none before the first request.
            handler = getattr(self, "output_handler", None)
            if handler is not None:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    handler.get_loop().call_soon_threadsafe(
                        self.output_processor.propagate_error, EngineDeadError()
                    )

    return shutdown


def _refusing_requests(original: patching.Function) -> patching.Function:
    @functools.wraps(original)
    async def add_request(self: "AsyncLLM", *args: Any, **kwargs: Any) -> "RequestOutputCollector":
        refusal = _refusal(self)
        if refusal is not None:
            raise refusal
        return await original(self, *args, **kwargs)

    return add_request


class _DeadError(property):
    """What vLLM's handlers raise before they add a request, if the engine counts as dead.

    It does as soon as this server has given its answers, and new requests still come.
    """

    def __init__(self, original: property) -> None:
        def dead_error(llm: "AsyncLLM") -> BaseException:
            return _refusal(llm) or original.__get__(llm)

        super().__init__(dead_error)


def _refusal(llm: "AsyncLLM") -> ShuttingDownError | None:
    shutdown_s = getattr(llm, "sparksched_shutdown_s", None)
    return None if shutdown_s is None else ShuttingDownError(shutdown_s)


def _wait_for_answers(llm: "AsyncLLM", timeout_s: float) -> None:
    """Wait until each request has its answer, but not to the last moment."""
    resources = getattr(getattr(llm, "engine_core", None), "resources", None)
    if resources is None or resources.engine_manager is not None:
        return
    with contextlib.suppress(RuntimeError):
        asyncio.get_running_loop()
        return  # to wait here would keep the answers from being made
    rings = getattr(resources, "sparksched_rings", None)
    if rings is not None:
        rings.is_draining = True
    give_up_at = time.monotonic() + timeout_s - min(_TELLING_S, timeout_s / 10)
    while time.monotonic() < give_up_at:
        # Before the first look as well: a request may have been let in a moment ago.
        time.sleep(_LOOK_EACH_S)
        if llm.errored or not llm.output_processor.has_unfinished_requests():
            return
