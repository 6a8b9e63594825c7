"""What a trace says of the load: how much each request generated, and how long steps took."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from sparksched.trace.events import Arrive, Difference, Event, Finish, Step, Update


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
    step_sizes: list[tuple[int, int]] = field(default_factory=list)
    """Tokens and requests of each step that was executed."""
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
                if rows:
                    num_tokens = len(rows) if step.num_tokens is None else sum(step.num_tokens)
                    workload.step_sizes.append((num_tokens, len(rows)))
                    workload.step_s.append(max(event.time - max(step.time, last_update), 0.0))
                last_update = event.time
            case Difference(_, text):
                workload.differences.append(text)
            case _:
                pass
    return workload


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
    seconds_a_token: float
    seconds_a_request: float

    def __call__(self, num_tokens: int, num_requests: int) -> float:
        """Return seconds."""
        return (
            self.seconds + self.seconds_a_token * num_tokens + self.seconds_a_request * num_requests
        )


_GUESS = StepTime(0.01, 0.0, 0.0)
"""For a trace without steps."""


def step_time(workload: Workload) -> StepTime:
    """Fit by least squares; what would come out negative is taken to cost nothing."""
    if not workload.step_s:
        return _GUESS
    sizes = np.array(workload.step_sizes, dtype=float)
    columns = np.column_stack([np.ones(len(sizes)), sizes])
    used = [0, 1, 2]
    times = np.array(workload.step_s)
    fitted = np.zeros(3)
    while used:
        solution = np.linalg.lstsq(columns[:, used], times, rcond=None)[0]
        if (solution >= 0).all():
            fitted[used] = solution
            break
        used = [it for it, value in zip(used, solution, strict=True) if value >= 0]
    return StepTime(*(float(value) for value in fitted)) if fitted.any() else _GUESS
