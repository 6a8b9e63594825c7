"""The thread that writes a recording: what the engine's loop has noted becomes lines in a file."""

import gzip
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final

import msgspec
from vllm.logger import init_logger

from sparksched.record.events import MAX_LINE_BYTES, End, Event

logger = init_logger("vllm.sparksched")

_FLUSH_S: Final = 1.0
_TURN_S: Final = 0.05
_CLOSE_S: Final = 2.0
"""For which the end of an engine waits for the disk; executors end only after it."""
_PIECE_BYTES: Final = 256 << 10
_FASTEST: Final = 1
_RESERVED_BYTES: Final = 4096
"""For the last line."""
_MAX_REASON: Final = 500
_MAX_BACKLOG_BYTES: Final = 64 << 20
"""Of calls that wait to be written, with the lists that they hold: minutes of steps."""
_NOTE_BYTES: Final = 2048
"""Of a call without its lists."""
_BYTES_AN_ITEM: Final = 8
_LISTS: Final = (list, msgspec.Raw)

_encode: Final = msgspec.json.Encoder().encode

FULL: Final = "the file has reached its size"

Note = tuple[Callable[..., None], Event, tuple[Any, ...], int]


class FileFullError(Exception):
    """There is no more room."""


class Writer:
    """Writes a trace in a thread of its own, compressed some lines at a time.

    The engine's loop leaves what it has seen, and goes on: it waits neither for the disk nor for
    anything that takes longer than to copy a few lists. The file may end behind each piece. It
    takes no other's place, is at no end of a link, and is its owner's alone.

    Raises:
        FileExistsError: from the constructor, if there is something of that name.
        OSError: if it can't be created.

    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o600)
        self._start = time.perf_counter()
        self._room = max_bytes
        # What doesn't fit is lost a piece at a time.
        self._piece_bytes = min(_PIECE_BYTES, max_bytes // 4)
        self._lines: list[bytes] = []
        self._num_bytes = 0
        self._notes: SimpleQueue[Note] = SimpleQueue()
        # Each thread adds to one of these, so neither waits for the other.
        self._noted_bytes = 0
        self._carried_out_bytes = 0
        self._reason: str | None = None
        self._closing = threading.Event()
        self.problem: str | None = None
        """Why the recording isn't whole, if it isn't for a reason that was given."""
        self._thread = threading.Thread(target=self._run, name="sparksched-recorder", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether notes are still taken."""
        return self._reason is None

    def now(self) -> float:
        """Return the seconds since the beginning."""
        return round(time.perf_counter() - self._start, 6)

    # ---- in the engine's loop ----

    def note(self, carry_out: Callable[..., None], event: Event, *others: Any) -> None:
        """Leave an event to be completed and appended; nothing if the recording has ended."""
        if self._reason is not None:
            return
        values = (*msgspec.structs.astuple(event), *others)
        num_items = sum([len(it) for it in values if isinstance(it, _LISTS)])
        size = _NOTE_BYTES + _BYTES_AN_ITEM * num_items
        self._notes.put((carry_out, event, others, size))
        self._noted_bytes += size
        if self._noted_bytes - self._carried_out_bytes > _MAX_BACKLOG_BYTES:
            self._fail("the disk takes less than the engine gives")

    def give_up(self, problem: str) -> None:
        """Write what was left so far, and why nothing follows. Serving goes on."""
        if self._reason is None:
            self._reason = problem
            logger.warning("sparksched: the recording has ended, serving goes on: %s", problem)
        self._closing.set()

    def close(self, reason: str) -> bool:
        """Write what was left so far, and the end; return whether all of it is in the file.

        Waits for that, but no longer than the disk may take.
        """
        self._reason = self._reason or reason
        self._closing.set()
        self._thread.join(_CLOSE_S)
        is_closed = not self._thread.is_alive()
        if not is_closed:
            self.problem = self.problem or f"the disk has not taken all of it within {_CLOSE_S:g} s"
            logger.warning("sparksched: the recording may have no end: %s", self.problem)
        return is_closed

    def _fail(self, problem: str) -> None:
        """End without what was left so far, which keeps prompts in memory. For both threads."""
        if self.problem is None:
            self.problem = self._reason = problem
            self._notes = SimpleQueue()
            logger.warning("sparksched: the recording has ended, serving goes on: %s", problem)
        self._closing.set()

    # ---- in the writer's thread ----

    def append(self, event: Event) -> None:
        """Add an event to the next piece."""
        line = _encode(event)
        if len(line) >= MAX_LINE_BYTES:
            raise FileFullError("an event is larger than a trace holds")
        self._lines.append(line)
        self._num_bytes += len(line)

    def _run(self) -> None:
        try:
            self._write_notes()
        except FileFullError as error:
            self._fail(str(error))
        except Exception as error:
            # A disk that is full, or a fault of ours: what the file has is whole.
            self._fail(f"{type(error).__name__}: {error}")
            os.close(self._descriptor)
            return
        try:
            self._lines = [_encode(End(self.now(), (self._reason or "")[:_MAX_REASON]))]
            self._flush(reserve=0)
        except OSError as error:
            self._fail(f"{type(error).__name__}: {error}")
        finally:
            os.close(self._descriptor)

    def _write_notes(self) -> None:
        last_flush = time.perf_counter()
        while not self._closing.wait(_TURN_S):
            self._carry_out_notes()
            if time.perf_counter() - last_flush >= _FLUSH_S:
                self._flush()
                last_flush = time.perf_counter()
        self._carry_out_notes()
        self._flush()

    def _carry_out_notes(self) -> None:
        with suppress(Empty):
            while True:
                carry_out, event, others, size = self._notes.get_nowait()
                carry_out(event, *others)
                if self._num_bytes >= self._piece_bytes:
                    self._flush()
                self._carried_out_bytes += size
                # The engine's loop may be waiting for the interpreter.
                time.sleep(0)

    def _flush(self, reserve: int = _RESERVED_BYTES) -> None:
        """Write what was appended.

        Raises:
            FileFullError: if it doesn't fit; then none of it is written.
            OSError: if the system can't write; then a part of it may be.

        """
        if not self._lines:
            return
        lines, self._lines, self._num_bytes = self._lines, [], 0
        piece = gzip.compress(b"\n".join([*lines, b""]), _FASTEST, mtime=0)
        if len(piece) + reserve > self._room:
            raise FileFullError(FULL)
        self._room -= len(piece)
        while piece:
            piece = piece[os.write(self._descriptor, piece) :]
