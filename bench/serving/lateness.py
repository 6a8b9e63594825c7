"""Why some calls take much longer than most: collections, a thread that didn't run, or work."""

import statistics
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.serving.evaluate import missing
from bench.serving.garbage import Collection
from bench.serving.timers import Span

Row = dict[str, Any]

LATE = 2.0
"""A call is late if it takes so many times the median. Above p99 there would always be one in a
hundred, even if nothing is wrong, and with a few hundred messages only two or three of many."""
GENERATIONS = (0, 1, 2)
NOBODY = "no call was late"


class Call(Span):
    """One call on the event loop's thread."""


@dataclass(frozen=True)
class Parts:
    """What a call's time went to."""

    collecting_ns: float
    """While any thread collected."""
    stopped_ns: float
    """While its thread didn't run, and nothing was collected. A hypervisor's pauses are in it only
    where it tells the guest of them; page faults only if they have to wait."""


def evaluate_collections(collections: Sequence[Collection], calls: Sequence[Call]) -> Row:
    """Return number and length of the collections by generation, and how many held up a call."""
    return {
        str(generation): _evaluate_generation(
            [it for it in collections if it.generation == generation], calls
        )
        for generation in GENERATIONS
    }


def _evaluate_generation(collections: Sequence[Collection], calls: Sequence[Call]) -> Row:
    longest_ns = max((it.wall_ns for it in collections), default=None)
    within = {it for call in calls for it in _during(call, collections)}
    return {
        "count": len(collections),
        "within_calls": len(within),
        "total_ms": sum(it.wall_ns for it in collections) / 1e6,
        "longest_ms": missing("there was none") if longest_ns is None else longest_ns / 1e6,
    }


def evaluate_late(calls: Sequence[Call], collections: Sequence[Collection]) -> Row:
    """Return how many calls took at least `LATE` times the median, and what the more of it was.

    The shares are of the time beyond the median that all of these calls took together, and add up
    to 1. What a part takes in the median call is no reason to be late.
    """
    if not calls:
        return missing("nothing was recorded")
    parts = [_parts(it, collections) for it in calls]
    usual_ns = statistics.median(it.wall_ns for it in calls)
    usual_collecting_ns = statistics.median(it.collecting_ns for it in parts)
    usual_stopped_ns = statistics.median(it.stopped_ns for it in parts)
    count = 0
    extra_ns = collecting_ns = stopped_ns = 0.0
    for call, part in zip(calls, parts, strict=True):
        more_ns = call.wall_ns - usual_ns
        if call.wall_ns < LATE * usual_ns or not more_ns:
            continue
        more_collecting_ns = min(more_ns, max(0.0, part.collecting_ns - usual_collecting_ns))
        more_stopped_ns = max(0.0, part.stopped_ns - usual_stopped_ns)
        count += 1
        extra_ns += more_ns
        collecting_ns += more_collecting_ns
        stopped_ns += min(more_ns - more_collecting_ns, more_stopped_ns)

    def share(part_ns: float) -> Row | float:
        return part_ns / extra_ns if count else missing(NOBODY)

    return {
        "calls": len(calls),
        "count": count,
        "extra_ms": extra_ns / 1e6,
        "collecting_share": share(collecting_ns),
        "stopped_share": share(stopped_ns),
        "working_share": share(extra_ns - collecting_ns - stopped_ns),
    }


def _parts(call: Call, collections: Sequence[Collection]) -> Parts:
    during = _during(call, collections)
    collecting_ns = sum(
        min(call.end_ns, it.end_ns) - max(call.start_ns, it.start_ns) for it in during
    )
    # Of the time without CPU time, what passed while others collected has its reason already.
    asleep_ns = collecting_ns - sum(it.cpu_ns for it in during)
    return Parts(collecting_ns, max(0.0, call.wall_ns - call.cpu_ns - asleep_ns))


def _during(call: Call, collections: Sequence[Collection]) -> Sequence[Collection]:
    """Return which of some collections, that are in order, lie within a call or overlap it."""
    first = bisect_right(collections, call.start_ns, key=lambda it: it.end_ns)
    last = bisect_right(collections, call.end_ns - 1, key=lambda it: it.start_ns)
    return collections[first:last]
