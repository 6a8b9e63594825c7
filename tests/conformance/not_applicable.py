"""The tests that say nothing about sparksched, each with its reason: `not_applicable.toml`."""

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_suffix(".toml")

# Where vLLM keeps the tests: the table's names are relative to it.
_FOLDER = "tests/v1/core/"


@dataclass(frozen=True)
class Table:
    """Reasons by file and by the test's name, with or without its parameters."""

    reasons: dict[str, dict[str, str]]

    def reason(self, nodeid: str) -> str | None:
        """Return why a test is not applicable; None if it is not listed."""
        file, name = _split(nodeid)
        of_file = self.reasons.get(file, {})
        return of_file.get(name) or of_file.get(_without_parameters(name))

    def unknown_names(self, nodeids: Iterable[str]) -> list[str]:
        """Return the table's names that none of these tests has, of the files they are in."""
        known: dict[str, set[str]] = {}
        for file, name in map(_split, nodeids):
            known.setdefault(file, set()).update((name, _without_parameters(name)))
        return [
            f"{file}::{name}"
            for file in self.reasons.keys() & known.keys()
            for name in self.reasons[file].keys() - known[file]
        ]


def read(release: str, path: Path = FILE) -> Table:
    """Read the table of a release of vLLM: what holds for all, and what holds for it alone."""
    reasons = tomllib.loads(path.read_text())
    only = reasons.pop("only", {})
    for file, of_file in only.get(release, {}).items():
        reasons.setdefault(file, {}).update(of_file)
    return Table(reasons)


def short_name(nodeid: str) -> str:
    """Return a test's name without the folder that all of them are in."""
    return nodeid.removeprefix(_FOLDER)


def _split(nodeid: str) -> tuple[str, str]:
    file, _, name = short_name(nodeid).partition("::")
    return file, name


def _without_parameters(name: str) -> str:
    return name.partition("[")[0]
