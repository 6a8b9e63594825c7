"""Pages name what the code has, and their links lead somewhere."""

import re
from pathlib import Path

import pytest
from sparksched import environment
from sparksched.api_server.metrics import EngineCollector

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]


def test_all_variables_are_explained() -> None:
    text = (ROOT / "docs/configuration.md").read_text()
    assert set(re.findall(r"^- `(\w+_\w+)`:", text, re.MULTILINE)) == set(environment.VARIABLES)


def test_all_series_are_explained() -> None:
    text = (ROOT / "docs/metrics.md").read_text()
    series = {
        family.name + "_total" * (family.type == "counter")
        for family in EngineCollector().describe()
    }
    assert set(re.findall(r"`(sparksched:\w+)`", text)) == series


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as its readers' browsers know them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", it.lower()).replace(" ", "-") for it in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda it: it.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!http)([^)]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
