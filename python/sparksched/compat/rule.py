"""What stands in the way of the native scheduler, and how to see that it does."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

TOO_MANY: Final = 2**31
"""The Rust core counts tokens and requests in 32 bits."""


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A reason for which vLLM's own scheduler has to serve."""

    feature: str
    """The short name under which a user knows the feature."""
    reason: str
    """What is in the way and, if there is one, the way out: one sentence, no full stop."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A feature that is left to vLLM's own scheduler, and how to see that it is in use."""

    feature: str
    reason: str
    applies: Callable[[Any], bool]

    def problem(self) -> Unsupported:
        """Return what it says where it applies."""
        return Unsupported(self.feature, self.reason)
