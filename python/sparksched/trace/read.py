"""Reads traces. Whatever a file holds, the answer is events that make sense, or a `TraceError`."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from sparksched.trace.check import EventChecker
from sparksched.trace.events import (
    Arrive,
    Begin,
    Event,
    Grow,
    Settings,
    Stop,
    TraceError,
)
from sparksched.trace.file import HEADER_BYTES, CutOffError, read_file_header, read_frame
from sparksched.trace.tokens import StandIns, segment_sizes
from sparksched.trace.workload import Workload, workload_of

_decode = msgspec.msgpack.Decoder(list[Event]).decode


class Trace:
    """A file of events, which can be gone through any number of times.

    Raises:
        TraceError: from the constructor and while events are read, with the file and the position
            of what is wrong.
        OSError: if the file can't be read.

    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.missing: str | None = None
        """What a file without its end lacks; known when all events have been read."""
        self.settings: Settings = self._settings()

    def events(self) -> Iterator[Event]:
        """Yield all events behind the first, as far as the file is whole."""
        checker = self._checker()
        for position, event in self._all_events():
            try:
                checker.check(event)
            except TraceError as error:
                raise TraceError(
                    f"{self.path} is damaged: the frame at byte {position} {error}"
                ) from None
            if not isinstance(event, Begin):
                yield event
        if self.missing is None and not checker.has_ended:
            self.missing = f"{self.path} has no end: what came behind its last frame is missing"

    def _checker(self) -> EventChecker:
        try:
            return EventChecker(self.settings)
        except TraceError as error:
            raise TraceError(f"{self.path} is damaged: its beginning {error}") from None

    def _settings(self) -> Settings:
        for _, event in self._all_events():
            if isinstance(event, Begin):
                return event.settings
            break
        problem = "is damaged: it doesn't begin with its settings"
        if self.missing is not None:
            problem = f"is cut off in the frame at byte {HEADER_BYTES}: nothing of it is whole"
        raise TraceError(f"{self.path} {problem}")

    def _all_events(self) -> Iterator[tuple[int, Event]]:
        with self.path.open("rb") as file:
            try:
                read_file_header(file)
                yield from _events(file)
            except CutOffError as error:
                self.missing = f"{self.path} {error}: the rest is missing"
            except TraceError as error:
                raise TraceError(f"{self.path} {error}") from None


def _events(file: BinaryIO) -> Iterator[tuple[int, Event]]:
    position = HEADER_BYTES
    while (payload := read_frame(file, position)) is not None:
        try:
            events = _decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise TraceError(
                f"is damaged: the frame at byte {position} holds no events: {error}"
            ) from None
        for event in events:
            yield position, event
        position = file.tell()


class History:
    """What becomes of each request to its last token, known when all of a trace has been read."""

    def __init__(self, settings: Settings, events: Iterable[Event]) -> None:
        self.arrivals: list[Arrive] = []
        """By number."""
        self.stops: dict[int, int] = {}
        """How many tokens had been sampled with the one that ended a request, by number."""
        self._sizes = segment_sizes(settings.hash_block_size, settings.num_hash_lookahead_tokens)
        self._keys: dict[int, bytearray] = {}
        for event in events:
            match event:
                case Arrive():
                    self._keys[len(self.arrivals)] = bytearray(event.keys)
                    self.arrivals.append(event)
                case Grow(grown):
                    for number, keys in grown:
                        self._keys[number] += keys
                case Stop(number, num_output_tokens):
                    self.stops[number] = num_output_tokens
                case _:
                    pass

    def tokens(self, number: int) -> StandIns:
        """Return what stands for a request's tokens."""
        return StandIns(number, bytes(self._keys[number]), self._sizes)


@dataclass(frozen=True)
class Opened:
    """A trace that has been read once."""

    trace: Trace
    history: History
    workload: Workload


UNFINISHED: Final = (
    "The process that recorded it was probably killed, or had no room on its disk, or still runs. "
    "--partial replays what is whole."
)


def open_trace(path: str, *, partial: bool) -> Opened:
    """Read a trace: a whole one, or with `partial` also the whole frames of one without its end.

    Raises:
        TraceError: if it is none, damaged, or lacks its end without `partial`.
        OSError: if the file can't be read.

    """
    trace = Trace(path)
    history = History(trace.settings, trace.events())
    if trace.missing is not None and not partial:
        raise TraceError(f"{trace.missing}. {UNFINISHED}")
    return Opened(trace, history, workload_of(trace.events()))
