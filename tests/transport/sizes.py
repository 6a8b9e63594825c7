"""How large tests are that can be of any size: CI's, unless the environment says another."""

import os


def size(variable: str, default: int, minimum: int = 1) -> int:
    """Return the whole number that a variable says, or the default if it says nothing.

    Raises:
        ValueError: if it says something else, or less than the minimum.

    """
    value = os.environ.get(variable) or str(default)
    number = int(value) if value.isascii() and value.isdigit() else -1
    if number < minimum:
        raise ValueError(f"{variable}={value!r} is not a whole number of at least {minimum}")
    return number
