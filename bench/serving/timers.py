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


class PhaseTimer:
    """When phases of one thread's loop begin and end. Time in a phase within another is its own."""

    def __init__(self) -> None:
        """Time calls of the thread that calls this."""
        self.events: list[tuple[str, int, int, int, int]] = []
        """Phase; start, end and nested phases' time in ns; CPU time without that of nested phases,
        as far as theirs was asked for, in ns; 0 if its own wasn't"""
        self._thread = threading.get_ident()
        self._nested_ns = 0
        self._nested_cpu_ns = 0

    def timed(
        self,
        call: Function,
        phase: str,
        *,
        on_result: Callable[[tuple[Any, ...], Any], None] | None = None,
        with_cpu: bool = False,
    ) -> Function:
        """Return the function with its calls timed, if this is the thread.

        Args:
            call: What to call.
            phase: Its name in `events`.
            on_result: Gets the positional arguments and the result, outside of what is timed.
            with_cpu: Whether to measure CPU time, too, which costs a system call or two.

        """
        clock, events = time.perf_counter_ns, self.events

        def timed_call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return call(*args, **kwargs)
            outer_ns, self._nested_ns = self._nested_ns, 0
            outer_cpu_ns, self._nested_cpu_ns = self._nested_cpu_ns, 0
            begun_cpu_ns = time.thread_time_ns() if with_cpu else 0
            start = clock()
            try:
                result = call(*args, **kwargs)
            finally:
                end = clock()
                nested_cpu_ns = self._nested_cpu_ns
                cpu_ns = time.thread_time_ns() - begun_cpu_ns if with_cpu else nested_cpu_ns
                events.append((phase, start, end, self._nested_ns, cpu_ns - nested_cpu_ns))
                self._nested_ns = outer_ns + end - start
                self._nested_cpu_ns = outer_cpu_ns + cpu_ns
            if on_result is not None:
                on_result(args, result)
            return result

        return timed_call
