"""What the stored report and docs/results.md say of real servers is what is stored."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.report import build, read_all
from bench.reporting import plots
from bench.reporting.cells import ALL, DECODE, HTTP, Pair, marked, pairs_of
from bench.reporting.document import as_markdown
from bench.reporting.engine import engine_rate

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/results.md"
README = ROOT / "README.md"
STORED = sorted((ROOT / "bench/results").glob("decode_*.json"))
DRIVERS = {"asyncllm": "AsyncLLM", "http": "HTTP"}

Both = tuple[Any, Any]


@pytest.fixture(scope="module")
def pairs() -> list[Pair]:
    return pairs_of([json.loads(path.read_text()) for path in STORED])


def test_the_stored_report_is_made_of_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a change: `python -m bench.report bench/results/*.json`, and copy it there."""
    monkeypatch.setattr(plots, "_png", lambda figure: b"")
    results, unread = read_all(sorted((ROOT / "bench/results").glob("*.json")))
    stored = (ROOT / "bench/results/report/report.md").read_text()
    assert as_markdown(build(results, unread)) == stored


def rows_below(heading: str, page: Path = PAGE) -> list[list[str]]:
    """Return the rows of the first table whose heading begins so."""
    lines = page.read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(heading))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    assert rows
    return rows


def says(text: str, both: Both) -> bool:
    """Whether a cell has both numbers, with as many digits as it has."""
    parts = [part.strip() for part in text.replace("\\*", "").split("→")]
    return len(parts) == 2 and all(map(_is_rounded, parts, both))


def _is_rounded(text: str, number: Any) -> bool:
    digits = len(text.partition(".")[2])
    return number is not None and text == f"{number:,.{digits}f}"


def name_of(pair: Pair) -> str:
    key = pair.key
    mode = "" if key.mode == "async" else f", {key.mode}"
    name = f"{key.model}{mode}, {DRIVERS[key.driver]}, {key.size}"
    return marked(name, pair.is_of_separate_runs)


def assert_row(row: Sequence[str], expected: Sequence[Both]) -> None:
    assert len(row) == len(expected) + 1
    for text, both in zip(row[1:], expected, strict=True):
        assert says(text, both), (row[0], text, both)


def scheduler_us(pair: Pair) -> Both:
    stock, ours = (
        sum(side.get("phases", f"{it}_us", "p50") for it in ("schedule", "update"))
        for side in (pair.stock, pair.ours)
    )
    return stock, ours


def test_the_table_of_servers(pairs: list[Pair]) -> None:
    known = {name_of(it): it for it in pairs if it.key.workload == DECODE and it.key.cores == ALL}
    for row in rows_below("| model, driver, streams x tokens |"):
        pair = known[row[0]]
        stock, ours = (engine_rate(it, pair.key.concurrency) for it in (pair.stock, pair.ours))
        expected = [
            pair.figures("tokens_per_s"),
            (stock, ours),
            pair.figures("itl_ms", "p50"),
            pair.figures("itl_ms", "p99"),
            scheduler_us(pair),
            pair.figures("cpu", "us_per_token", "engine"),
            pair.figures("cpu", "us_per_token", "API server"),
        ]
        assert_row(row, expected)


def test_the_table_of_merged_outputs(pairs: list[Pair]) -> None:
    known = {name_of(it): it for it in pairs if it.key.workload == DECODE and it.key.cores == ALL}
    for row in rows_below("| streams x tokens | tokens an output |"):
        pair = known[row[0]]
        stock, ours = (1 / (1 - share) for share in pair.figures("merged_share"))
        gaps = [pair.figures("output_gap_ms", it) for it in ("p50", "p99")]
        ttft = [pair.figures("ttft_ms", it) for it in ("p50", "p99")]
        assert_row(row, [(stock, ours), *gaps, *ttft])


def test_the_table_of_few_processors(pairs: list[Pair]) -> None:
    known = {
        marked(f"{it.key.model}, {it.key.cores}", it.is_of_separate_runs): it
        for it in pairs
        if it.key.cores != ALL and it.key.driver == HTTP
    }
    for row in rows_below("| model, processors |"):
        pair = known[row[0]]
        latencies = [pair.figures("itl_ms", it) for it in ("p50", "p99")]
        ttft = [pair.figures("ttft_ms", it) for it in ("p50", "p99")]
        assert_row(row, [pair.figures("tokens_per_s"), *latencies, *ttft])


def test_the_table_of_workloads(pairs: list[Pair]) -> None:
    names = {"mixed": "mixed", "prefix": "shared"}
    known = {names[it.key.workload]: it for it in pairs if it.key.workload != DECODE}
    for row in rows_below("| prompts |"):
        pair = known[row[0]]
        latencies = [pair.figures("itl_ms", it) for it in ("p50", "p99")]
        ttft = pair.figures("ttft_ms", "p50")
        assert_row(row, [pair.figures("tokens_per_s"), *latencies, ttft])


def test_the_table_of_two_gpus(pairs: list[Pair]) -> None:
    known = {f"{it.key.model}, {it.key.size}": it for it in pairs if it.key.layout}
    rows = rows_below("| model, layout, streams x tokens |")
    assert {row[0] for row in rows} == known.keys()
    for row in rows:
        pair = known[row[0]]
        assert {len(pair.stock.rounds()), len(pair.ours.rounds())} == {2}
        assert not pair.is_of_separate_runs
        expected = [
            pair.figures("tokens_per_s"),
            pair.figures("itl_ms", "p50"),
            pair.figures("itl_ms", "p99"),
            scheduler_us(pair),
            pair.both("engine_cpu", "without_waiting_us_per_token"),
            pair.figures("cpu", "us_per_token", "API server"),
        ]
        assert_row(row, expected)


def test_the_readme_s_table_of_one_gpu(pairs: list[Pair]) -> None:
    """An asterisk at a latency says that it is the time between outputs."""
    known = {
        name_of(it).replace(it.key.size, f"{it.key.concurrency:,}"): it
        for it in pairs
        if it.key.workload == DECODE and it.key.cores == ALL and not it.key.layout
    }
    rows = rows_below("| model, driver, streams |", README)
    for row in rows:
        if row[0].startswith("**"):
            continue
        pair = known[row[0].replace("‡", "").strip()]
        latencies = [
            pair.figures("output_gap_ms" if "*" in cell else "itl_ms", percentile)
            for cell, percentile in zip(row[2:4], ("p50", "p99"), strict=True)
        ]
        costs = [pair.figures("cpu", "us_per_token", it) for it in ("engine", "API server")]
        assert_row(row, [pair.figures("tokens_per_s"), *latencies, *costs])


def test_the_readme_s_table_of_two_gpus(pairs: list[Pair]) -> None:
    known = {f"{it.key.model}, {it.key.concurrency:,}": it for it in pairs if it.key.layout}
    for row in rows_below("| model, layout, streams |", README):
        pair = known[row[0]]
        expected = [
            pair.figures("tokens_per_s"),
            pair.figures("itl_ms", "p99"),
            pair.both("engine_cpu", "without_waiting_us_per_token"),
            pair.figures("cpu", "us_per_token", "API server"),
        ]
        assert_row(row, expected)


def test_rows_of_two_rounds_are_said(pairs: list[Pair]) -> None:
    """The page names them; all others have three."""
    text = " ".join(PAGE.read_text().split())
    (said,) = re.findall(
        r"There were two, so that a figure is the mean of two, of (.*?)\. The", text
    )
    assert said == (
        "Qwen2-1.5B and gpt-oss-20b over HTTP, of gpt-oss-120b over HTTP with 1, 64 and 256 "
        "streams, with few processors, and with mixed lengths and shared prefixes"
    )
    listed = {row[0] for row in rows_below("| model, driver, streams x tokens |")}
    for pair in pairs:
        key = pair.key
        is_in_table = key.workload == DECODE and key.cores == ALL and name_of(pair) in listed
        has_two = not is_in_table or (
            key.driver == HTTP and (key.model != "gpt-oss-120b" or key.concurrency != 8)
        )
        rounds = {len(pair.stock.rounds()), len(pair.ours.rounds())}
        if is_in_table or key.cores != ALL or key.workload != DECODE:
            assert rounds == ({2} if has_two else {3}), pair.label
