"""Reads traces. Whatever a file holds, the answer is events that make sense, or a `TraceError`."""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from sparksched.record.events import (
    MAX_LINE_BYTES,
    VERSION,
    Begin,
    End,
    Event,
    Settings,
    TraceError,
)

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
            version = msgspec.json.decode(line, type=_Version).version
        except msgspec.MsgspecError:
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


class _Version(msgspec.Struct, tag_field="event", tag="begin"):
    """As much of the first line as each version has."""

    version: int
