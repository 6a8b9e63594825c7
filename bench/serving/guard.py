"""Stops a process group when the benchmark ends, however that ends.

A server that outlives a killed benchmark would keep the GPU. A process of its own waits for that:
its input is a pipe whose other end only the benchmark has.

    python -m bench.serving.guard GROUP < PIPE
"""

import os
import signal
import sys
import time
from contextlib import suppress

STOP_S = 30.0
POLL_S = 0.1


def stop_group(group: int) -> None:
    """Stop all processes of a group: kindly first, so that they can clean up."""
    with suppress(ProcessLookupError):  # nobody is left in it
        os.killpg(group, signal.SIGTERM)
        deadline = time.monotonic() + STOP_S
        while time.monotonic() < deadline:
            time.sleep(POLL_S)
            os.killpg(group, 0)
        os.killpg(group, signal.SIGKILL)


def main() -> None:
    """Wait for the end of the input, then stop the group."""
    group = int(sys.argv[1])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    stop_group(group)


if __name__ == "__main__":
    main()
