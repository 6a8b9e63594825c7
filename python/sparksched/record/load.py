"""What a trace says of the load: its requests, their tokens, its steps and how long they took."""

from dataclasses import dataclass

from sparksched.engine.warm_up import PREFIX as WARM_UP_PREFIX
from sparksched.record.events import (
    Arrive,
    Begin,
    Event,
    Finish,
    Grow,
    Step,
    TraceError,
    Update,
)
from sparksched.record.keys import StandIns, segment_sizes
from sparksched.record.read import Trace


@dataclass
class Request:
    """What becomes of a request to its last token."""

    arrival: Arrive
    is_warm_up: bool
    """It is an engine's own: nobody waited for it."""
    keys: bytearray
    num_outputs: int = 0
    """Tokens that were sampled."""
    aborted: float | None = None
    """When it was ended from outside."""


class Load:
    """A trace that has been read once.

    Raises:
        TraceError: for no trace, or a damaged one.
        OSError: if the file can't be read.

    """

    def __init__(self, path: str) -> None:
        self.trace = Trace(path)
        self.requests: list[Request] = []
        """In the order of arrival."""
        self.step_sizes: list[tuple[int, int]] = []
        """Tokens of decodes and of prompts of each step that was executed."""
        self.step_s: list[float] = []
        """How long these took, from the output of the step before or their own beginning."""
        self.schedule_us: list[float] = []
        self.update_us: list[float] = []
        self.seconds = 0.0
        self._latest: dict[str, Request] = {}
        """By id."""
        self._rows: list[Request] = []
        self._in_flight: dict[int, tuple[Step, list[Request]]] = {}
        self._last_update = 0.0
        self._num_drafted_rows = 0
        self._num_accepted = 0
        self._read()

    @property
    def accepted_per_row(self) -> float:
        """How many drafts are accepted where there are some, on average."""
        return self._num_accepted / max(self._num_drafted_rows, 1)

    def tokens(self, number: int) -> StandIns:
        """Return what stands for the tokens of a request, by its number."""
        keys = bytes(self.requests[number].keys)
        return StandIns(number, keys, segment_sizes(self.trace.settings))

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
        """Take in an event. An id that no request has, or another number of rows, fails."""
        match event:
            case Begin():
                raise ValueError("another beginning")
            case Arrive():
                if event.num_prompt_tokens > self.trace.settings.model_config.max_model_len:
                    raise ValueError("a prompt of impossible length")
                is_warm_up = event.request_id.startswith(WARM_UP_PREFIX)
                request = Request(event, is_warm_up, bytearray(event.keys))
                self.requests.append(request)
                self._latest[event.request_id] = request
            case Grow(grown):
                for request_id, keys in grown.items():
                    self._latest[request_id].keys += keys
            case Finish(at, ended):
                for request_id in self._latest if ended is None else ended:
                    if request_id in self._latest and self._latest[request_id].aborted is None:
                        self._latest[request_id].aborted = at
            case Step():
                if event.ids is not None:
                    self._rows = [self._latest[request_id] for request_id in event.ids]
                self.schedule_us.append(event.duration_us)
                self._in_flight[event.sequence] = (event, self._rows)
            case Update():
                self._take_output(event, *self._in_flight.pop(event.sequence))
            case _:
                pass

    def _take_output(self, update: Update, step: Step, rows: list[Request]) -> None:
        self.update_us.append(update.duration_us)
        counts = [1] * len(rows) if update.num_sampled is None else update.num_sampled
        for row, (request, count) in enumerate(zip(rows, counts, strict=bool(counts))):
            request.num_outputs += count
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
