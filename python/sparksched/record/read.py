"""Reads traces. Whatever a file holds, the answer is events that make sense, or a `TraceError`."""

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

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

_PIECE_BYTES: Final = 1 << 20
_GZIP: Final = 16 + zlib.MAX_WBITS

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
        self.line = 1
        """Of the event that was yielded last."""
        self.settings: Settings = self._begin().settings

    def _begin(self) -> Begin:
        for number, line in self._lines():
            try:
                version = msgspec.json.decode(line, type=_Version).version
            except msgspec.MsgspecError:
                break
            if version != VERSION:
                raise TraceError(
                    f"{self.path} has version {version} of the format, and this sparksched reads"
                    f" version {VERSION}"
                )
            begin = self._event(number, line)
            if isinstance(begin, Begin):
                return begin
        if self.missing is not None:
            raise TraceError(self.missing)
        raise TraceError(f"{self.path} is not a trace: it doesn't begin with its version")

    def events(self) -> Iterator[Event]:
        """Yield all events behind the first, as far as the file is whole."""
        event: Event | None = None
        for number, line in self._lines():
            if isinstance(event, End):
                raise TraceError(f"{self.path} is damaged: line {number} is behind the end")
            event = self._event(number, line)
            if number > 1:
                self.line = number
                yield event
        if self.missing is None and not isinstance(event, End):
            self.missing = f"{self.path} has no end"

    def _event(self, number: int, line: bytes) -> Event:
        try:
            event: Event = _decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise TraceError(f"{self.path} is damaged: line {number}: {error}") from None
        return event

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield whole lines with their numbers, from 1."""
        number, rest = 0, b""
        try:
            with self.path.open("rb") as file:
                for piece in _unpacked(file):
                    *lines, rest = (rest + piece).split(b"\n")
                    for line in lines:
                        number += 1
                        yield number, line
                    if len(rest) > MAX_LINE_BYTES:
                        raise TraceError(f"{self.path} is damaged: line {number + 1} has no end")
        except EOFError:
            self.missing = f"{self.path} is cut off behind line {number}"
        except zlib.error as error:
            problem = f"is damaged behind line {number}" if number else "is not a trace"
            raise TraceError(f"{self.path} {problem}: {error}") from None
        if rest:
            self.missing = f"{self.path} is cut off behind line {number}"


class _Version(msgspec.Struct, tag_field="event", tag="begin"):
    """As much of the first line as each version has."""

    version: int


def _unpacked(file: BinaryIO) -> Iterator[bytes]:
    """Yield in pieces what a gzip file holds, however many members it has.

    Raises:
        EOFError: at the end, if that is within a member.
        zlib.error: if it is no such file, or is damaged.

    """
    unpacker = zlib.decompressobj(_GZIP)
    is_cut_off = True
    while packed := unpacker.unconsumed_tail or unpacker.unused_data or file.read(_PIECE_BYTES):
        if unpacker.eof:
            unpacker = zlib.decompressobj(_GZIP)
        yield unpacker.decompress(packed, _PIECE_BYTES)
        is_cut_off = not unpacker.eof
    if is_cut_off:
        raise EOFError
