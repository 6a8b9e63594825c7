"""Reads traces. Whatever a file holds, the answer is events that make sense, or a `TraceError`."""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from sparksched.trace.errors import TraceError
from sparksched.trace.events import Begin, Event, Settings
from sparksched.trace.format import (
    HEADER_BYTES,
    CutOffError,
    read_file_header,
    read_frame,
)
from sparksched.trace.sense import Sense

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
        sense = self._sense()
        for position, event in self._all_events():
            try:
                sense.check(event)
            except TraceError as error:
                raise TraceError(
                    f"{self.path} is damaged: the frame at byte {position} {error}"
                ) from None
            if not isinstance(event, Begin):
                yield event
        if self.missing is None and not sense.has_ended:
            self.missing = f"{self.path} has no end: what came behind its last frame is missing"

    def _sense(self) -> Sense:
        try:
            return Sense(self.settings)
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
