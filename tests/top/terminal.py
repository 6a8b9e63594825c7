"""Runs `sparksched top` in a process of its own: on a terminal of 80 columns, or piped."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

COMMAND = [sys.executable, "-m", "sparksched.cli", "top"]
COLUMNS, LINES = 80, 40
TIMEOUT_S = 60.0
_TO_A_PLACE = re.compile(r"\x1b\[[0-9;]*H")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]")


def piped(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


@dataclass
class Terminal:
    """A terminal with the command in it."""

    process: "subprocess.Popen[bytes]"
    master: int
    text: str = ""

    def wait_for(self, what: str) -> None:
        """Read until something was shown."""
        deadline = time.monotonic() + TIMEOUT_S
        while what not in self.text:
            assert time.monotonic() < deadline, f"waited for {what!r} in:\n{self.text}"
            self._read()

    def wait_for_end(self) -> int:
        """Read until the command has ended, which a full terminal would hold up."""
        deadline = time.monotonic() + TIMEOUT_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"it doesn't end:\n{self.text}"
            self._read()
        return self.process.returncode

    def _read(self) -> None:
        readable, _, _ = select.select([self.master], [], [], 0.2)
        if readable:
            # A terminal that nobody has open any more is an error.
            with suppress(OSError):
                read = os.read(self.master, 1 << 16).decode(errors="replace")
                self.text += _ESCAPES.sub("", _TO_A_PLACE.sub("\n", read))

    @property
    def longest_line(self) -> int:
        return max(len(line) for line in re.split(r"[\r\n]+", self.text))


@contextmanager
def heeding_interrupts() -> Iterator[None]:
    """Let programs that are started heed Ctrl-C, as from a terminal.

    Tests may run in the background, where shells have it ignored, and what they start inherits it.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm"}
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        environment.pop(name, None)
    with heeding_interrupts():
        process = subprocess.Popen(
            [*COMMAND, *arguments], stdin=slave, stdout=slave, stderr=slave, env=environment
        )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        process.kill()
        process.wait()
        os.close(master)
