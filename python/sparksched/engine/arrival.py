"""What happens to a request where it arrives in an engine.

This is the last place where it can be refused without harm to others: an error here ends this
request alone, one from the scheduler would end the engine.
"""

import functools
from typing import TYPE_CHECKING, Any

from sparksched import environment
from sparksched._core import read_prompt
from sparksched.compat import patching
from sparksched.engine.context import context_of
from sparksched.engine.request_errors import HINTS, WAIT_S, refuse_limited_time
from sparksched.shared import queue_timeout

if TYPE_CHECKING:
    from sparksched.engine.scheduler import NativeScheduler


def _checking_one_at_a_time(original: patching.Function) -> patching.Function:
    @functools.wraps(original)
    def preprocess_add_request(self: Any, request: Any) -> Any:
        context = context_of(self)
        # vLLM means this for one thread. Rings and sockets have one each.
        with context.arrival:
            scheduler = context.scheduler
            if scheduler is None:
                return original(self, request)
            scheduler.refuse_unsupported_inputs(request)
            hints = scheduler.order_hints(request)
            wait_s = _time_to_wait_s(scheduler, request)
            if not hasattr(self, "input_queue"):  # no process, and no loop, of its own
                refuse_limited_time(request, wait_s)
            preprocessed = original(self, request)
            setattr(preprocessed[0], WAIT_S, wait_s)
            setattr(preprocessed[0], HINTS, hints)
            if isinstance(request.request_id, str):  # else vLLM's add_request() says so
                read_prompt(preprocessed[0], extra_keys=scheduler.extra_keys)
            return preprocessed

    return preprocess_add_request


def _time_to_wait_s(scheduler: "NativeScheduler", request: Any) -> float | None:
    """Return for how long a request may wait; None for ever.

    Raises:
        VLLMValidationError: if it says itself for how long, but not in seconds.

    """
    limits = (scheduler.queue_timeout_s, queue_timeout.seconds_of(request.sampling_params))
    if request.sampling_params is None and not _pooling_is_told():
        return None
    return min((limit for limit in limits if limit is not None), default=None)


def _pooling_is_told() -> bool:
    """Return whether a front end survives that a pooling request ends without a result.

    vLLM 0.32.0's own loop over outputs ends with it, and then the server.
    """
    return queue_timeout.outputs_say_why() or environment.replaces_front_end()
