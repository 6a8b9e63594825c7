"""What came of a call: a value, or an error."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

Value = TypeVar("Value")


@dataclass(frozen=True)
class Outcome(Generic[Value]):
    """A value, unless there is an error."""

    value: Value | None
    error: Exception | None = None

    def get(self) -> Value:
        """Return the value, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]


def outcome_of(call: Callable[[], Value]) -> Outcome[Value]:
    """Call, and keep what came of it."""
    try:
        return Outcome(call())
    except Exception as error:
        return Outcome(None, error)
