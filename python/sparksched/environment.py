"""The environment variables that select and configure sparksched."""

import os
from collections.abc import Iterable

SCHEDULER = "VLLM_SCHEDULER"
STRICT = "SPARKSCHED_STRICT"

_VLLM = "vllm"
_SPARKSCHED = "sparksched"
_KNOWN_SCHEDULERS = (_VLLM, _SPARKSCHED)

_SWITCH_VALUES = {"0": False, "false": False, "1": True, "true": True}


def is_set() -> bool:
    """Whether `VLLM_SCHEDULER` is in the environment, with whatever value."""
    return SCHEDULER in os.environ


def is_selected() -> bool:
    """Whether `VLLM_SCHEDULER` asks for sparksched; unset and empty mean vLLM's own."""
    value = os.environ.get(SCHEDULER) or _VLLM
    if value not in _KNOWN_SCHEDULERS:
        raise ValueError(
            f"{SCHEDULER}={value!r} names no known scheduler; "
            f"allowed are {_alternatives(_KNOWN_SCHEDULERS)}"
        )
    return value == _SPARKSCHED


def is_strict() -> bool:
    """Whether `SPARKSCHED_STRICT` turns the fallback to vLLM's own scheduler into an error."""
    value = os.environ.get(STRICT) or "0"
    try:
        return _SWITCH_VALUES[value.lower()]
    except KeyError:
        raise ValueError(
            f"{STRICT}={value!r} is not a switch; allowed are {_alternatives(_SWITCH_VALUES)}"
        ) from None


def _alternatives(values: Iterable[str]) -> str:
    *others, last = (repr(value) for value in values)
    return f"{', '.join(others)} and {last}"
