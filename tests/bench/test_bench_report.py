"""The report on results that are made up: what a table says, and what it refuses."""

import re
from pathlib import Path

import pytest

from bench import report
from bench.results import FOLDER, Results

SIDES = ["vllm", "sparksched"]
TABLE = report.Table("decode", ["decode"], {"tokens/s": "tokens_per_s"}, head="streams")


def made_up(
    folder: Path,
    values: tuple[float, float] = (100.0, 200.0),
    *,
    file: str = "a",
    model: str = "gpt-oss-120b",
    filler: str = "bench",
    rounds: int = 3,
) -> None:
    results = Results(folder / file, "decode", model=model)
    results.same |= {"gpu": "NVIDIA H200", "vllm": "0.33.0"}
    for number in range(rounds):
        for side, value in zip(SIDES, values, strict=True):
            metrics = {"tokens_per_s": value + number}
            results.add("16 streams", side, number, metrics, filler=filler)


def test_a_row_has_median_range_place_and_experts(tmp_path: Path) -> None:
    made_up(tmp_path)
    results = Results(tmp_path, "experts", model="gpt-oss-120b")
    results.same |= {"vllm": "0.33.0"}
    results.add("16 streams", "any", 0, {"experts": 50.6}, filler="bench")
    assert report.lines_of(TABLE, report.read(tmp_path)) == [
        "| NVIDIA H200, vLLM 0.33.0: streams | tokens/s | experts a layer and step |",
        "| --- | --- | --- |",
        "| 16 streams | 101 (100 to 102) → 201 (200 to 202) | 50.6 |",
    ]


def test_fillers_are_not_mixed(tmp_path: Path) -> None:
    made_up(tmp_path)
    made_up(tmp_path, file="b", model="gpt-oss-20b", filler="vllm")
    with pytest.raises(report.ReportError, match="filler is bench and vllm"):
        report.lines_of(TABLE, report.read(tmp_path))


def test_experts_that_nobody_has_counted_are_no_row(tmp_path: Path) -> None:
    made_up(tmp_path)
    with pytest.raises(report.ReportError, match="nobody has counted the experts"):
        report.lines_of(TABLE, report.read(tmp_path))


def test_one_round_is_no_row(tmp_path: Path) -> None:
    made_up(tmp_path, rounds=1)
    assert report.lines_of(TABLE, report.read(tmp_path)) == []


def test_what_was_measured_twice_is_refused(tmp_path: Path) -> None:
    made_up(tmp_path)
    made_up(tmp_path, file="b")
    with pytest.raises(report.ReportError, match="measured twice"):
        report.read(tmp_path)


@pytest.mark.parametrize(
    ("before", "after", "better", "said"),
    [
        ([1, 2], [3, 4], "more", "gain"),
        ([1, 2], [3, 4], "less", "loss"),
        ([1, 3], [2, 4], "more", "no difference"),
    ],
)
def test_ranges_that_overlap_are_no_difference(
    before: list[float], after: list[float], better: str, said: str
) -> None:
    series = report.pd.Series
    assert report.verdict(series(before), series(after), better) == said


def test_a_page_keeps_what_is_no_table(tmp_path: Path) -> None:
    made_up(tmp_path)
    rows = report.read(tmp_path)
    empty = "a\n<!-- table, if measured: agents -->\n| old |\n\nb\n"
    assert report.page_anew(empty, rows) == empty.replace("| old |\n", "")
    with pytest.raises(report.ReportError, match="there is no table x"):
        report.page_anew("<!-- table: x -->\n", rows)
    with pytest.raises(report.ReportError, match="nothing of table agents"):
        report.page_anew("<!-- table: agents -->\n", rows)


def test_a_report_of_a_folder_has_all_of_it(tmp_path: Path) -> None:
    made_up(tmp_path)
    text = report.whole_report(report.read(tmp_path))
    assert "| gpt-oss-120b, 16 streams, tokens_per_s | 101 (100 to 102) | 201" in text


def test_the_pages_have_the_tables_of_the_stored_results() -> None:
    for path, text in report.written_anew(report.read(FOLDER)).items():
        assert path.read_text() == text, f"{path}: make tables"


def test_no_table_of_a_page_has_more_than_eight_rows() -> None:
    for page in ("results.md", "results-host.md"):
        text = (report.ROOT / "docs" / page).read_text()
        for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
            assert table.count("\n") <= 10, table
