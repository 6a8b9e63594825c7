"""From events of the engine's probe to the host's time in each phase of a step."""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.serving.engine_probe import EXECUTE, PEER, PHASES, SCHEDULE, WAIT
from bench.serving.evaluate import missing, summary

Row = dict[str, Any]

SLEPT_US = 20.0
"""Of a wait, without its CPU time: less than this is no sleep. What runs on the thread's processor
meanwhile, or holds the interpreter, looks like sleep, too."""
READY_US, READY_US_PER_REQUEST = 40.0, 0.5
"""What it takes at most to hand over results that are there already, all of it CPU time. On the
machines of bench/results that was 23 µs with one request, and up to 480 with 1,024."""
UNTOLD = "not told: the host may have spun until results were there"
STAGES = "the engine's times don't tell when which pipeline stage has nothing to do"


@dataclass(frozen=True)
class Step:
    """One turn of the engine's loop, from one `schedule` to the next. Times in microseconds.

    With asynchronous scheduling the turn launches one step and takes in the one before.
    """

    num_requests: int
    num_tokens: int
    events: list[tuple[str, float, float]]
    phase_us: dict[str, float]
    """Without what other phases took within them."""
    wait_cpu_us: float

    @property
    def has_slept(self) -> bool:
        """Whether its thread slept until a result was there."""
        return self.phase_us[WAIT] - self.wait_cpu_us >= SLEPT_US

    @property
    def may_have_spun(self) -> bool:
        """Whether its thread looked for longer at a result than one takes that is there."""
        return not self.has_slept and self.phase_us[WAIT] > ready_us(self.num_requests)

    @property
    def start(self) -> float:
        """When `schedule` began."""
        return self.events[0][1]

    def end_of(self, phase: str) -> float | None:
        """When the last call of a phase ended, if there was one."""
        return max((end for name, _, end in self.events if name == phase), default=None)

    def start_of(self, phase: str) -> float | None:
        """When the first call of a phase began, if there was one."""
        return min((start for name, start, _ in self.events if name == phase), default=None)


def ready_us(num_requests: int) -> float:
    """Return for how long one waits, at most, for a result that is there already."""
    return READY_US + READY_US_PER_REQUEST * num_requests


def split_steps(recorded: Row) -> list[Step]:
    """Return the steps that a probe has recorded, without what came before the first."""
    # A call is recorded when it ends: one that waits within it comes first.
    events = sorted(recorded["events"], key=lambda event: event[1])
    numbers = itertools.accumulate(event[0] == SCHEDULE for event in events)
    turns = itertools.groupby(zip(numbers, events, strict=True), key=lambda it: it[0])
    sizes = recorded["sizes"]
    return [
        _step(sizes[number - 1], [event for _, event in turn]) for number, turn in turns if number
    ]


def _step(size: Sequence[int], events: list[Sequence[Any]]) -> Step:
    phase_us = dict.fromkeys(PHASES, 0.0)
    wait_cpu_us = 0.0
    for phase, start, end, nested, cpu in events:
        phase_us[phase] += (end - start - nested) / 1000
        wait_cpu_us += cpu / 1000
    timed = [(phase, start / 1000, end / 1000) for phase, start, end, *_ in events]
    num_requests, num_tokens = size
    return Step(num_requests, num_tokens, timed, phase_us, wait_cpu_us)


def usual_size(recorded: Row) -> int:
    """Return how many requests got one token each in most steps that had any; 0 without such."""
    sizes = [requests for requests, tokens in recorded["sizes"] if requests == tokens > 0]
    return statistics.mode(sizes) if sizes else 0


def busiest(engines: Sequence[Row]) -> Row:
    """Return what was recorded of the engine with the most steps: another one may have been idle.

    Args:
        engines: What `bench_stop` has returned of each.

    """
    return max(engines, key=lambda it: sum(tokens > 0 for _, tokens in it["sizes"]))


def decoding_range(sizes: Sequence[Sequence[int]]) -> range:
    """Return the steps after the last one that computed prompts, until the last that had tokens."""
    first = 1 + max((index for index, it in enumerate(sizes) if it[1] > it[0]), default=-1)
    last = max((index for index, it in enumerate(sizes) if it[1]), default=-1)
    return range(first, last + 1)


def fold_empty_steps(steps: Sequence[Step]) -> list[Step]:
    """Return the steps with those that have no token as a part of the one before.

    With pipeline stages a request has a token in each second step, say: if there is only one, each
    second step is empty.
    """
    folded: list[Step] = []
    for step in steps:
        if step.num_tokens or not folded:
            folded.append(step)
            continue
        last = folded[-1]
        phase_us = {phase: last.phase_us[phase] + step.phase_us[phase] for phase in PHASES}
        wait_cpu_us = last.wait_cpu_us + step.wait_cpu_us
        events = last.events + step.events
        folded[-1] = Step(last.num_requests, last.num_tokens, events, phase_us, wait_cpu_us)
    return folded


def decoding_pairs(recorded: Row, num_requests: int | None) -> list[tuple[Step, Step]]:
    """Return steps and what follows them, if both decode so many requests; None: any number."""
    steps = split_steps(recorded)
    if num_requests is None:
        steps = fold_empty_steps(steps)

    def decodes(step: Step) -> bool:
        wanted = step.num_requests if num_requests is None else num_requests
        return step.num_requests == step.num_tokens == wanted > 0

    return [pair for pair in itertools.pairwise(steps) if all(map(decodes, pair))]


def evaluate_phases(recorded: Row, num_requests: int | None, is_async: bool) -> Row:
    """Return what the phases took in steps in which each request got one token, in µs.

    Args:
        recorded: What `bench_stop` has returned.
        num_requests: Requests that decode side by side; None: they take turns, in pipeline stages.
        is_async: Whether a step is launched before the one before has ended.

    """
    pairs = decoding_pairs(recorded, num_requests)
    if not pairs:
        return missing("no step was recorded in which all requests decoded")
    steps = [step for step, _ in pairs]
    periods = [following.start - step.start for step, following in pairs]
    host = [
        period - step.phase_us[WAIT] - step.phase_us[PEER]
        for step, period in zip(steps, periods, strict=True)
    ]
    found: Row = {
        "steps": len(steps),
        "requests": statistics.fmean(step.num_requests for step in steps),
        "mean_period_us": statistics.fmean(periods),
        "period_us": summary(periods),
        "host_us": summary(host),
    }
    found |= {f"{phase}_us": summary([step.phase_us[phase] for step in steps]) for phase in PHASES}
    return found | {
        "gap_estimate": missing(STAGES) if num_requests is None else estimate_gap(pairs, is_async),
    }


def estimate_gap(pairs: list[tuple[Step, Step]], is_async: bool) -> Row:
    """Estimate for how long the GPU had nothing to do between two steps, from the host's times.

    Synchronous: from a result until the next launch begins; what launching takes comes on top.
    Asynchronous: nothing, if the host slept until the result of a step was there after it had
    launched the next one. If that result was there already, at most the time since the result
    before. Where the host may have spun until it was there, its times don't tell.
    """
    late = untold = 0
    gaps: list[float] = []
    for step, following in pairs:
        done, launched = step.end_of(WAIT), following.start_of(EXECUTE)
        if done is None or launched is None:
            continue
        if is_async and following.may_have_spun:
            untold += 1
            continue
        if is_async and following.has_slept:
            gaps.append(0.0)
            continue
        late += 1
        end = following.end_of(EXECUTE) if is_async else launched
        assert end is not None
        gaps.append(max(0.0, end - done))
    if not gaps and not untold:
        return missing("no result was waited for")
    is_told = len(gaps) > untold
    return {
        "us": summary(gaps) if is_told else missing(UNTOLD),
        "host_late_share": late / len(gaps) if is_told else missing(UNTOLD),
        "untold_share": untold / (len(gaps) + untold),
        "is_bound": is_async,
    }
