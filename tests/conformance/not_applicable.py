"""The tests that say nothing about sparksched, each with its reason: `not_applicable.toml`."""

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_suffix(".toml")

WHOLE = "*"
"""The name that stands for all tests of a file, which is not run."""

NEEDS = "needs "
"""How the reason of what fails with vLLM's own scheduler as well begins."""

# Where vLLM keeps the tests: the table's names are relative to it.
_FOLDER = "tests/v1/core/"


@dataclass(frozen=True)
class Table:
    """Reasons by file and by the test's name, with or without its parameters, or how it begins."""

    reasons: dict[str, dict[str, str]]

    def reason(self, nodeid: str) -> str | None:
        """Return why a test is not applicable; None if it is not listed."""
        file, name = _split(nodeid)
        of_file = self.reasons.get(file, {})
        return next((of_file[it] for it in of_file if _stands_for(it, name)), None)

    def unknown_names(self, nodeids: Iterable[str]) -> list[str]:
        """Return the table's names that none of these tests has, of the files they are in."""
        known: dict[str, list[str]] = {}
        for file, name in map(_split, nodeids):
            known.setdefault(file, []).append(name)
        return [
            f"{file}::{listed}"
            for file in self.reasons.keys() & known.keys()
            for listed in self.reasons[file]
            if not any(_stands_for(listed, name) for name in known[file])
        ]


def read(release: str, *, on_stock: bool = False) -> Table:
    """Read the table of a release of vLLM: what holds for all, and what holds for it alone.

    With `on_stock`, only what vLLM's own scheduler doesn't pass either.
    """
    reasons = tomllib.loads(FILE.read_text())
    only = reasons.pop("only", {})
    for file, of_file in only.get(release, {}).items():
        reasons.setdefault(file, {}).update(of_file)
    for of_file in reasons.values() if on_stock else ():
        for name in [name for name, reason in of_file.items() if not reason.startswith(NEEDS)]:
            del of_file[name]
    return Table(reasons)


def short_name(nodeid: str) -> str:
    """Return a test's name without the folder that all of them are in."""
    return nodeid.removeprefix(_FOLDER)


def _split(nodeid: str) -> tuple[str, str]:
    file, _, name = short_name(nodeid).partition("::")
    return file, name


def _stands_for(listed: str, name: str) -> bool:
    if listed.endswith("*"):
        return name.startswith(listed[:-1])
    return listed in (name, name.partition("[")[0])
