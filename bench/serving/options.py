"""What the benchmarks' options have in common: lists, how they are read, and a folder."""

import argparse
from collections.abc import Iterable

WORK_DIR = "for logs and models; with the same one vLLM finds again what it compiled"
"""vLLM's compilation cache has a model's folder in its keys, and the default is a new one."""


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
