"""Figures as text. What was not measured is shown as missing, and never as a number."""

import math
import statistics
from collections.abc import Callable, Iterable
from typing import Any

MISSING = "missing"
ARROW = " → "


def dig(row: Any, *path: str) -> Any:
    """Return what lies at a path through nested rows; None if there is nothing."""
    for name in path:
        if not isinstance(row, dict) or name not in row:
            return None
        row = row[name]
    return row


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


def count_text(value: Any) -> str:
    """Return a whole number with all its digits, or what stands for a missing one."""
    number = as_number(value)
    return MISSING if number is None else f"{number:,.0f}"


def text_of(value: Any) -> str:
    """Return three significant digits and all before the point; or that it is missing."""
    number = as_number(value)
    if number is None:
        return MISSING
    size = abs(number)
    if not size or size >= 100:
        return f"{number:,.0f}"
    return f"{number:.{1 if size >= 10 else 2 if size >= 1 else 3}f}"


def pair_text(stock: Any, ours: Any) -> str:
    """Return both sides in one cell."""
    return joined(text_of(stock), text_of(ours))


def joined(stock: str, ours: str) -> str:
    """Return both texts, or one of them if neither is a figure and they say the same."""
    is_same_word = stock == ours and not any(it.isdigit() for it in stock)
    return stock if is_same_word else stock + ARROW + ours


def range_text(values: Iterable[Any], text: Callable[[Any], str] = text_of) -> str:
    """Return the least and the most, each as a text."""
    found = numbers(values)
    if not found:
        return MISSING
    return " to ".join(dict.fromkeys((text(min(found)), text(max(found)))))


def times_text(stock: Any, ours: Any) -> str:
    """Return how many times ours vLLM's is."""
    base, number = as_number(stock), as_number(ours)
    if not base or not number:
        return MISSING
    ratio = base / number
    return f"{ratio:.1f}x" if ratio < 10 else f"{ratio:.0f}x"
