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
    counts = [Counter(map(_folder_of, expected.read(path))) for path in paths]
    releases = [path.stem.replace("vllm-", "vLLM ") for path in paths]
    header = ["of vLLM's `tests`", *releases, "fail with both", "fail with ours alone"]
    rows = [header, ["---", *("---:" for _ in paths), "---", "---"]]
    rows += [
        [f"`{name}`", *(str(count[name] or "") for count in counts), *_reasons(name)]
        for name in sorted(set().union(*counts))
    ]
    return [f"| {' | '.join(row)} |" for row in rows]


def _folder_of(name: str) -> str:
    parts = name.partition("::")[0].split("/")
    return "/".join(parts[1:3]) if parts[0] == "tests" else "v1/core"


def _reasons(folder: str) -> tuple[str, str]:
    """Return why tests fail with vLLM's own scheduler as well, and why with ours alone."""
    counts = Counter(
        reason
        for file, of_file in not_applicable.read("").reasons.items()
        for reason in of_file.values()
        if _folder_of(file) == folder
    )
    if folder == "v1/core":
        return "", f"{counts.total()}: modifies the scheduler's internals"
    both: list[str] = []
    ours: list[str] = []
    for reason, number in counts.most_common():
        side = both if reason.startswith(not_applicable.NEEDS) else ours
        side.append(f"{number}: {reason}")
    return "; ".join(both), "; ".join(ours)
