"""Completes a recording when the loop of its engine ends, before anything else can end the process.

vLLM's engine process only notes signals while its loop runs. After the loop, and before it tears
down, it lets them end the process at once; and one Ctrl-C is more than one signal, since a terminal
sends it to all processes, and the API server ends its engines as well. An engine that fails first
tells the API server, which then ends it. With vLLM's default `--shutdown-timeout 0` an API server
kills its engines as soon as it has signalled them; those that are recorded get a little time.
"""

import functools
from collections.abc import Callable
from typing import Any, Final

from sparksched.compat import patching, seams

_AT_THE_END: Final = "sparksched_at_the_end"
"""An attribute of the scheduler that is recorded, and of no other."""
_GRACE_S: Final = 3.0
"""For which engines are waited for at the most: the two seconds that they wait for the disk."""


def _giving_time(original: patching.Function) -> patching.Function:
    @functools.wraps(original)
    def get_engine_process_shutdown_timeout(
        request_timeout: float | None, process_timeout: float | None
    ) -> float | None:
        seconds: float | None = original(request_timeout, process_timeout)
        # Not if requests have had time to end, and it is over: an engine may still be serving them.
        return _GRACE_S if request_timeout == 0 == seconds else seconds

    return get_engine_process_shutdown_timeout


def prepare_engine() -> None:
    """Replace the loop, if an engine is what is building a scheduler."""
    patching.apply(seams.RECORDED_ENGINE)


def call_at_the_end(scheduler: Any, complete: Callable[[], object]) -> None:
    """Have the engine of this scheduler call a function when its loop has ended."""
    setattr(scheduler, _AT_THE_END, complete)


def _completing_the_recording(original: patching.Function) -> patching.Function:
    @functools.wraps(original)
    def run_busy_loop(self: Any) -> None:
        try:
            original(self)
        finally:
            complete = getattr(self.scheduler, _AT_THE_END, None)
            if complete is not None:
                complete()

    return run_busy_loop
