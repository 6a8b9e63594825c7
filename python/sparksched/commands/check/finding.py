"""One line of the answer."""

import enum
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

    topic: str
    level: Level
    text: str
    advice: str = ""
    """What to do, if there is anything to do."""


def ok(topic: str, text: str) -> Finding:
    """Return a finding that is as it should be."""
    return Finding(topic, Level.OK, text)


def warning(topic: str, text: str, advice: str) -> Finding:
    """Return a finding that could be better."""
    return Finding(topic, Level.WARNING, text, advice)


def problem(topic: str, text: str, advice: str) -> Finding:
    """Return a finding that keeps sparksched from scheduling."""
    return Finding(topic, Level.PROBLEM, text, advice)
