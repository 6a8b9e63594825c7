"""What a trace says of the load: how much each request generated, and how long steps took.

The requests with which an engine warmed up, and their steps, are no part of it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sparksched.engine.warm_up import PREFIX as WARM_UP_PREFIX
from sparksched.trace.events import Arrive, Difference, Event, Finish, Step, Update

Floats = npt.NDArray[np.float64]


@dataclass
class Workload:
    """A trace in numbers."""

    arrivals: list[float] = field(default_factory=list)
    """Seconds from the beginning, by request."""
    outputs: list[list[int]] = field(default_factory=list)
    """Tokens by request, if the trace has any."""
    num_outputs: list[int] = field(default_factory=list)
    """Tokens that were sampled, by request."""
    aborts: dict[int, float] = field(default_factory=dict)
    """When requests were ended from outside, by number."""
    warm_ups: set[int] = field(default_factory=set)
    """Requests of an engine's own, by number: nobody waited for them."""
    step_sizes: list[tuple[int, int]] = field(default_factory=list)
    """Tokens of decodes and of prompts of each step that was executed."""
    step_s: list[float] = field(default_factory=list)
    """How long these took, from the output of the step before or their own beginning."""
    schedule_us: list[float] = field(default_factory=list)
    update_us: list[float] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    num_drafted_rows: int = 0
    num_accepted: int = 0
    seconds: float = 0.0

    @property
    def accepted_per_row(self) -> float:
        """Return how many drafts are accepted where there are some, on average."""
        return self.num_accepted / max(self.num_drafted_rows, 1)


def workload_of(events: Iterable[Event]) -> Workload:
    """Go through a trace and count."""
    workload = Workload()
    numbers: list[int] = []
    in_flight: dict[int, tuple[Step, list[int]]] = {}
    last_update = 0.0
    for event in events:
        workload.seconds = max(workload.seconds, getattr(event, "time", 0.0))
        match event:
            case Arrive():
                if event.request_id.startswith(WARM_UP_PREFIX):
                    workload.warm_ups.add(len(workload.arrivals))
                workload.arrivals.append(event.time)
                workload.outputs.append([])
                workload.num_outputs.append(0)
            case Finish(at, ended, _):
                for number in range(len(workload.arrivals)) if ended is None else ended:
                    workload.aborts.setdefault(number, at)
            case Step():
                numbers = numbers if event.numbers is None else event.numbers
                workload.schedule_us.append(event.duration_us)
                in_flight[event.sequence] = (event, numbers)
            case Update():
                step, rows = in_flight.pop(event.sequence)
                workload.update_us.append(event.duration_us)
                _count_outputs(workload, event, step, rows)
                if rows and workload.warm_ups.isdisjoint(rows):
                    workload.step_sizes.append(_size_of(step, len(rows)))
                    workload.step_s.append(max(event.time - max(step.time, last_update), 0.0))
                last_update = event.time
            case Difference(_, text):
                workload.differences.append(text)
            case _:
                pass
    return workload


def _size_of(step: Step, num_rows: int) -> tuple[int, int]:
    num_tokens = step.num_tokens or [1] * num_rows
    num_drafts = step.num_drafts or [0] * num_rows
    num_decode_tokens = sum(
        it for it, drafts in zip(num_tokens, num_drafts, strict=True) if not is_chunk(it, drafts)
    )
    return num_decode_tokens, sum(num_tokens) - num_decode_tokens


def is_chunk(num_tokens: int, num_drafts: int) -> bool:
    """Whether so many tokens of a request are of its prompt, or are computed once more."""
    return num_tokens > 1 + num_drafts


def _count_outputs(workload: Workload, update: Update, step: Step, rows: list[int]) -> None:
    counts = [1] * len(rows) if update.num_sampled is None else update.num_sampled
    begin = 0
    for row, (number, count) in enumerate(zip(rows, counts, strict=False)):
        workload.num_outputs[number] += count
        if update.tokens is not None:
            workload.outputs[number] += update.tokens[begin : begin + count]
            begin += count
        if step.num_drafts is not None and step.num_drafts[row] and count:
            workload.num_drafted_rows += 1
            workload.num_accepted += count - 1


@dataclass(frozen=True)
class StepTime:
    """How long a step takes, by what is in it: fitted to those of a trace."""

    seconds: float
    seconds_a_decode_token: float
    seconds_with_prompts: float
    """More for a step that computes prompts, however little of them."""
    seconds_a_prompt_token: float

    def __call__(self, num_decode_tokens: int, num_prompt_tokens: int) -> float:
        """Return seconds."""
        return (
            self.seconds
            + self.seconds_a_decode_token * num_decode_tokens
            + self.seconds_with_prompts * (num_prompt_tokens > 0)
            + self.seconds_a_prompt_token * num_prompt_tokens
        )


_GUESS = StepTime(0.01, 0.0, 0.0, 0.0)
"""For a trace without steps."""

_KINDS_AN_OCTAVE = 4
"""Steps whose sizes are nearer to each other than that are of one kind."""

_NUM_FITS = 10

_LEAST_ERROR_S = 1e-5
"""All that is nearer counts as much."""


def step_time(workload: Workload) -> StepTime:
    """Fit to the median of each kind of step.

    By least squares, again and again: kinds that are far off, as of steps that waited for a kernel
    to be compiled, count less and less. What would come out negative is taken to cost nothing.
    """
    if not workload.step_s:
        return _GUESS
    columns, times, counts = _kinds(workload)
    weights = counts
    for _ in range(_NUM_FITS):
        fitted = _fit(columns * np.sqrt(weights)[:, None], times * np.sqrt(weights))
        weights = counts / np.maximum(np.abs(columns @ fitted - times), _LEAST_ERROR_S)
    return StepTime(*(float(value) for value in fitted)) if fitted.any() else _GUESS


def _kinds(workload: Workload) -> tuple[Floats, Floats, Floats]:
    """Return what is in each kind of step, its median time, and how many there are of it."""
    sizes = np.array(workload.step_sizes, dtype=float)
    times = np.array(workload.step_s)
    keys = np.round(_KINDS_AN_OCTAVE * np.log2(np.maximum(sizes, 0.5)))
    _, kinds, counts = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
    members = np.split(np.argsort(kinds.ravel(), kind="stable"), np.cumsum(counts)[:-1])
    middle = np.array([[*sizes[its].mean(axis=0), np.median(times[its])] for its in members])
    decodes, prompts, medians = middle.T
    columns = np.column_stack([np.ones(len(middle)), decodes, prompts > 0, prompts])
    return columns, medians, counts.astype(float)


def _fit(columns: Floats, times: Floats) -> Floats:
    """Return by least squares what each column costs, nothing being less than nothing."""
    used = list(range(columns.shape[1]))
    fitted = np.zeros(columns.shape[1])
    while used:
        solution = np.linalg.lstsq(columns[:, used], times, rcond=None)[0]
        if (solution >= 0).all():
            fitted[used] = solution
            break
        used = [it for it, value in zip(used, solution, strict=True) if value >= 0]
    return fitted
