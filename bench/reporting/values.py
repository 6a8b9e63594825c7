"""Figures as text. What was not measured is shown as missing, and never as a number."""

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

MISSING = "missing"
NOT_AVAILABLE = "not available"
NONE = "none"
"""What stands where nothing was to be measured."""
ARROW = " → "


def dig(row: Any, *path: str) -> Any:
    """Return what lies at a path through nested rows; None if there is nothing."""
    for name in path:
        if not isinstance(row, dict) or name not in row:
            # Why something is missing is said where the path breaks off.
            return row if isinstance(row, dict) and "missing" in row else None
        row = row[name]
    return row


def names_of(row: Any) -> list[str]:
    """Return a row's names, if it is one."""
    return list(row) if isinstance(row, dict) else []


def as_number(value: Any) -> float | None:
    """Return a finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def numbers(values: Iterable[Any]) -> list[float]:
    """Return those that are numbers."""
    return [number for value in values if (number := as_number(value)) is not None]


def median(values: Iterable[Any]) -> float | None:
    """Return the median of those that are numbers, or None if there are none."""
    found = numbers(values)
    return statistics.median(found) if found else None


def why_missing(value: Any) -> str:
    """Return what stands for a value that is no number."""
    reason = value.get("missing") if isinstance(value, dict) else None
    if isinstance(reason, str) and reason.startswith(NOT_AVAILABLE):
        return NOT_AVAILABLE
    return MISSING


def count_text(value: Any) -> str:
    """Return a whole number with all its digits, or what stands for a missing one."""
    number = as_number(value)
    return MISSING if number is None else f"{number:,.0f}"


def text_of(value: Any, unit: str = "", scale: float = 1.0) -> str:
    """Return a number with as many digits as it needs, or what stands for a missing one."""
    number = as_number(value)
    if number is None:
        return why_missing(value)
    return f"{rounded(number * scale)}{unit}"


def rounded(number: float) -> str:
    """Return three significant digits, and all digits before the point."""
    size = abs(number)
    if not size:
        return "0"
    if size >= 100:
        return f"{number:,.0f}"
    digits = 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{number:.{digits}f}"


def pair_text(stock: Any, ours: Any, unit: str = "", scale: float = 1.0) -> str:
    """Return both sides in one cell."""
    return joined(text_of(stock, unit, scale), text_of(ours, unit, scale))


def joined(stock: str, ours: str) -> str:
    """Return both texts, or one of them if neither is a figure and they say the same."""
    is_same_word = stock == ours and not any(it.isdigit() for it in stock)
    return stock if is_same_word else stock + ARROW + ours


def ratio_text(stock: Any, ours: Any) -> str:
    """Return how many times vLLM's figure ours is."""
    base, number = as_number(stock), as_number(ours)
    if base is None or number is None or not base:
        return MISSING
    return f"{number / base:.2f}x"


def spread_text(values: Iterable[Any], unit: str = "") -> str:
    """Return the median of several rounds, and the least and most of them."""
    found = numbers(values)
    if not found:
        return MISSING
    middle = f"{rounded(statistics.median(found))}{unit}"
    if len(found) == 1:
        return middle
    return f"{middle} ({rounded(min(found))} to {rounded(max(found))})"


def listed(words: Sequence[str]) -> str:
    """Return words as one says them."""
    return ", ".join(words[:-1]) + (" and " if len(words) > 1 else "") + words[-1]
