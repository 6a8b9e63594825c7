"""What sparksched keeps of one engine: `engine.sparksched`.

vLLM loads plugins within its engine's constructor. So the constructor can't be replaced any more,
and it tells neither the scheduler nor the hasher which engine they belong to. The first function of
ours that gets the engine as an argument makes the context; that is after construction. What the
scheduler tells the hasher before that goes through the thread: see `hashing`.
"""

import sys
import threading
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from sparksched import _core
    from sparksched.engine.queue_watch import QueueWatch
    from sparksched.engine.scheduler import NativeScheduler
    from sparksched.shared.offer import Offer

_ATTRIBUTE = "sparksched"


class EngineContext:
    """What functions that are replaced in an engine share."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = _if_native(scheduler)
        """The engine's scheduler, if it is native or verified; None if it is vLLM's own."""
        self.arrival = threading.Lock()
        """Held while a request is prepared."""
        self.offer: Offer | None = None
        """What the engine tells its clients; None until its input thread starts."""
        self.transport: Any = None
        """Its `ClientLinks`; None if vLLM's sockets are all that it has."""
        self.card: BinaryIO | None = None
        """What its metrics are found by, as long as this is open."""
        self.meters: _core.EngineMeters | None = None
        """Its page of counters, whose descriptor is open as long as this lives."""
        self.queue_watch: QueueWatch | None = None
        """Who looks whether its queue moves; None before its input thread starts."""


def _if_native(scheduler: Any) -> "NativeScheduler | None":
    """Return a native scheduler; None for vLLM's own.

    Its module isn't imported for that: under a vLLM that runs its own it may not be possible.
    """
    module = sys.modules.get("sparksched.engine.scheduler")
    return (
        scheduler if module is not None and isinstance(scheduler, module.NativeScheduler) else None
    )


def context_of(engine: Any) -> EngineContext:
    """Return the context of an `EngineCore`; make it if there is none."""
    context: EngineContext | None = getattr(engine, _ATTRIBUTE, None)
    if context is None:
        # Two input threads may be first at once: the one that comes later gets the other's.
        context = vars(engine).setdefault(_ATTRIBUTE, EngineContext(engine.scheduler))
    return context
