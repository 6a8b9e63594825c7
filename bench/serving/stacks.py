"""What Python's threads of a process are doing, asked of the process itself.

Each process of a server listens at a Unix socket of its own, in a thread that sleeps until it is
asked. That thread looks at the others' frames several times. It gets to run where the interpreter
changes threads, so the places where a thread gives the interpreter away are seen too often.

It is imported by every Python process of a server, so it imports nothing heavy.
"""

import json
import os
import socket
import sys
import threading
import time
from collections import Counter
from contextlib import closing, suppress
from types import FrameType

NUM_FRAMES = 3
ANSWER_S = 10.0
"""Longer than any number of looks takes."""

Stacks = dict[int, list[str]]
"""By the kernel's ids of threads: functions, the innermost first."""


def address_of(address: str, pid: int) -> str:
    """Return where a process listens, if its server's control socket is at an address."""
    return f"{address}-stacks-{pid}"


# ---- in the process ----


def install(address: str) -> None:
    """Listen in this process, and in those that it forks."""

    def listen() -> None:
        listener = socket.socket(socket.AF_UNIX)
        # A process of another server may have had the same id, and this one goes on without.
        with suppress(OSError):
            listener.bind(address_of(address, os.getpid()))
            listener.listen()
            threading.Thread(target=_serve, args=(listener,), name="stacks", daemon=True).start()

    listen()
    os.register_at_fork(after_in_child=listen)


def _serve(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        # One who has gone away hears nothing.
        with closing(connection), suppress(OSError), connection.makefile("rw") as stream:
            num_looks, pause_s = json.loads(stream.readline())
            json.dump(_look(num_looks, pause_s), stream)


def _look(num_looks: int, pause_s: float) -> Stacks:
    """Return for each thread the stack that it was seen in most often."""
    seen: dict[int, Counter[tuple[str, ...]]] = {}
    lines: dict[tuple[str, ...], list[str]] = {}
    for _ in range(num_looks):
        frames = sys._current_frames()
        for thread in threading.enumerate():
            frame, tid = frames.get(thread.ident or 0), _kernel_id(thread)
            if frame is None or tid is None:
                continue
            functions, places = _innermost(frame)
            # A loop is in several lines: they are one place, shown by the first that was seen.
            seen.setdefault(tid, Counter())[functions] += 1
            lines.setdefault(functions, places)
        del frames
        time.sleep(pause_s)
    return {tid: lines[counts.most_common(1)[0][0]] for tid, counts in seen.items()}


def _kernel_id(thread: threading.Thread) -> int | None:
    # In a forked process CPython 3.11 has the main thread keep the id that it had in its parent.
    return os.getpid() if thread is threading.main_thread() else thread.native_id


def _innermost(frame: FrameType | None) -> tuple[tuple[str, ...], list[str]]:
    functions, places = [], []
    while frame is not None and len(places) < NUM_FRAMES:
        code, file = frame.f_code, os.path.basename(frame.f_code.co_filename)
        functions.append(f"{code.co_filename}:{code.co_qualname}")
        places.append(f"{code.co_qualname} ({file}:{frame.f_lineno})")
        frame = frame.f_back
    return tuple(functions), places


# ---- in the benchmark ----


class Question:
    """A process that was asked, and goes on looking until its answer is read."""

    def __init__(self, address: str, num_looks: int, pause_s: float) -> None:
        """Ask; the process at this address may be none that listens."""
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(ANSWER_S)
        self._is_asked = False
        with suppress(OSError):
            self._socket.connect(address)
            self._socket.sendall(f"{json.dumps([num_looks, pause_s])}\n".encode())
            self._is_asked = True

    def answer(self) -> Stacks | None:
        """Wait for what was seen; None if the process doesn't say."""
        with closing(self._socket), suppress(OSError, ValueError):
            if self._is_asked:
                with self._socket.makefile() as stream:
                    return {int(tid): stack for tid, stack in json.load(stream).items()}
        return None
