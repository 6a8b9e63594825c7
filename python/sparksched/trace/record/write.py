"""The thread that writes a recording: what the engine's loop has noted becomes events in a file."""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from sparksched.trace.events import End
from sparksched.trace.file import FileFullError, TraceFile

_FRAME_S: Final = 1.0
_TURN_S: Final = 0.05
_CLOSE_S: Final = 2.0
"""For which the end of an engine waits for the disk; executors end only after it."""
_MAX_BACKLOG_BYTES: Final = 64 << 20
"""Of calls that wait to be written, with the lists that they hold: minutes of steps."""
_NOTE_BYTES: Final = 2048
"""Of a call without its lists."""
_BYTES_AN_ITEM: Final = 8

Note = tuple[Callable[..., None], tuple[Any, ...], int]


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
        # Each thread adds to one of these, so neither waits for the other.
        self._noted_bytes = 0
        self._carried_out_bytes = 0
        self._reason: str | None = None
        self._closing = threading.Event()
        self._end_is_decided = threading.Lock()
        self._when_kept: Callable[[str | None], None] | None = None
        self._has_waited = False
        self.problem: str | None = None
        """Why nothing is recorded any more, unless it was asked for."""
        self._thread = threading.Thread(target=self._run, name="sparksched-recorder", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether notes are still taken."""
        return self._reason is None

    def note(self, carry_out: Callable[..., None], *arguments: Any, num_items: int = 0) -> None:
        """Leave something to be written; nothing if the recording has ended.

        `num_items` is about how much the lists among the arguments hold: numbers, and the like.
        """
        if self._reason is not None:
            return
        size = _NOTE_BYTES + _BYTES_AN_ITEM * num_items
        self._notes.append((carry_out, arguments, size))
        self._noted_bytes += size
        if self._noted_bytes - self._carried_out_bytes > _MAX_BACKLOG_BYTES:
            self._give_up("the disk takes less than the engine gives")
            self._closing.set()

    def end(self, reason: str) -> None:
        """Write what was left so far, and that this is the end. Returns at once."""
        self._end(reason, None)

    def keep(self, reason: str, when_kept: Callable[[str | None], None]) -> bool:
        """End, and give a nameless file its name. Returns at once, False if it has ended already.

        The thread tells `when_kept` what came of it: None, or what the problem was.
        """
        return self._end(reason, when_kept)

    def _end(self, reason: str, when_kept: Callable[[str | None], None] | None) -> bool:
        with self._end_is_decided:
            if self._reason is not None:
                return False
            self._reason, self._when_kept = reason, when_kept
        self._closing.set()
        return True

    def join(self) -> bool:
        """Wait until the file is closed, or the disk has made us wait for long enough.

        Returns whether it is closed. Who waits a second time has waited for long enough.
        """
        self._thread.join(0 if self._has_waited else _CLOSE_S)
        is_closed = not self._thread.is_alive()
        if not (is_closed or self._has_waited):
            self.problem = self.problem or f"the disk has not taken all of it within {_CLOSE_S:g} s"
            _warn(f"sparksched: the recording may have no end: {self.problem}")
        self._has_waited = True
        return is_closed

    def _run(self) -> None:
        try:
            self._write_notes()
        except FileFullError as error:
            self._give_up(str(error))
            self._close(self._reason, str(error))
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            self._give_up(problem)
            self._close(None, problem)
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
        # A file may be cut off behind any frame: none depends on what would come later.
        self._before_flush()
        self._file.flush()

    def _carry_out_notes(self) -> None:
        while (note := self._next_note()) is not None:
            carry_out, arguments, size = note
            carry_out(*arguments)
            if self._file.has_whole_frame:
                self._flush()
            self._carried_out_bytes += size
            # The engine's loop may be waiting for the interpreter.
            time.sleep(0)

    def _next_note(self) -> Note | None:
        try:
            return self._notes.popleft()
        except IndexError:
            # Also if the engine's loop has just given them up.
            return None

    def _give_up(self, problem: str) -> None:
        """End without what was left so far, which keeps prompts in memory."""
        with self._end_is_decided:
            if self.problem is not None:
                return
            self.problem = problem
            self._reason = problem
        self._notes.clear()
        _warn(f"sparksched: the recording has ended, serving goes on: {problem}")

    def _close(self, reason: str | None, problem: str | None = None) -> None:
        end = None if reason is None else End(self._now(), reason)
        gets_name = self._when_kept is not None and problem is None
        try:
            self._file.close(end, gets_name=gets_name)
        except OSError as error:
            self.problem = problem = str(error)
        if self._when_kept is not None:
            self._when_kept(problem)


def _warn(message: str) -> None:
    from vllm.logger import init_logger

    init_logger("vllm.sparksched").warning(message)
