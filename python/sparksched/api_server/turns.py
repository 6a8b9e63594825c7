"""Turns of an event loop that are left to its other work while outputs come late.

A new request needs several turns until it is sent, its connection alone one: uvloop accepts one in
each. A loop that is behind its engine makes long turns, and few. So after outputs that came late
some turns pass before the next ones are taken: many if they are short, and never for longer than
the outputs themselves took.
"""

import time
from typing import Final

OUTPUTS_PER_TURN: Final = 16

LATE_S: Final = 0.002
"""What outputs wait at most, in seconds, while the loop keeps up."""

MOST_S: Final = 0.05
"""For how long nothing is taken at most, in seconds."""

_OWN_TURNS: Final = 2
"""In the first turn after outputs are taken they are processed, in the second streams get them."""


class OthersTurns:
    """What one reader of outputs leaves to others."""

    def __init__(self) -> None:
        self._num_owed = 0
        self._num_passed = 0
        self._taken_at = 0.0
        self._since: float | None = None
        self._until = 0.0

    def owe(self, num_outputs: int, timestamp: float) -> None:
        """Note outputs that are taken; the engine made them at `timestamp`, a monotonic time."""
        # What they have waited for others' turns would otherwise make them late for ever.
        waited_until = time.monotonic() if self._since is None else self._since
        if waited_until - timestamp > LATE_S:
            self._num_owed += num_outputs // OUTPUTS_PER_TURN

    def begin(self) -> None:
        """Note that all is taken which is taken in this turn."""
        self._num_passed = 0
        self._taken_at = time.monotonic()
        self._since = None

    def take_next(self) -> bool:
        """Return whether this turn is one of the others'."""
        if not self._num_owed:
            return False
        self._num_passed += 1
        if self._num_passed <= _OWN_TURNS:
            return True
        now = time.monotonic()
        if self._since is None:
            self._since = now
            self._until = now + min(now - self._taken_at, MOST_S)
        if now >= self._until:
            self._num_owed = 0
            return False
        self._num_owed -= 1
        return True
