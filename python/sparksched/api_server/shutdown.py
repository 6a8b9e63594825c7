"""Fails each request that is in flight when the engine is shut down.

vLLM's `AsyncLLM.shutdown()` has its client report a dead engine, and then cancels the task that
would tell the requests. If the task is cancelled first, they wait for ever.
"""

import contextlib
import functools
from typing import TYPE_CHECKING, Any

from vllm.v1.engine.exceptions import EngineDeadError

from sparksched.compat import patching

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


def _telling_who_is_left(original: patching.Function) -> patching.Function:
    @functools.wraps(original)
    def shutdown(self: "AsyncLLM", *args: Any, **kwargs: Any) -> None:
        try:
            original(self, *args, **kwargs)
        finally:
            # There is none before the first request.
            handler = getattr(self, "output_handler", None)
            if handler is not None:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    handler.get_loop().call_soon_threadsafe(
                        self.output_processor.propagate_error, EngineDeadError()
                    )

    return shutdown
