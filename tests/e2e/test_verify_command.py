"""`sparksched verify` for real: what it says, on a terminal and through a pipe, and does."""

import errno
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from sparksched.commands.verify import EXPECTATION, GOES_ON
from top.terminal import heeding_interrupts

from testkit.server import CPU_ARGUMENTS, CPU_ENVIRONMENT, START_TIMEOUT_S, reserved_port
from testkit.tiny_gpt_oss import write_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

COLUMNS, LINES = 80, 40
END_TIMEOUT_S = 60.0
# The hundredth step is told of.
NUM_TOKENS = 130


@dataclass
class Running:
    """The command, and what it has printed so far."""

    process: subprocess.Popen[bytes]
    output: int
    """What is read to know that."""
    printed: bytearray = field(default_factory=bytearray)

    @property
    def text(self) -> str:
        return self.printed.decode(errors="replace").replace("\r\n", "\n")

    def read(self) -> None:
        """Read to the end, for a thread: a full pipe or terminal would hold the server up."""
        try:
            while chunk := os.read(self.output, 1 << 16):
                self.printed += chunk
        except OSError as error:
            # Nobody has the terminal open any more.
            if error.errno != errno.EIO:
                raise

    def wait_for(self, what: Callable[[], object]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not what():
            assert self.process.poll() is None, self.text
            assert time.monotonic() < deadline, self.text
            time.sleep(0.1)

    def press_ctrl_c(self) -> None:
        """Signal the whole group, as a terminal does."""
        os.killpg(self.process.pid, signal.SIGINT)


def terminal_of_80_columns() -> tuple[int, int]:
    output, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    return output, end


@contextmanager
def running(place: Callable[[], tuple[int, int]], *arguments: str) -> Iterator[Running]:
    """Start the command with its streams in a place, a terminal or a pipe."""
    output, end = place()
    with heeding_interrupts():
        process = subprocess.Popen(
            [sys.executable, "-m", "sparksched.cli", "verify", *arguments],
            env={**os.environ, **CPU_ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            stdout=end,
            stderr=end,
            start_new_session=True,
        )
    os.close(end)
    command = Running(process, output)
    reader = threading.Thread(target=command.read)
    reader.start()
    try:
        yield command
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reader.join()
        os.close(output)


def is_up(url: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"{url}/health", timeout=5).is_success
    return False


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    "place", [terminal_of_80_columns, pytest.param(os.pipe, marks=pytest.mark.full)]
)
def test_a_server_is_verified_until_it_is_told_to_end(
    place: Callable[[], tuple[int, int]], model: Path
) -> None:
    with ExitStack() as stack:
        port = stack.enter_context(reserved_port())
        url = f"http://127.0.0.1:{port}"
        options = ("--served-model-name=tiny", "--host=127.0.0.1", f"--port={port}")
        arguments = ("--then", "stop", str(model), *options, *CPU_ARGUMENTS)
        command = stack.enter_context(running(place, *arguments))
        command.wait_for(lambda: is_up(url))
        expectation = EXPECTATION.format(goes_on=GOES_ON["stop"])
        assert command.text.startswith(expectation)
        assert max(map(len, expectation.splitlines())) <= COLUMNS
        command.wait_for(lambda: "verifies each step, which makes steps slower" in command.text)
        body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": NUM_TOKENS, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()
        assert answer.json()["usage"]["completion_tokens"] == NUM_TOKENS
        command.wait_for(lambda: "100 steps verified, no difference" in command.text)
        command.press_ctrl_c()
        status = command.process.wait(END_TIMEOUT_S)
    assert status == 0, command.text
    assert not re.search("schedulers differ|verification has failed", command.text)
