"""From the steps that the engine's probe has noted to who waits for whom."""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.serving.evaluate import missing, summary

Row = dict[str, Any]
Noted = Sequence[Sequence[int]]
"""What `bench_stop` has returned of an engine."""

SLEPT_US = 20.0
"""Of a wait, without its CPU time: less than this is no sleep. What runs on the thread's processor
meanwhile, or holds the interpreter, looks like sleep, too."""
READY_US, READY_US_PER_REQUEST = 40.0, 0.5
"""What it takes at most to hand over results that are there already, all of it CPU time. On the
machines of bench/results that was 23 µs with one request, and up to 480 with 1,024."""
UNTOLD = "not told: the host may have spun until results were there"


@dataclass(frozen=True)
class Step:
    """One turn of the engine's loop, from one `schedule` to the next. Times in microseconds.

    With asynchronous scheduling the turn launches one step and takes in the one before.
    """

    num_requests: int
    num_tokens: int
    us: float
    cpu_us: float
    """Of the loop's thread."""
    wait_us: float
    wait_cpu_us: float

    @property
    def has_slept(self) -> bool:
        """Whether its thread slept until a result was there."""
        return self.wait_us - self.wait_cpu_us >= SLEPT_US

    @property
    def may_have_spun(self) -> bool:
        """Whether its thread looked for longer at a result than one takes that is there."""
        ready_us = READY_US + READY_US_PER_REQUEST * self.num_requests
        return not self.has_slept and self.wait_us > ready_us


def split_steps(noted: Noted) -> list[Step]:
    """Return the steps that a probe has noted, but for the last one, whose end isn't known."""
    steps = []
    for (num_requests, num_tokens, *starts), (_, _, *ends) in itertools.pairwise(noted):
        spent_us = [(end - start) / 1000 for start, end in zip(starts, ends, strict=True)]
        steps.append(Step(num_requests, num_tokens, *spent_us))
    return steps


def busiest(engines: Sequence[Noted]) -> Noted:
    """Return what was noted of the engine with the most steps: another one may have been idle."""
    return max(engines, key=lambda noted: sum(num_tokens > 0 for _, num_tokens, *_ in noted))


def decoding_steps(noted: Noted) -> list[Step]:
    """Return the steps after the last one that computed prompts, until the last that had tokens."""
    steps = split_steps(noted)
    sizes = [(it.num_requests, it.num_tokens) for it in steps]
    first = 1 + max((at for at, it in enumerate(sizes) if it[1] > it[0]), default=-1)
    last = max((at for at, it in enumerate(sizes) if it[1]), default=-1)
    return steps[first : last + 1]


def evaluate_phases(noted: Noted, num_requests: int, is_async: bool) -> Row:
    """Return how long the steps of an engine take in which so many requests decode, and its waits.

    Args:
        noted: What `bench_stop` has returned.
        num_requests: Requests that decode side by side, also in the step before.
        is_async: Whether a step is launched before the one before has ended.

    """
    steps = [
        step
        for pair in itertools.pairwise(split_steps(noted))
        if all(it.num_requests == it.num_tokens == num_requests for it in pair)
        for step in pair[1:]
    ]
    if not steps:
        return missing("no step was recorded in which all requests decoded")
    return {
        "steps": len(steps),
        "mean_period_us": statistics.fmean(it.us for it in steps),
        "wait_us": summary([it.wait_us for it in steps]),
        "gap_estimate": {"host_late_share": late_share(steps, is_async)},
    }


def late_share(steps: Sequence[Step], is_async: bool) -> float | Row:
    """Return in how many of the steps the GPU had nothing to do until the host launched the next.

    Synchronous: in all. Asynchronous: in none in which the host slept until a result was there
    after it had launched the next step; in all in which the result was there already. Where the
    host may have spun until it was there, its times don't tell.
    """
    waited = [it for it in steps if it.wait_us]
    if not waited:
        return missing("no result was waited for")
    if not is_async:
        return 1.0
    told = [it for it in waited if not it.may_have_spun]
    if 2 * len(told) <= len(waited):
        return missing(UNTOLD)
    return sum(not it.has_slept for it in told) / len(told)
