"""The report's tables of what a step and a recording cost, of results whose figures are known."""

from pathlib import Path

import pytest
import synthetic
from reported import rows_in, table_with, tables_in

from bench.report import build, read_all
from bench.reporting.document import Section
from bench.reporting.others import RECORDING, kind_of
from bench.reporting.recording import recording
from bench.reporting.step_cost import step_cost


def rows_with(sections: list[Section], column: str) -> list[list[str]]:
    """Return the rows of the only table that has a column."""
    return rows_in([table_with(sections, column)])


# ---- steps ----


def test_a_broadcast_has_its_times_and_its_bytes() -> None:
    assert rows_with(step_cost(synthetic.step_cost()), "bytes") == [
        ["64.0", "24.0", "48.0", "16.0", "32.0", "1.50x", "5,300 → 4,100"]
    ]


def test_a_verified_step_is_beside_vllm_s_alone() -> None:
    assert rows_with(step_cost(synthetic.step_cost()), "verified") == [
        ["256", "300", "600", "345", "690", "45.0"]
    ]


def test_a_counted_step_is_beside_one_without_metrics() -> None:
    assert rows_with(step_cost(synthetic.step_cost()), "with metrics") == [
        ["8.00", "28.5", "57.0", "30.0", "60.0", "1.50"]
    ]


@pytest.mark.parametrize(
    ("table", "column", "side"),
    [
        ("broadcast", "bytes", "stock"),
        ("verified", "verified", "verifying"),
        ("counted", "with metrics", "sparksched without metrics"),
    ],
)
def test_a_step_without_a_side_is_missing_and_never_zero(
    table: str, column: str, side: str
) -> None:
    result = synthetic.step_cost()
    del result[table][0][side]
    (row,) = rows_with(step_cost(result), column)
    assert row.count("missing") == 3
    assert "0" not in row


@pytest.mark.parametrize(
    ("table", "column"),
    [("broadcast", "bytes"), ("verified", "verified"), ("counted", "with metrics")],
)
def test_a_table_that_was_not_asked_for_is_left_out(table: str, column: str) -> None:
    result = synthetic.step_cost()
    del result[table]
    assert not any(column in it.columns for it in tables_in(step_cost(result)))


# ---- recordings ----


def test_a_recording_is_known_and_has_its_section(tmp_path: Path) -> None:
    path = tmp_path / "recording.json"
    path.write_text('{"run": {}, "recording": []}')
    results, unread = read_all([path])
    assert not unread
    assert kind_of(results[0][1]) == RECORDING
    titles = [section.title for section in build([(path, synthetic.recording())], [])]
    assert "A recording" in titles


def test_a_recording_costs_what_was_measured() -> None:
    assert rows_with(recording(synthetic.recording()), "bytes a step") == [
        [
            "64.0",
            "off",
            "500 → 10.0",
            "600 → 12.0",
            "2,500 → 50.0",
            "3,000 → 60.0",
            "0 → 0",
        ],
        [
            "64.0",
            "without tokens",
            "550 → 11.0",
            "660 → 13.2",
            "2,750 → 55.0",
            "3,300 → 66.0",
            "210 → 220",
        ],
        [
            "64.0",
            "with tokens",
            "600 → 12.0",
            "720 → 14.4",
            "3,000 → 60.0",
            "3,600 → 72.0",
            "420 → 440",
        ],
    ]


def test_a_recording_of_one_side_lacks_the_other() -> None:
    result = synthetic.recording()
    result["recording"] = [it for it in result["recording"] if it["side"] == "sparksched"]
    (_, _, row) = rows_with(recording(result), "bytes a step")
    assert row[2:] == [f"missing → {it}" for it in ("12.0", "14.4", "60.0", "72.0", "440")]
