"""Tables, pictures and pages: rows and figures of results that are made up, and what is stored."""

import json
import re
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from synthetic import cell, result

from bench.header import ROOT
from bench.report import pages, unread
from bench.report.pages import PageError, page_anew, read_results, read_stored, written_anew
from bench.report.plots import pictures
from bench.report.tables import TABLES, Results, as_markdown
from bench.report.unread import noted, read_parts

Row = dict[str, Any]
BY_NAME = {table.name: table for table in TABLES}


def rows(name: str, *results: Row) -> list[list[str]]:
    """Return the rows of a table."""
    return list(BY_NAME[name].rows({f"{number}.json": it for number, it in enumerate(results)}))


def set_in_rounds(found: Row, scheduler: str, **values: Any) -> None:
    for it in found["cells"]:
        if it["scheduler"] == scheduler:
            for entry in it["rounds"]:
                entry.update(values)


# ---- servers ----


def test_a_row_of_servers() -> None:
    assert rows("http", result()) == [
        [
            "gpt-oss-20b, 64 x 384",
            "12,346 → 24,691",
            "4.00 → 2.00",
            "8.00 → 4.00",
            "1",
            "50.0 → 25.0",
            "9.96 → 4.98",
            "GPU",
        ]
    ]


@pytest.mark.parametrize(
    ("name", "changes", "label"),
    [
        ("asyncllm", {"driver": "asyncllm"}, "gpt-oss-20b, 64 x 384"),
        ("sync", {"driver": "asyncllm", "mode": "sync"}, "gpt-oss-20b, 64 x 384"),
        ("two_processors", {"cores": "2", "mode": "sync"}, "gpt-oss-20b, 64 x 384, sync"),
        ("gpus", {"model": "gpt-oss-20b, TP 2"}, "gpt-oss-20b, TP 2, 64 x 384"),
        ("http", {"front_end": "rust"}, "gpt-oss-20b, Rust front end, 64 x 384"),
    ],
)
def test_each_case_is_in_the_table_that_asks_for_it(name: str, changes: Row, label: str) -> None:
    found = result(**changes)
    served = ("http", "asyncllm", "sync", "two_processors", "gpus")
    assert [it for it in served if rows(it, found)] == [name]
    assert rows(name, found)[0][0] == label
    assert all(len(row) == len(BY_NAME[name].columns) for row in rows(name, found))


@pytest.mark.parametrize(
    ("changes", "label"),
    [
        ({}, "gpt-oss-20b, 64 x 384, HTTP"),
        ({"driver": "asyncllm"}, "gpt-oss-20b, 64 x 384, AsyncLLM"),
        (
            {"mode": "sync", "cores": "4", "concurrency": 1},
            "gpt-oss-20b, 1 x 384, HTTP, sync, 4 processors",
        ),
    ],
)
def test_a_run_shows_all_that_it_has_measured(changes: Row, label: str) -> None:
    assert f"\n| {label} | 12,346" in as_markdown({"x": result(**changes)})


def test_outputs_of_several_tokens_are_told_beside_the_time_between_them() -> None:
    found = result()
    set_in_rounds(found, "sparksched", merged_share=0.75, output_gap_ms={"p50": 9.0, "p99": 20.0})
    row = rows("http", found)[0]
    assert row[2:5] == ["4.00 → 9.00", "8.00 → 20.0", "1.0 → 4.0"]
    # Few of them are no matter.
    set_in_rounds(found, "sparksched", merged_share=0.009)
    assert rows("http", found)[0][4] == "1"


def test_streams_of_other_lengths_are_no_pair() -> None:
    found = result()
    found["cells"][1]["output_tokens"] = [128, 128]
    assert [row[1] for row in rows("http", found)] == ["missing → 24,691", "12,346 → missing"]


def test_what_has_failed_is_no_row_and_is_told() -> None:
    found = result()
    found["cells"] = [cell("stock") | {"error": "the server is gone\nand more"}]
    del found["cells"][0]["rounds"]
    assert rows("http", found) == []
    assert (
        "Failed: gpt-oss-20b, stock, all, 64: the server is gone\n"
        in as_markdown({"x": found}) + "\n"
    )


@pytest.mark.parametrize(
    ("busiest", "late", "waited_us", "cores", "expected"),
    [
        (55.0, 0.1, 500.0, "2", "GPU"),
        (95.0, 0.1, 500.0, "2", "API server"),
        (55.0, 0.9, 500.0, "2", "engine"),
        (55.0, 0.1, 20.0, "2", "engine"),
        (55.0, 0.1, None, "2", "not known"),
        (95.0, 0.9, 20.0, "1", "processor"),
    ],
)
def test_who_limits(
    busiest: float, late: float, waited_us: float | None, cores: str, expected: str
) -> None:
    found = result(cores=cores)
    for it in found["cells"]:
        it["phases"] |= {"gap_estimate": {"host_late_share": late}, "wait_us": {"p50": waited_us}}
        for entry in it["rounds"]:
            entry["cpu"]["share"]["API server"]["busiest"] = busiest
    assert rows("servers", found)[0][-1] == expected


def test_a_kv_cache_that_is_full_limits_before_all_else() -> None:
    found = result(cores="1")
    set_in_rounds(found, "stock", preempted=0)
    set_in_rounds(found, "sparksched", preempted=1)
    assert rows("servers", found)[0][-1] == "processor → KV cache"


def test_the_same_streams_are_counted() -> None:
    digests = {"stock": [["a", "b", "c"], ["a", "b", "x"]], "sparksched": [["a", "y", "c"]] * 2}
    found = result()
    found["streams"] = [
        {"model": "gpt-oss-20b", "mode": "async", "scheduler": it, "digests": digests[it]}
        for it in digests
    ]
    assert rows("streams", found) == [["gpt-oss-20b, async", "3", "2", "2"]]


def test_tokens_a_second_are_a_range_where_runs_of_a_case_differ() -> None:
    again = result()
    again["cells"] += [cell(it, visit=1) for it in ("stock", "sparksched")]
    set_in_rounds(again, "sparksched", tokens_per_s=23_000.0)
    set_in_rounds(again, "stock", tokens_per_s=12_345.6)
    files = {"0.json": result(), "again/1.json": again}
    (row,) = BY_NAME["http"].rows(files)
    assert row[1:3] == ["12,346 → 23,000 to 24,691", "4.00 → 2.00"]
    (row,) = BY_NAME["gain"].rows(as_of("gpt-oss-120b", 1, files))
    assert row[-1] == "12,346 → 23,000 to 24,691"
    # What differs by less is no news, nor is another GPU.
    set_in_rounds(again, "sparksched", tokens_per_s=23_600.0)
    assert next(BY_NAME["http"].rows(files))[1] == "12,346 → 24,691"
    set_in_rounds(again, "sparksched", tokens_per_s=23_000.0)
    again["run"] = again["run"] | {"gpu": "another GPU"}
    assert next(BY_NAME["http"].rows(files))[1] == "12,346 → 24,691"


def as_of(model: str, concurrency: int, files: Results) -> Results:
    for it in (row for found in files.values() for row in found["cells"]):
        it |= {"model": model, "concurrency": concurrency}
    return files


def test_the_readme_tells_one_figure_for_each_situation() -> None:
    found = result(model="gpt-oss-120b")
    assert rows("gain", found) == [
        [
            "The GPU is the limit",
            "gpt-oss-120b, HTTP, 64 streams",
            "ms between outputs, p99",
            "8.00 → 4.00",
        ],
    ]


def test_sources_name_the_lasting_options() -> None:
    (row,) = rows("sources", result())
    assert row == [
        "`0.json`",
        "0" * 12,
        "2026-01-01",
        "a GPU, 16 x a CPU",
        "`--model x --rounds 3`",
    ]


# ---- benchmarks that start no server ----


def timed(median: float) -> Row:
    return {"median": median, "p10": 0.9 * median, "p90": 2 * median}


def test_steps() -> None:
    sides = {
        "stock": 300.0,
        "sparksched": 30.0,
        "verifying": 345.0,
        "sparksched without metrics": 28.5,
    }
    row = {"requests": 64, "feature": "LoRA"} | {
        side: {f"{part}_us": timed(us) for part in ("schedule", "update", "message", "step")}
        for side, us in sides.items()
    }
    found = {"run": {}, "decode": [row], "features": [row], "verified": [row], "counted": [row]}
    parts = ["300 / 300 / 300", "30.0 / 30.0 / 30.0"]
    figures = ["300 (270 to 600)", "30.0 (27.0 to 60.0)", "10x", *parts]
    assert rows("steps", found) == [["64", *figures], ["LoRA: 64", *figures]]
    assert rows("verified", found) == [["64", "300", "345", "45.0"]]
    assert rows("counted", found) == [["64", "28.5", "30.0", "1.50"]]
    assert rows("tokens", found) == []


def test_messages_and_their_cpu_time_where_it_is_measured() -> None:
    names = ("arrived_p50_us", "arrived_p99_us", "ready_p50_us", "ready_p99_us")
    latencies = {name: 100.0 * number for number, name in enumerate(names, start=1)}
    cpu = latencies | {"engine_cpu_us": 50.0, "client_cpu_us": 60.0}
    cases = [
        {"group": "asleep", "message": "1 request", "vLLM": cpu, "sparksched": cpu},
        {"group": "its event loop busy", "message": "ABORT", "vLLM": latencies, "sparksched": cpu},
    ]
    first, second = rows("messages", {"run": {}, "cases": cases})
    assert first[0] == "1 request"
    assert first[-2:] == ["50.0 → 50.0", "60.0 → 60.0"]
    assert second[0] == "ABORT, client busy"
    assert second[-1] == "missing → 60.0"


def test_tokens_of_a_host_path() -> None:
    gaps = {"p50": 4.0, "p99": 5.0}
    side = {"tokens_per_s": 1000.4, "output_gap_ms": gaps, "outputs": 4, "merged_outputs": 1}
    side |= {"launch_us": {"p50": 9.0}, "engine_us": {"a": 1.0, "b": 2.0}, "client_us": {"a": 5.0}}
    row = {"streams": 64, "step_ms": 1.5, "vLLM": side, "sparksched": side}
    ((name, *cells),) = rows("tokens", {"run": {}, "decode": [row]})
    assert name == "64, 1.5 ms"
    one_side = [it.partition(" → ")[0] for it in cells]
    assert one_side == ["1,000", "4.00", "5.00", "25 %", "9.00", "3.00", "5.00"]


def test_first_tokens_of_both_sides() -> None:
    def side(ttft_ms: float) -> dict[str, Any]:
        gaps = {"p50": 18.0, "p99": 19.0}
        times = {"p50": ttft_ms, "p99": ttft_ms + 1}
        found = {"ttft_ms": times, "output_gap_ms": gaps, "tokens_per_s": 14000.2}
        return found | {"preempted": 3, "gpu": {"idle_percent": 2.04}}

    names = {"streams": 64, "model": "M", "front_end": "rust", "prompt_tokens": 128}
    case = names | {"vLLM": side(51.0), "sparksched": side(47.0)}
    ((name, *cells),) = rows("joining", {"run": {}, "joining": [case]})
    assert name == "64, M, Rust front end, 128 tokens"
    assert cells == [
        "51.0 → 47.0",
        "52.0 → 48.0",
        "18.00 → 18.00",
        "19.00 → 19.00",
        "14,000 → 14,000",
        "3 → 3",
        "2.0 → 2.0",
    ]


def long_prompt(side: str, *rates: float, model: str = "M") -> dict[str, Any]:
    times = {"p50": 5.0, "p99": 120.0, "max": 1500.0}
    found = {"gap_ms": times, "short_ttft_ms": times, "long_ttft_s": 13.5}
    found |= {"before_tokens_per_s": 190.0, "tokens_per_s": 9000.0}
    rounds = [found | {"stream_tokens_per_s": it} for it in rates]
    return {"model": model, "side": side, "streams": 16, "alone_s": 4.7, "rounds": rounds}


def test_the_gain_of_pacing_is_the_least_of_one_model() -> None:
    one = [long_prompt("vllm", 4.0, 5.0), long_prompt("paced-180-0.5", 70.0, 90.0)]
    other = [long_prompt("vllm", 9.0, model="N"), long_prompt("paced-60-0.5", 99.0, model="N")]
    ((_, *row),) = rows("gain", {"run": {}, "mixed": [*one, *other]})
    assert row == ["M, HTTP, 16 streams", "tokens/s of each stream", "5.00 → 70.0"]


def test_a_long_prompt_beside_streams_has_a_line_a_server() -> None:
    sides = [
        long_prompt("vllm", 4.0),
        long_prompt("vllm-interval-4-2048", 8.0),
        long_prompt("paced-180-0.5", 90.0, 70.0),
    ]
    result = {"run": {}, "mixed": sides}
    stock, interval, first, before = rows("mixed", result)
    assert stock[:2] == ["M, 16: vLLM", "4.00"]
    assert interval[0] == "M, 16: vLLM, prompts each 4 steps, threshold 2,048"
    paced = [
        "M, 16: paced, 180 ms, share 0.5",
        "70.0 to 90.0",
        "5.00",
        "120",
        "1,500",
        "5.00",
        "1,500",
        "13.5",
        "9,000",
        "4.70",
    ]
    assert first == paced
    assert before == ["M, 16: before the long prompt", "190", *["-"] * 8]
    ((_, measured, _, gained),) = rows("gain", result)
    assert (measured, gained) == ("M, HTTP, 16 streams", "4.00 → 70.0")


def test_an_ordinary_load_has_the_least_and_the_most_of_its_rounds() -> None:
    rounds = [
        {
            "requests_per_s": rate,
            "ttft_ms": {"p50": wait, "p99": 9 * wait},
            "silence_ms": 201.0,
            "preempted": preempted,
        }
        for rate, wait, preempted in ((20.9, 330.0, 0), (21.1, 310.0, 12))
    ]
    row = {"model": "M", "side": "paced-200-0.5", "part": 0.95, "rounds": rounds}
    ((*found,),) = rows("ordinary", {"run": {}, "ordinary": [row]})
    name = "M: paced, 200 ms, share 0.5, 95 %"
    times = ["310 to 330", "2,790 to 2,970", "201"]
    assert found == [name, "20.9 to 21.1", *times, "0 to 12"]


def test_a_long_prompt_on_a_timer_has_a_line_a_side() -> None:
    row = {"side": "vLLM", "stream_tokens_per_s": 3.388, "long_s": 3.2429}
    row |= {"gap_p99_ms": 433.9, "short_p50_ms": 1749.8, "short_max_ms": 2750.2}
    ((name, *cells),) = rows("mixed_timer", {"run": {}, "mixed_timer": [row]})
    assert name == "vLLM"
    assert cells == ["3.39", "434", "1,750", "2,750", "3.24"]


# ---- pictures ----


def test_pictures_are_the_same_each_time_and_show_both_front_ends() -> None:
    steps = {"requests": 64} | {it: {"step_us": timed(9.0)} for it in ("stock", "sparksched")}
    joining = {"streams": 64, "model": "M", "front_end": "rust", "prompt_tokens": 128}
    joining |= {"vLLM": {"ttft_ms": {"p50": 21.0, "p90": 23.0}}}
    found: Results = {
        "a": result(model="Qwen2-1.5B"),
        "front_ends/a": result(model="Qwen2-1.5B"),
        "front_ends/b": result(model="Qwen2-1.5B", front_end="rust"),
        "c": {"run": {}, "decode": [steps], "joining": [joining]},
    }
    drawn = pictures(found)
    assert set(drawn) == {"serving", "latency", "cpu", "first_token"}
    assert "sparksched, Rust front end" in drawn["serving"]
    assert "64, M, Rust front end, 128 tokens" in drawn["first_token"]
    assert drawn == pictures(found)
    assert pictures({}) == {}


# ---- pages ----


def test_what_stands_below_a_mark_is_replaced() -> None:
    page = "before\n\n<!-- table: http -->\n| old |\n| --- |\n\nafter\n"
    anew = page_anew(page, {"x": result()})
    assert anew.startswith("before\n\n<!-- table: http -->\n| model, streams x tokens |")
    assert anew.endswith("| GPU |\n\nafter\n")
    assert page_anew(anew, {"x": result()}) == anew


def test_a_mark_may_choose_rows() -> None:
    results = {"x": result(), "y": result(concurrency=1)}
    anew = page_anew("<!-- table: http (^gpt-oss-20b, (1|8) x) -->\n", results)
    assert [line[:20] for line in anew.splitlines()[3:]] == ["| gpt-oss-20b, 1 x 3"]


@pytest.mark.parametrize("name", ["steps", "unknown", "http (no such row)"])
def test_a_table_with_nothing_in_it_is_refused(name: str) -> None:
    with pytest.raises(PageError, match=re.escape(name)):
        page_anew(f"<!-- table: {name} -->\n", {"x": result()})


def test_a_table_that_may_be_empty_has_its_place_until_it_is_measured() -> None:
    page = "<!-- table, if measured: http -->\n\nafter\n"
    assert page_anew(page, {}) == page
    filled = page_anew(page, {"x": result()})
    assert "\n| --- |" in filled
    assert page_anew(filled, {}) == page
    with pytest.raises(PageError):
        page_anew("<!-- table, if measured: nothing -->\n", {})


def test_what_was_measured_twice_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "STORED", tmp_path)
    (tmp_path / "again").mkdir()
    for name in ("a.json", "again/b.json"):
        (tmp_path / name).write_text(json.dumps(result()))
    assert list(read_stored()) == ["a.json", "again/b.json"]
    (tmp_path / "c.json").write_text(json.dumps(result()))
    with pytest.raises(PageError, match=r"in a\.json and c\.json"):
        read_stored()
    (tmp_path / "c.json").write_text("[]")
    with pytest.raises(PageError, match="no results"):
        read_stored()


def test_pages_and_pictures_are_made_of_what_is_stored() -> None:
    """After a change: `make tables`."""
    stale = [path for path, text in written_anew().items() if path.read_text() != text]
    assert stale == []


def test_what_no_table_reads_is_not_stored() -> None:
    found = {"x": result() | {"timeline": [1, 2]}}
    found["x"]["cells"][0]["rounds"][0]["compiled"] = {"count": 3}
    kept = read_parts(found, noted(found))["x"]
    assert kept["run"] == found["x"]["run"]
    assert "timeline" not in kept
    assert "compiled" not in kept["cells"][0]["rounds"][0]
    assert as_markdown({"x": kept}) == as_markdown(found)


def test_a_table_whose_reads_are_not_noted_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    table = BY_NAME["mixed"]
    unnoted = replace(table, rows=lambda results: table.rows(json.loads(json.dumps(results))))
    others = (it for it in TABLES if it is not table)
    monkeypatch.setattr(unread, "TABLES", (unnoted, *others))
    with pytest.raises(PageError, match="would be lost"):
        written_anew()


def test_the_page_of_results_is_short() -> None:
    """Each question has at most eight rows: bench/results has the others."""
    page = (ROOT / "docs/results.md").read_text()
    assert len(page.split()) <= 2500
    for question in page.split("\n## "):
        num_rows = sum(line.startswith("| ") for line in question.splitlines()) - 2
        assert num_rows <= 8, question.splitlines()[0]


def test_tables_about_the_host_are_short() -> None:
    """Each has at most eight rows, below two lines of head."""
    lines = (ROOT / "docs/results-host.md").read_text().splitlines()
    tables = [list(part) for is_row, part in groupby(lines, lambda it: it[:1] == "|") if is_row]
    assert 2 < max(map(len, tables)) <= 2 + 8


def test_models_say_their_release_of_vllm_if_it_is_another(tmp_path: Path) -> None:
    named = {}
    for release in ("0.32.0+cpu", "0.33.0"):
        path = tmp_path / f"{release}.json"
        rows = {"cells": [{"model": "tiny"}], "mixed": [{"model": "small"}]}
        path.write_text(json.dumps({"run": {"vllm": release}} | rows))
        (result,) = read_results([path], tmp_path).values()
        named[release] = result["cells"][0]["model"], result["mixed"][0]["model"]
    others = ("tiny (vLLM 0.33.0)", "small (vLLM 0.33.0)")
    assert named == {"0.32.0+cpu": ("tiny", "small"), "0.33.0": others}
