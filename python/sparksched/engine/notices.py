"""What other threads tell the engine's loop."""

import enum


class Notice(enum.Enum):
    """What other threads tell the engine's loop, beside vLLM's request types."""

    CLIENT_ATTACHED = enum.auto()
    CLIENT_GONE = enum.auto()
    CLIENT_BLOCKED = enum.auto()
    BACKLOG_DROPPED = enum.auto()
    FAILED = enum.auto()
    LAUNCHER_GONE = enum.auto()
    WARM_UP = enum.auto()
    QUEUE_TIME_IS_UP = enum.auto()
