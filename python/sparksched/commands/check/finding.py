"""One line of the answer."""

import enum
import functools
from dataclasses import dataclass


class Level(enum.StrEnum):
    """How good that is."""

    OK = "ok"
    WARNING = "warning"
    """It works, but not as well as it could."""
    PROBLEM = "problem"
    """sparksched would not schedule, or vLLM would not start."""


class ArgumentError(ValueError):
    """vLLM doesn't take these arguments."""


@dataclass(frozen=True)
class Finding:
    """What was found out about something."""

    level: Level
    topic: str
    text: str
    advice: str = ""
    """What to do, if there is anything to do."""


ok, warning, problem = (functools.partial(Finding, level) for level in Level)
