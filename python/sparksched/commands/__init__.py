"""The commands of `sparksched`, and how they read numbers."""

import argparse
from collections.abc import Callable
from contextlib import suppress
from typing import Any


def number(kind: type[Any], least: float, most: float) -> Callable[[str], Any]:
    """Return an argument's type for argparse: numbers of a kind within bounds."""

    def read(text: str) -> Any:
        with suppress(ValueError):
            if least <= (value := kind(text)) <= most:
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least:g} to {most:g}")

    return read
