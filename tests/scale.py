"""How large tests are that can be of any size: those of `make test`, or of `make test-all`."""

import os

SCALE = os.environ.get("SCALE") or "short"
if SCALE not in ("short", "full"):
    raise ValueError(f"SCALE={SCALE!r} is neither short nor full")

FULL = SCALE == "full"
"""Whether this is `make test-all`."""


def size(variable: str, short: int, full: int, minimum: int = 1) -> int:
    """Return the whole number that a variable says, or that of the scale if it says nothing.

    Raises:
        ValueError: if it says something else, or less than the minimum.

    """
    value = os.environ.get(variable) or str(full if FULL else short)
    number = int(value) if value.isascii() and value.isdigit() else -1
    if number < minimum:
        raise ValueError(f"{variable}={value!r} is not a whole number of at least {minimum}")
    return number
