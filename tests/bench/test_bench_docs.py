"""The stored report, and the tables of README.md and docs/results.md, say what is stored."""

from pathlib import Path

import pytest

from bench.report import build, read_all
from bench.reporting import plots
from bench.reporting.document import as_markdown
from bench.reporting.page_tables import README, RESULTS
from bench.tables import page_anew, read_stored

ROOT = Path(__file__).resolve().parents[2]


def test_the_stored_report_is_made_of_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a change: `python -m bench.report bench/results/*.json`, and copy it there."""
    monkeypatch.setattr(plots, "_png", lambda figure: b"")
    results, unread = read_all(sorted((ROOT / "bench/results").glob("*.json")))
    stored = (ROOT / "bench/results/report/report.md").read_text()
    assert as_markdown(build(results, unread)) == stored


@pytest.mark.parametrize("page", [README, RESULTS])
def test_the_tables_are_made_of_what_is_stored(page: str) -> None:
    """After a change: `python -m bench.tables`, and read the text around them again."""
    assert page_anew(page, read_stored()) == (ROOT / page).read_text()
