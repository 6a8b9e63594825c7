"""Waits until GPUs have their memory back: a server takes most of it, and the next one as well."""

import time
from collections.abc import Callable

from bench.header import ask_driver

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


def memory_of_gpus() -> str:
    """Return what NVIDIA's driver says of the GPUs' memory; nothing without it."""
    return ask_driver("memory.used,memory.total", "csv,noheader,nounits") or ""
