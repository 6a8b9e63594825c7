"""What a test's outcome says about sparksched, and all of it as text."""

import enum
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Protocol


class Verdict(enum.Enum):
    """What came of a test."""

    PASSED = "passed"
    """On the native scheduler alone."""
    FAILED = "failed"
    FALLBACK = "fallback"
    """Passed, but on vLLM's own scheduler, which took over as its configuration demands."""
    NOT_APPLICABLE = "not applicable"
    LISTED_BUT_PASSES = "listed but passes"
    """The table of tests that are not applicable is out of date."""


NO_SCHEDULER = "builds no scheduler"
NAMES_ANOTHER = "names another class of vLLM's"


class Built(Protocol):
    """How many schedulers a test built, of ours and of vLLM's, and what sparksched refused."""

    num_native: int
    num_stock: int
    refused: list[str]


def judge(outcome: str, built: Built, listed: str | None) -> tuple[Verdict, str]:
    """Return the verdict on a test, and its reason: why it is not applicable, or what fell back.

    Args:
        outcome: pytest's: "passed", "failed" or "skipped".
        built: What the test built.
        listed: The reason for which it is listed as not applicable, if it is.

    """
    if outcome == "skipped":
        return Verdict.NOT_APPLICABLE, ""
    if outcome == "failed":
        return (Verdict.FAILED, "") if listed is None else (Verdict.NOT_APPLICABLE, listed)
    if listed is not None:
        return Verdict.LISTED_BUT_PASSES, listed
    if built.num_stock:
        return Verdict.FALLBACK, ", ".join(dict.fromkeys(built.refused)) or NAMES_ANOTHER
    if built.num_native:
        return Verdict.PASSED, ""
    return Verdict.NOT_APPLICABLE, NO_SCHEDULER


@dataclass
class Report:
    """The verdicts of a session."""

    verdicts: dict[str, tuple[Verdict, str]] = field(default_factory=dict)
    unknown_names: list[str] = field(default_factory=list)
    """Names in the tables that no test has."""
    changes: list[str] = field(default_factory=list)
    """Tests of which something else is expected."""

    @property
    def is_wrong(self) -> bool:
        """Whether there is something to do about the tables."""
        return bool(self.unknown_names or self.changes)

    def enter(self, nodeid: str, verdict: Verdict, reason: str) -> None:
        """Add a test."""
        self.verdicts[nodeid] = verdict, reason

    def text(self) -> str:
        """Return reasons, with the tests or their number, and the counts by file."""
        parts = [
            self._fallbacks(),
            self._not_applicable(),
            self._mistakes(),
            self._counts(),
        ]
        return "\n\n".join(part for part in parts if part)

    def _fallbacks(self) -> str:
        lines = ["passed on vLLM's own scheduler, because sparksched leaves to it:"]
        for reason, nodeids in self._by_reason(Verdict.FALLBACK):
            lines.append(f"  {len(nodeids):4}  {reason}")
        return "\n".join(lines)

    def _not_applicable(self) -> str:
        lines = ["not applicable:"]
        for reason, nodeids in self._by_reason(Verdict.NOT_APPLICABLE):
            lines.append(f"  {len(nodeids):4}  {reason}")
            if reason != NO_SCHEDULER:
                lines += [f"          {nodeid.rpartition('/')[2]}" for nodeid in nodeids]
        return "\n".join(lines)

    def _by_reason(self, wanted: Verdict) -> list[tuple[str, list[str]]]:
        """Return the tests with a verdict by its reason, the commonest first."""
        by_reason: defaultdict[str, list[str]] = defaultdict(list)
        for nodeid, (verdict, reason) in self.verdicts.items():
            if verdict is wanted:
                by_reason[reason].append(nodeid)
        return sorted(by_reason.items(), key=lambda item: -len(item[1]))

    def _mistakes(self) -> str:
        """Return what is to be done about the tables."""
        lines = [f"listed but passes: {it}" for it in self._with(Verdict.LISTED_BUT_PASSES)]
        lines += [f"listed but unknown: {name}" for name in self.unknown_names]
        lines += [f"changed: {change}" for change in self.changes]
        return "\n".join(lines)

    def _with(self, verdict: Verdict) -> list[str]:
        return [nodeid for nodeid, (it, _) in self.verdicts.items() if it is verdict]

    def _counts(self) -> str:
        counts: defaultdict[str, Counter[Verdict]] = defaultdict(Counter)
        for nodeid, (verdict, _) in self.verdicts.items():
            file = nodeid.partition("::")[0].rpartition("/")[2]
            counts[file][verdict] += 1
            counts["total"][verdict] += 1
        width = max(map(len, counts), default=0)
        header = "  ".join(verdict.value for verdict in Verdict)
        lines = [f"{'':{width}}  {header}"]
        for file in sorted(counts, key=lambda file: file == "total"):
            cells = (f"{counts[file][it]:{len(it.value)}}" for it in Verdict)
            lines.append(f"{file:{width}}  {'  '.join(cells)}")
        return "\n".join(lines)
