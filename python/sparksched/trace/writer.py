"""The file that is being recorded, and the thread that fills it."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from sparksched.trace import format as trace_format
from sparksched.trace.events import End, Event

FULL: Final = "the file has reached its size"

_FRAME_BYTES: Final = 256 << 10
_FRAME_S: Final = 1.0
_TURN_S: Final = 0.05
_CLOSE_S: Final = 30.0
_RESERVED_BYTES: Final = 4096
"""For the last event."""
_MAX_BACKLOG: Final = 1 << 14
"""Calls that wait to be written: minutes of steps."""

Note = tuple[Callable[..., None], tuple[Any, ...]]


class TraceFile:
    """Events, written as frames, up to a size."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        # Never another file's contents, nor a place that somebody has prepared.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(path, flags, 0o600)
        self._room = max_bytes - _RESERVED_BYTES
        # What doesn't fit is lost a frame at a time.
        self._frame_bytes = min(_FRAME_BYTES, max_bytes // 16)
        self._size = 0
        self._events: list[msgspec.Raw] = []
        self._event_bytes = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._write(trace_format.file_header())

    def append(self, event: Event) -> None:
        """Add an event; one that would make the frame too large begins another."""
        encoded = self._encoder.encode(event)
        if self._event_bytes + len(encoded) >= self._frame_bytes:
            self.flush()
        self._events.append(msgspec.Raw(encoded))
        self._event_bytes += len(encoded)

    def flush(self) -> None:
        """Write what has been added.

        Raises:
            FileFullError: if it doesn't fit; then none of it is written.
            OSError: if the system can't write.

        """
        if not self._events:
            return
        events, self._events, self._event_bytes = self._events, [], 0
        try:
            frame = trace_format.pack_frame(self._encoder.encode(events))
        except OverflowError:
            raise FileFullError("an event is larger than a trace holds") from None
        if self._size + len(frame) > self._room:
            raise FileFullError(FULL)
        self._write(frame)

    def close(self, end: End | None) -> None:
        """Write the last event, if there is to be one, and close the file."""
        self._events.clear()
        try:
            if end is not None:
                self._write(trace_format.pack_frame(self._encoder.encode([end])))
        finally:
            os.close(self._descriptor)

    def _write(self, content: bytes) -> None:
        written = 0
        try:
            while written < len(content):
                written += os.write(self._descriptor, content[written:])
        except OSError:
            # What is there is whole frames, whatever happens now.
            os.ftruncate(self._descriptor, self._size)
            os.lseek(self._descriptor, self._size, os.SEEK_SET)
            raise
        self._size += written


class FileFullError(Exception):
    """There is no more room; the message says of what kind."""


class BackgroundWriter:
    """Carries out notes, which append events to the file, in a thread of its own.

    The engine's loop leaves what it has seen, and goes on: it waits neither for the disk nor for
    anything that takes longer than to copy a few lists.
    """

    def __init__(
        self,
        file: TraceFile,
        now: Callable[[], float],
        before_flush: Callable[[], None],
    ) -> None:
        self._file = file
        self._now = now
        self._before_flush = before_flush
        self._notes: deque[Note] = deque()
        self._reason: str | None = None
        self._closing = threading.Event()
        self.problem: str | None = None
        """Why nothing is recorded any more, unless it was asked for."""
        self._thread = threading.Thread(target=self._run, name="sparksched-recorder", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether notes are still taken."""
        return self._reason is None

    def note(self, carry_out: Callable[..., None], *arguments: Any) -> None:
        """Leave something to be written; nothing if the recording has ended."""
        if self._reason is not None:
            return
        self._notes.append((carry_out, arguments))
        if len(self._notes) > _MAX_BACKLOG:
            self.end("the disk takes less than the engine gives")

    def end(self, reason: str) -> None:
        """Write what was left so far, and that this is the end. Returns at once."""
        if self._reason is None:
            self._reason = reason
            self._closing.set()

    def join(self) -> None:
        """Wait until the file is closed, or the disk has made us wait for long enough."""
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        try:
            self._write_notes()
        except FileFullError as error:
            self._give_up(str(error))
            self._close(self._reason)
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {error}")
            self._close(None)
        else:
            self._close(self._reason)

    def _write_notes(self) -> None:
        last_flush = time.perf_counter()
        while not self._closing.wait(_TURN_S):
            self._carry_out_notes()
            if time.perf_counter() - last_flush >= _FRAME_S:
                self._flush()
                last_flush = time.perf_counter()
        self._carry_out_notes()
        self._flush()

    def _flush(self) -> None:
        self._before_flush()
        self._file.flush()

    def _carry_out_notes(self) -> None:
        while self._notes:
            carry_out, arguments = self._notes.popleft()
            carry_out(*arguments)
            # The engine's loop may be waiting for the interpreter.
            time.sleep(0)

    def _give_up(self, problem: str) -> None:
        self.problem = problem
        self._reason = problem
        self._notes.clear()
        from vllm.logger import init_logger

        init_logger("vllm.sparksched").warning(
            "sparksched: the recording has ended, serving goes on: %s", problem
        )

    def _close(self, reason: str | None) -> None:
        end = None if reason is None else End(self._now(), reason)
        try:
            self._file.close(end)
        except OSError as error:
            self.problem = str(error)
