"""What a trace says of the load: its requests, their tokens, and how long steps took."""

import itertools
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sparksched.engine.warm_up import PREFIX as WARM_UP_PREFIX
from sparksched.record.events import (
    Arrive,
    Begin,
    Event,
    Finish,
    Grow,
    Step,
    Stop,
    TraceError,
    Update,
)
from sparksched.record.keys import StandIns, segment_sizes
from sparksched.record.read import Trace

UNFINISHED = (
    "The process that recorded it was probably killed, or had no room on its disk, or still runs. "
    "--partial replays what is whole."
)

Floats = npt.NDArray[np.float64]


@dataclass
class Request:
    """What becomes of a request to its last token."""

    arrival: Arrive
    is_warm_up: bool
    """It is an engine's own: nobody waited for it."""
    keys: bytearray
    num_outputs: int = 0
    """Tokens that were sampled."""
    outputs: list[int] = field(default_factory=list)
    """These, if the trace has tokens."""
    stop: int | None = None
    """How many tokens had been sampled with the one that ended it, if one did."""
    aborted: float | None = None
    """When it was ended from outside."""


class Load:
    """A trace that has been read once.

    Raises:
        TraceError: for no trace, a damaged one, or one without its end unless `partial`.
        OSError: if the file can't be read.

    """

    def __init__(self, path: str, *, partial: bool = False) -> None:
        self.trace = Trace(path)
        settings = self.trace.settings
        self._sizes = segment_sizes(settings.hash_block_size, settings.num_hash_lookahead_tokens)
        self.requests: list[Request] = []
        """By number."""
        self.step_sizes: list[tuple[int, int]] = []
        """Tokens of decodes and of prompts of each step that was executed."""
        self.step_s: list[float] = []
        """How long these took, from the output of the step before or their own beginning."""
        self.schedule_us: list[float] = []
        self.update_us: list[float] = []
        self.seconds = 0.0
        self._rows: list[Request] = []
        self._in_flight: dict[int, tuple[Step, list[Request]]] = {}
        self._last_update = 0.0
        self._num_drafted_rows = 0
        self._num_accepted = 0
        self._read()
        if self.trace.missing is not None and not partial:
            raise TraceError(f"{self.trace.missing}. {UNFINISHED}")

    @property
    def accepted_per_row(self) -> float:
        """How many drafts are accepted where there are some, on average."""
        return self._num_accepted / max(self._num_drafted_rows, 1)

    def tokens(self, number: int) -> StandIns:
        """Return what stands for a request's tokens."""
        return StandIns(number, bytes(self.requests[number].keys), self._sizes)

    def _read(self) -> None:
        try:
            for event in self.trace.events():
                self.seconds = max(self.seconds, getattr(event, "time", 0.0))
                self._take(event)
        except (LookupError, ValueError) as error:
            if isinstance(error, TraceError):
                raise
            raise TraceError(
                f"{self.trace.path} is damaged: line {self.trace.line} doesn't go with those"
                f" before it: {error!r}"
            ) from None

    def _take(self, event: Event) -> None:
        """Take in an event. A number that no request or step has, or another one of rows, fails."""
        match event:
            case Begin():
                raise ValueError("another beginning")
            case Arrive():
                if event.num_prompt_tokens > self.trace.settings.model_config.max_model_len:
                    raise ValueError("a prompt of impossible length")
                is_warm_up = event.request_id.startswith(WARM_UP_PREFIX)
                self.requests.append(Request(event, is_warm_up, bytearray(event.keys)))
            case Grow(grown):
                for number, keys in grown:
                    self.requests[number].keys += keys
            case Stop(number, num_output_tokens):
                self.requests[number].stop = num_output_tokens
            case Finish(at, ended):
                for number in range(len(self.requests)) if ended is None else ended:
                    request = self.requests[number]
                    request.aborted = at if request.aborted is None else request.aborted
            case Step():
                if event.numbers is not None:
                    self._rows = [self.requests[number] for number in event.numbers]
                self.schedule_us.append(event.duration_us)
                self._in_flight[event.sequence] = (event, self._rows)
            case Update():
                self._take_output(event, *self._in_flight.pop(event.sequence))
            case _:
                pass

    def _take_output(self, update: Update, step: Step, rows: list[Request]) -> None:
        self.update_us.append(update.duration_us)
        tokens = iter(update.tokens or ())
        counts = [1] * len(rows) if update.num_sampled is None else update.num_sampled
        for row, (request, count) in enumerate(zip(rows, counts, strict=bool(counts))):
            request.num_outputs += count
            request.outputs += itertools.islice(tokens, count)
            if step.num_drafts is not None and step.num_drafts[row] and count:
                self._num_drafted_rows += 1
                self._num_accepted += count - 1
        if rows and not any(request.is_warm_up for request in rows):
            self.step_sizes.append(_size_of(step, len(rows)))
            self.step_s.append(max(update.time - max(step.time, self._last_update), 0.0))
        self._last_update = update.time


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


def step_time(load: Load) -> StepTime:
    """Fit to the median of each kind of step.

    By least squares, again and again: kinds that are far off, as of steps that waited for a kernel
    to be compiled, count less and less. What would come out negative is taken to cost nothing.
    """
    if not load.step_s:
        return _GUESS
    columns, times, counts = _kinds(load)
    weights = counts
    for _ in range(_NUM_FITS):
        fitted = _fit(columns * np.sqrt(weights)[:, None], times * np.sqrt(weights))
        weights = counts / np.maximum(np.abs(columns @ fitted - times), _LEAST_ERROR_S)
    return StepTime(*(float(value) for value in fitted)) if fitted.any() else _GUESS


def _kinds(load: Load) -> tuple[Floats, Floats, Floats]:
    """Return what is in each kind of step, its median time, and how many there are of it."""
    sizes = np.array(load.step_sizes, dtype=float)
    times = np.array(load.step_s)
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
