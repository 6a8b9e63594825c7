"""Reads traces: whatever a file holds, the answer is what it says of a load, or a `TraceError`."""

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from sparksched.engine.warm_up import PREFIX as WARM_UP_PREFIX
from sparksched.record.events import (
    MAX_LINE_BYTES,
    VERSION,
    Arrive,
    Begin,
    End,
    Event,
    Finish,
    Settings,
    Step,
    TraceError,
    Update,
)
from sparksched.record.keys import StandIns, segment_sizes

_LONGEST_CHAIN: Final = 8

_decode: Final = msgspec.json.Decoder(Event).decode


class Trace:
    """A file of events, which can be gone through any number of times.

    Raises:
        TraceError: from the constructor and while events are read, with the file and the line of
            what is wrong.
        OSError: if the file can't be read.

    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.missing: str | None = None
        """What a file without its end lacks; known when all events have been read."""
        self.line = 0
        """Of the event that was yielded last."""
        self.settings: Settings = self._begin().settings

    def _begin(self) -> Begin:
        line = next(self._lines(), b"")
        try:
            version = msgspec.json.decode(line)["version"]
        except (msgspec.MsgspecError, ValueError, LookupError, TypeError, RecursionError):
            raise TraceError(
                self.missing or f"{self.path} is not a trace: it doesn't begin with its version"
            ) from None
        if version != VERSION:
            raise TraceError(
                f"{self.path} has version {version} of the format, and this sparksched reads"
                f" version {VERSION}"
            )
        begin = self._event(line)
        assert isinstance(begin, Begin), "it has the version"
        return begin

    def events(self) -> Iterator[Event]:
        """Yield all events behind the first, as far as the file is whole."""
        event: Event | None = None
        for line in self._lines():
            if isinstance(event, End):
                raise self._damaged("it is behind the end")
            event = self._event(line)
            if self.line > 1:
                yield event
        if self.missing is None and not isinstance(event, End):
            self.missing = f"{self.path} has no end"

    def _event(self, line: bytes) -> Event:
        try:
            event: Event = _decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise self._damaged(str(error)) from None
        return event

    def _damaged(self, problem: str) -> TraceError:
        return TraceError(f"{self.path} is damaged: line {self.line}: {problem}")

    def _lines(self) -> Iterator[bytes]:
        """Yield whole lines."""
        self.line = 0
        is_cut_off = False
        try:
            with gzip.open(self.path) as file:
                while line := file.readline(MAX_LINE_BYTES):
                    is_cut_off = not line.endswith(b"\n")
                    if is_cut_off and len(line) == MAX_LINE_BYTES:
                        self.line += 1
                        raise self._damaged("it has no end")
                    if not is_cut_off:
                        self.line += 1
                        yield line
        except EOFError:
            is_cut_off = True
        except (zlib.error, gzip.BadGzipFile) as error:
            # A piece of one byte is no damage.
            is_cut_off = "(b'\\x1f')" in str(error)
            if not is_cut_off:
                problem = f"is damaged behind line {self.line}" if self.line else "is not a trace"
                raise TraceError(f"{self.path} {problem}: {error}") from None
        if is_cut_off or not self.line:
            self.missing = f"{self.path} is cut off behind line {self.line}"


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


@dataclass(frozen=True)
class _InFlight:
    """A step whose output was not told yet."""

    step: Step
    rows: list[Request]
    num_decode_tokens: int
    num_prompt_tokens: int


@dataclass
class Chain:
    """Steps of which each but the first has prompts and was launched while the one before it ran.

    To launch such a step takes the host long, so it looks late at the output of the one before: how
    long all of them took is known, and not how long each.
    """

    num_steps: int = 0
    num_decode_tokens: int = 0
    num_steps_with_prompts: int = 0
    num_prompt_tokens: int = 0
    seconds: float = 0.0
    """From the output of the step before the first, or from the first one's beginning."""

    def add(self, num_decode_tokens: int, num_prompt_tokens: int, seconds: float) -> None:
        """Add a step."""
        self.num_steps += 1
        self.num_decode_tokens += num_decode_tokens
        self.num_steps_with_prompts += num_prompt_tokens > 0
        self.num_prompt_tokens += num_prompt_tokens
        self.seconds += seconds


class Load:
    """What a trace says of requests, their tokens, steps and how long these took.

    Raises:
        TraceError: for no trace, or a damaged one.
        OSError: if the file can't be read.

    """

    def __init__(self, path: str) -> None:
        self.trace = Trace(path)
        self.requests: list[Request] = []
        """In the order of arrival."""
        self.chains: list[Chain] = []
        """All steps that were executed."""
        self.schedule_us: list[float] = []
        self.update_us: list[float] = []
        self.seconds = 0.0
        self._latest: dict[str, Request] = {}
        """By id."""
        self._ids: list[str] = []
        self._in_flight: dict[int, _InFlight] = {}
        self._last_update = 0.0
        self._chain = Chain()
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
                if event.num_prompt_tokens > self.trace.settings.config.max_model_len:
                    raise ValueError("a prompt of impossible length")
                is_warm_up = event.request_id.startswith(WARM_UP_PREFIX)
                request = Request(event, is_warm_up, bytearray(event.keys))
                self.requests.append(request)
                self._latest[event.request_id] = request
            case Finish(at, ended):
                for request_id in self._latest if ended is None else ended:
                    if request_id in self._latest and self._latest[request_id].aborted is None:
                        self._latest[request_id].aborted = at
            case Step():
                self._ids = self._ids if event.ids is None else event.ids
                rows = [self._latest[request_id] for request_id in self._ids]
                self.schedule_us.append(event.duration_us)
                size = _size_of(event, len(rows))
                self._in_flight[event.sequence] = _InFlight(event, rows, *size)
            case Update():
                self._take_output(event, self._in_flight.pop(event.sequence))
            case _:
                pass

    def _take_output(self, update: Update, it: _InFlight) -> None:
        step, rows = it.step, it.rows
        self.update_us.append(update.duration_us)
        counts = [1] * len(rows) if update.num_sampled is None else update.num_sampled
        for row, (request, count) in enumerate(zip(rows, counts, strict=bool(counts))):
            request.num_outputs += count
            if step.num_drafts is not None and step.num_drafts[row] and count:
                self._num_drafted_rows += 1
                self._num_accepted += count - 1
        for row, keys in update.keys.items():
            rows[row].keys += keys
        if rows and not any(request.is_warm_up for request in rows):
            seconds = max(update.time - max(step.time, self._last_update), 0.0)
            self._chain.add(it.num_decode_tokens, it.num_prompt_tokens, seconds)
            following = self._in_flight.get(update.sequence + 1)
            goes_on = following is not None and following.num_prompt_tokens > 0
            if not goes_on or self._chain.num_steps == _LONGEST_CHAIN:
                self.chains.append(self._chain)
                self._chain = Chain()
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
