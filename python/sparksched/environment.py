"""The environment variables that select and configure sparksched."""

import math
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeVar, get_args

SCHEDULER = "VLLM_SCHEDULER"
STRICT = "SPARKSCHED_STRICT"
TRANSPORT = "SPARKSCHED_TRANSPORT"
RING_MIB = "SPARKSCHED_RING_MIB"
STUCK_AFTER_S = "SPARKSCHED_STUCK_AFTER_S"
QUEUE_TIMEOUT_S = "SPARKSCHED_QUEUE_TIMEOUT_S"
FRONT_END = "SPARKSCHED_FRONT_END"
VERIFY = "SPARKSCHED_VERIFY"
RECORD = "SPARKSCHED_RECORD"
METRICS = "SPARKSCHED_METRICS"
MAX_STALL_MS = "SPARKSCHED_MAX_STALL_MS"
MAX_SLOWDOWN = "SPARKSCHED_MAX_SLOWDOWN"
PACING_LOG = "SPARKSCHED_PACING_LOG"
ORDER = "SPARKSCHED_ORDER"
WEIGHTS = "SPARKSCHED_WEIGHTS"
DEFAULT_TTFT_S = "SPARKSCHED_DEFAULT_TTFT_S"
AGING_S = "SPARKSCHED_AGING_S"

VARIABLES: Final[tuple[str, ...]] = tuple(
    it for name, it in list(globals().items()) if name.isupper()
)
"""The names of all of them: the constants above."""

Transport = Literal["auto", "shm", "zmq", "libzmq"]
OrderKind = Literal["fair", "deadline", "aging"]
Verification = Literal["1", "stop"]

_Value = TypeVar("_Value", bound=str)

_VLLM = "vllm"
_SPARKSCHED = "sparksched"
_KNOWN_SCHEDULERS = (_VLLM, _SPARKSCHED)

_MAX_RING_MIB = 1024

MAX_QUEUE_TIMEOUT_S = 86_400.0

DEFAULT_MAX_STALL_MS = 200.0
MAX_STALL_BOUNDS_MS = (1.0, 60_000.0)
DEFAULT_MAX_SLOWDOWN = 2.5
MAX_SLOWDOWN_BOUNDS = (1.0, 100.0)

_WEIGHT_BOUNDS = (0.01, 1000.0)

DEFAULT_RECORD_BYTES = 256 << 20
_MIN_RECORD_BYTES = 1 << 16
_MAX_RECORD_BYTES = 1 << 40


class Pacing(NamedTuple):
    """How long prompts are to be paced."""

    max_stall_s: float
    """How long a step with prompts may take while others generate."""
    max_slowdown: float
    """How many times as late as without pacing a long prompt's first token may come."""
    log: str | None
    """A file for what was decided in each step."""


def is_set() -> bool:
    """Whether `VLLM_SCHEDULER` is in the environment, with whatever value."""
    return SCHEDULER in os.environ


def is_selected() -> bool:
    """Whether `VLLM_SCHEDULER` asks for sparksched; unset and empty mean vLLM's own."""
    return _choice(SCHEDULER, "scheduler", _KNOWN_SCHEDULERS, _VLLM) == _SPARKSCHED


def is_strict() -> bool:
    """Whether `SPARKSCHED_STRICT` turns the fallback to vLLM's own scheduler into an error."""
    return _choice(STRICT, "value", ("0", "1"), "0") == "1"


def transport() -> Transport:
    """How `SPARKSCHED_TRANSPORT` wants API server and engine to talk: `auto` if it doesn't say."""
    return _choice(TRANSPORT, "transport", get_args(Transport), "auto")


def replaces_front_end() -> bool:
    """Whether API servers process outputs and metrics in our loop: `SPARKSCHED_FRONT_END`."""
    return _choice(FRONT_END, "front end", _KNOWN_SCHEDULERS, _SPARKSCHED) == _SPARKSCHED


def verification() -> Verification | None:
    """Whether `SPARKSCHED_VERIFY` has steps verified, and stops at a difference; None if not."""
    kinds = ("0", *get_args(Verification))
    value = _choice(VERIFY, "kind of verification", kinds, "0")
    return None if value == "0" else value


def shows_metrics() -> bool:
    """Whether `/metrics` has sparksched's own series, too: `SPARKSCHED_METRICS`."""
    return _choice(METRICS, "value", ("0", "1"), "1") == "1"


def ring_bytes() -> int:
    """Bytes of each ring: `SPARKSCHED_RING_MIB`, rounded up to a power of two."""
    value = os.environ.get(RING_MIB) or "8"
    mib = int(value) if value.isascii() and value.isdigit() else 0
    if not 1 <= mib <= _MAX_RING_MIB:
        raise ValueError(f"{RING_MIB}={value!r} is not a whole number from 1 to {_MAX_RING_MIB}")
    return 1 << (mib - 1).bit_length() + 20


def stuck_after_s() -> float:
    """Seconds after which a process or a queue that stands still is reported.

    A full ring gives an error then.
    """
    return _number(STUCK_AFTER_S, "a number of seconds", 10.0, (0.1, 3600.0))


def queue_timeout_s() -> float | None:
    """Seconds that a request may wait to be scheduled for the first time; None for ever."""
    if not os.environ.get(QUEUE_TIMEOUT_S):
        return None
    bounds = (0.1, MAX_QUEUE_TIMEOUT_S)
    return _number(QUEUE_TIMEOUT_S, "a number of seconds", MAX_QUEUE_TIMEOUT_S, bounds)


def pacing() -> Pacing | None:
    """How long prompts are paced; None if neither stall nor slowdown is set.

    Raises:
        ValueError: for a value that is no number within its bounds, or a log for which there is no
            folder.

    """
    max_stall_ms = _number(
        MAX_STALL_MS, "a number of milliseconds", DEFAULT_MAX_STALL_MS, MAX_STALL_BOUNDS_MS
    )
    max_slowdown = _number(
        MAX_SLOWDOWN, "a number of times", DEFAULT_MAX_SLOWDOWN, MAX_SLOWDOWN_BOUNDS
    )
    log = os.environ.get(PACING_LOG) or None
    if log is not None:
        _refuse_no_new_file(PACING_LOG, log, log)
    if not os.environ.get(MAX_STALL_MS) and not os.environ.get(MAX_SLOWDOWN):
        return None
    return Pacing(max_stall_ms / 1e3, max_slowdown, log)


class Order(NamedTuple):
    """In which order requests come in."""

    kind: OrderKind
    weights: dict[str, float]
    """Of tenants; others weigh 1. For `fair`."""
    seconds: float
    """To the first token, for `deadline`; that a priority of 1 counts as, for `aging`."""


def order() -> Order | None:
    """In which order requests come in: `SPARKSCHED_ORDER`; None for vLLM's.

    Raises:
        ValueError: for an unknown order, or a weight or time that isn't within its bounds.

    """
    weights = _weights()
    ttft_s, aging_s = (
        _number(name, "a number of seconds", 10.0, (0.001, 86_400.0))
        for name in (DEFAULT_TTFT_S, AGING_S)
    )
    if not os.environ.get(ORDER):
        return None
    kind = _choice(ORDER, "order", get_args(OrderKind), "fair")
    return Order(kind, weights, ttft_s if kind == "deadline" else aging_s)


def _weights() -> dict[str, float]:
    """Return what tenants weigh: `SPARKSCHED_WEIGHTS=gold=4,free=1`."""
    value = os.environ.get(WEIGHTS, "")
    least, most = _WEIGHT_BOUNDS
    pairs = [part.rpartition("=") for part in value.split(",") if part]
    with suppress(ValueError):
        weights = {name: float(number) for name, _, number in pairs}
        if all(name and least <= weight <= most for name, weight in weights.items()):
            return weights
    raise ValueError(
        f"{WEIGHTS}={value!r} is not a list of NAME=WEIGHT with weights from {least:g} to {most:g}"
    )


class Recording(NamedTuple):
    """What `SPARKSCHED_RECORD` asks for."""

    path: str
    """The file that the scheduler is recorded to."""
    max_bytes: int = DEFAULT_RECORD_BYTES
    """Where it ends, and serving goes on."""


def recording() -> Recording | None:
    """Return what is to be recorded: `SPARKSCHED_RECORD=FILE[,bytes=N]`; None for nothing.

    Raises:
        ValueError: if the file's folder is not there or not to be written to, or for an option
            that isn't known.

    """
    value = os.environ.get(RECORD)
    if not value:
        return None
    path, comma, option = value.partition(",")
    _refuse_no_new_file(RECORD, value, path)
    name, _, number = option.partition("=")
    if not comma:
        return Recording(path)
    size = int(number) if name == "bytes" and re.fullmatch("[0-9]{1,19}", number) else 0
    if not _MIN_RECORD_BYTES <= size <= _MAX_RECORD_BYTES:
        raise ValueError(
            f"{RECORD}={value!r}: behind the file, which has no comma in its name, only ',bytes=N' "
            f"is allowed, with N from {_MIN_RECORD_BYTES} to {_MAX_RECORD_BYTES}"
        )
    return Recording(path, size)


def file_of_engine(name: str, index: int) -> Path:
    """Return the path of an engine's own file: all but the first of several add their index."""
    return Path(name.replace("%p", str(os.getpid())) + (f".{index}" if index else ""))


def _refuse_no_new_file(name: str, value: str, path: str) -> None:
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise ValueError(f"{name}={value!r} is in no folder: there is no {folder!r}")
    if os.path.isdir(path) or not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{name}={value!r} names no file that can be written")


def _number(name: str, what: str, default: float, bounds: tuple[float, float]) -> float:
    """Return the value of a variable that is a number within bounds."""
    value = os.environ.get(name) or str(default)
    least, most = bounds
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not least <= number <= most:
        raise ValueError(f"{name}={value!r} is not {what} from {least:g} to {most:g}")
    return number


def _choice(name: str, what: str, allowed: Sequence[_Value], default: _Value) -> _Value:
    """Return the value of a variable that is one of a few; unset and empty mean the default."""
    value = os.environ.get(name) or default
    for known in allowed:
        if value == known:
            return known
    *others, last = map(repr, allowed)
    raise ValueError(
        f"{name}={value!r} names no known {what}; allowed are {', '.join(others)} and {last}"
    )


READERS: Final[tuple[Callable[[], object], ...]] = (
    is_selected,
    is_strict,
    transport,
    replaces_front_end,
    verification,
    shows_metrics,
    ring_bytes,
    stuck_after_s,
    queue_timeout_s,
    pacing,
    order,
    recording,
)
"""All that read a variable: each raises a ValueError that names what is wrong with it."""
