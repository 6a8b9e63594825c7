"""Which tests pass, and on whose scheduler: `expected/`, a list for each version of vLLM.

Tests that are not applicable are not in it: `not_applicable.toml` and vLLM itself say which.
"""

from collections.abc import Iterable
from pathlib import Path

from .not_applicable import short_name
from .report import Verdict

FOLDER = Path(__file__).with_name("expected")

Outcomes = dict[str, str]
"""By the test's name: what comes of it, with the reason of a fallback."""


def path_of(version: str) -> Path:
    """Return the list for a version of vLLM; it may not exist."""
    return FOLDER / f"vllm-{version}.txt"


def read(path: Path) -> Outcomes:
    """Read a list."""
    lines = path.read_text().splitlines()
    return dict(line.split("  ", 1) for line in lines)


def write(path: Path, outcomes: Outcomes) -> None:
    """Write a list."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{name}  {outcome}\n" for name, outcome in sorted(outcomes.items())))


def outcomes_of(verdicts: dict[str, tuple[Verdict, str]]) -> Outcomes:
    """Return the outcomes of those tests that are listed."""
    listed = (Verdict.PASSED, Verdict.FALLBACK)
    return {
        short_name(nodeid): f"{verdict.value}: {reason}" if reason else verdict.value
        for nodeid, (verdict, reason) in verdicts.items()
        if verdict in listed
    }


def merged(known: Outcomes, outcomes: Outcomes, nodeids: Iterable[str]) -> Outcomes:
    """Return a list with these outcomes, and with what it says of files that were not run."""
    files = set(map(_file_of, map(short_name, nodeids)))
    kept = {name: outcome for name, outcome in known.items() if _file_of(name) not in files}
    return kept | outcomes


def changes(known: Outcomes, outcomes: Outcomes, nodeids: Iterable[str]) -> list[str]:
    """Return what is not as it was, among the tests that were run."""
    none = "not among those that pass"
    return [
        f"{name}: {known.get(name, none)} -> {outcomes.get(name, none)}"
        for name in map(short_name, nodeids)
        if known.get(name) != outcomes.get(name)
    ]


def missing(known: Outcomes, nodeids: Iterable[str]) -> list[str]:
    """Return the list's names that no test has, of the files that were run as a whole."""
    names = list(map(short_name, nodeids))
    files = set(map(_file_of, names))
    return sorted(name for name in known.keys() - set(names) if _file_of(name) in files)


def _file_of(name: str) -> str:
    return name.partition("::")[0]
