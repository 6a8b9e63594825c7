"""How requests were split: over engines, and over the batches that take turns in pipeline stages.

A round's speed depends on it. With pipeline stages the split lasts for the whole round: a request
that was first scheduled in an even step decodes in even ones.
"""

import hashlib
import statistics
from collections.abc import Sequence
from typing import Any

from bench.serving.evaluate import missing

Row = dict[str, Any]
Sizes = Sequence[Sequence[int]]
"""Requests and tokens of each step."""


def busiest(engines: Sequence[Row]) -> Row:
    """Return what was recorded of the engine with the most steps: another one may have been idle.

    Args:
        engines: What `bench_stop` has returned of each.

    """
    return max(engines, key=lambda it: sum(tokens > 0 for _, tokens in it["sizes"]))


def decoding_range(sizes: Sizes) -> range:
    """Return the steps after the last one that computed prompts, until the last that had tokens."""
    first = 1 + max((index for index, it in enumerate(sizes) if it[1] > it[0]), default=-1)
    last = max((index for index, it in enumerate(sizes) if it[1]), default=-1)
    return range(first, last + 1)


def turns(sizes: Sizes, num_turns: int) -> list[float] | Row:
    """Return how many requests are in each of the batches that take turns, the largest first."""
    requests = [sizes[index][0] for index in decoding_range(sizes)]
    if len(requests) < 2 * num_turns:
        return missing("there were too few steps without a part of a prompt")
    return sorted(
        (statistics.median(requests[turn::num_turns]) for turn in range(num_turns)), reverse=True
    )


def fingerprints(engines: Sequence[Sizes]) -> list[str]:
    """Return of each engine a digest of its steps' sizes, in order and without empty steps.

    Two are the same if all batches were of the same size, in the same order.
    """
    return [
        hashlib.sha256(str([list(it) for it in sizes if it[0]]).encode()).hexdigest()[:16]
        for sizes in engines
    ]


def splits_text(rounds: Sequence[Row]) -> str:
    """Return in words how the requests of each round were split; empty if they weren't."""
    engines = [it["counters"]["requests_by_engine"] for it in rounds]
    parts = []
    if any(len(it) > 1 for it in engines):
        parts.append("requests by engine: " + ", ".join(_slashed(it.values()) for it in engines))
    stages = [found for it in rounds for found in it.get("turns", [])]
    if stages:
        texts = [_slashed(it) if isinstance(it, list) else it["missing"] for it in stages]
        parts.append("requests in batches that take turns: " + ", ".join(texts))
    return "; ".join(parts)


def _slashed(numbers: Any) -> str:
    return "/".join(f"{number:g}" for number in numbers)
