"""Times calls of functions that are there already, for as long as one wants to."""

import threading
import time
from collections.abc import Callable
from typing import Any

Function = Callable[..., Any]


class Replacements:
    """Attributes of objects and classes that are replaced, and put back together."""

    def __init__(self) -> None:
        """Begin with none."""
        self._undo: list[Callable[[], None]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Function], Function]) -> None:
        """Put `make(original)` into an object's or a class's attribute."""
        is_own = name in vars(owner)
        former = vars(owner).get(name)
        setattr(owner, name, make(getattr(owner, name)))

        def undo() -> None:
            if is_own:
                setattr(owner, name, former)
            else:
                delattr(owner, name)

        self._undo.append(undo)

    def put_back(self) -> None:
        """Undo all of it."""
        while self._undo:
            self._undo.pop()()


class WaitTimer:
    """For how long one thread has waited so far, and what that took of a processor."""

    def __init__(self) -> None:
        """Time calls of the thread that calls this."""
        self.ns = 0
        self.cpu_ns = 0
        self._thread = threading.get_ident()
        self._is_waiting = False

    def timed(self, wait: Function) -> Function:
        """Return the function with its calls timed, if this is the thread.

        A call within another one that is timed is a part of that.
        """

        def timed_wait(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread or self._is_waiting:
                return wait(*args, **kwargs)
            self._is_waiting = True
            start_ns, start_cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
            try:
                return wait(*args, **kwargs)
            finally:
                self.ns += time.perf_counter_ns() - start_ns
                self.cpu_ns += time.thread_time_ns() - start_cpu_ns
                self._is_waiting = False

        return timed_wait
