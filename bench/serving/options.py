"""Options that have lists: how they are read, and refused."""

import argparse
from collections.abc import Iterable


def names(text: str) -> tuple[str, ...]:
    """Read `A,...`."""
    return tuple(part for part in text.split(",") if part)


def numbers(text: str) -> tuple[int, ...]:
    """Read `N,...`."""
    return tuple(int(part) for part in text.split(","))


def refuse_unknown(
    parser: argparse.ArgumentParser, options: argparse.Namespace, **allowed: Iterable[str]
) -> None:
    """End the program if an option, by its name in `options`, has a value that is not allowed."""
    for name, known in allowed.items():
        if unknown := set(getattr(options, name) or ()) - set(known):
            option = f"--{name.replace('_', '-')}"
            parser.error(f"{option}: {', '.join(unknown)} is none of {', '.join(known)}")
