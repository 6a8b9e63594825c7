"""Waits until GPUs have their memory back: a server takes most of it, and the next one as well."""

import subprocess
import time
from collections.abc import Callable

from bench.header import driver_query

FREE_SHARE = 0.95
"""Of a GPU's memory. A driver keeps some for itself."""
LIMIT_S = 60.0
POLL_S = 1.0


def wait_until_free(query: Callable[[], str], limit_s: float = LIMIT_S) -> bool:
    """Wait until all GPUs are free; return whether they are, as far as anyone says.

    Args:
        query: Returns used and total memory of a GPU in each line, or nothing if nobody knows.
        limit_s: For how long at most.

    """
    deadline = time.monotonic() + limit_s
    while any(share < FREE_SHARE for share in free_shares(query())):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def free_shares(text: str) -> list[float]:
    """Return how much of each GPU's memory is free; those that don't tell are left out."""
    shares = []
    for line in text.splitlines():
        used, _, total = line.partition(",")
        try:
            shares.append(1 - float(used) / float(total))
        except (ValueError, ZeroDivisionError):
            continue
    return shares


def ask_driver() -> str:
    """Return what NVIDIA's driver says of the GPUs that servers may use; nothing without it."""
    command = driver_query("memory.used,memory.total", "csv,noheader,nounits")
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
