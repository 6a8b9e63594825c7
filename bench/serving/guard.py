"""Stops a process group when the benchmark ends, however that ends.

A server that outlives a killed benchmark would keep the GPU. A process of its own waits for that:
its input is a pipe whose other end only the benchmark has.

    python -m bench.serving.guard GROUP < PIPE
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

STOP_S = 30.0
POLL_S = 0.1
GONE = "X"
ENDED = ("Z", GONE)


def stop_group(group: int) -> None:
    """Stop all processes of a group: kindly first, so that they can clean up."""
    with suppress(ProcessLookupError):  # nobody is left in it
        os.killpg(group, signal.SIGTERM)
        deadline = time.monotonic() + STOP_S
        while is_alive(group):
            if time.monotonic() > deadline:
                os.killpg(group, signal.SIGKILL)
                return
            time.sleep(POLL_S)


def is_alive(group: int) -> bool:
    """Whether any process of a group still runs.

    Those that have ended count for as long as nobody asks how, and in a container there may be
    nobody: the kernel would say that the group is there.
    """
    return any(
        pgrp == group and state not in ENDED for state, pgrp in map(_state_and_group, _processes())
    )


def _processes() -> Iterator[Path]:
    return Path("/proc").glob("[0-9]*")


def _state_and_group(process: Path) -> tuple[str, int]:
    try:
        state, _parent, group, *_ = (process / "stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return GONE, 0
    return state, int(group)


def main() -> None:
    """Wait for the end of the input, then stop the group."""
    group = int(sys.argv[1])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    stop_group(group)


if __name__ == "__main__":
    main()
