"""The table in docs/promises.md of what passes, from the lists: `--update` writes it."""

from collections import Counter

from testkit.pages import with_tables
from testkit.vllm_source import ROOT

from . import expected, not_applicable

PAGE = ROOT / "docs/promises.md"
MARK = "<!-- conformance -->"


def with_table(text: str) -> str:
    """Return the page's text with its table anew."""
    return with_tables(text, lambda line: _rows() if line == MARK else None)


def _rows() -> list[str]:
    paths = sorted(expected.FOLDER.glob("*.txt"))
    counts = [Counter(map(_row_of, expected.read(path))) for path in paths]
    releases = [path.stem.replace("vllm-", "vLLM ") for path in paths]
    header = ["of vLLM's `tests`", *releases, "not applicable"]
    rows = [header, ["---", *("---:" for _ in paths), "---"]]
    rows += [
        [f"`{name}`", *(str(count[name] or "") for count in counts), _reasons(name)]
        for name in sorted(set().union(*counts))
    ]
    return [f"| {' | '.join(row)} |" for row in rows]


def _row_of(name: str) -> str:
    file = name.partition("::")[0]
    return file.removeprefix("tests/") if file.startswith("tests/") else "v1/core"


def _reasons(name: str) -> str:
    reasons = Counter(
        reason
        for file, of_file in not_applicable.read("").reasons.items()
        for reason in of_file.values()
        if _row_of(file) == name
    )
    if name == "v1/core":
        return f"{reasons.total()} tests modify the scheduler's internals"
    return "; ".join(f"{number}: {reason}" for reason, number in reasons.items())
