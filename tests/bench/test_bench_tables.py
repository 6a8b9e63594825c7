"""Tables of pages about real servers: rows, figures and marks, from results that are made up."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from synthetic import on_several_gpus, result

from bench import tables
from bench.reporting.page_tables import README, RESULTS, TABLES, PageTable, Results
from bench.tables import TableError, written_anew

Row = dict[str, Any]

LINE = "| --- |"


def table(page: str, first: str) -> PageTable:
    """Return a page's table whose heading begins so."""
    (found,) = (it for it in TABLES if it.page == page and it.heading.startswith(f"| {first} |"))
    return found


def measured() -> Row:
    """Return 64 streams, with other figures on each side: tokens a second, phases and costs."""
    found = result((64,))
    for cell in found["cells"]:
        factor = 1 if cell["scheduler"] == "stock" else 2
        for entry in cell["rounds"]:
            entry |= {
                "tokens_per_s": 12_345.6 * factor,
                "itl_ms": {"p50": 4.0 / factor, "p90": 5.0, "p99": 8.0 / factor, "max": 9.0},
                "output_gap_ms": {"p50": 12.0 * factor, "p99": 30.0 * factor, "max": 99.0},
                "ttft_ms": {"p50": 150.0 / factor, "p99": 1_500.0 / factor},
                "merged_share": 0.0,
            }
            costs = {"engine": 50.04 / factor, "API server": 9.96 / factor}
            entry["cpu"]["us_per_token"] = costs
        cell["phases"] |= {
            "schedule_us": {"p50": 800.0 / factor},
            "update_us": {"p50": 400.4 / factor},
            "mean_period_us": 4_000.0 / factor,
        }
    return found


def cells_of(results: Results, which: PageTable, name: str) -> list[str]:
    """Return a row's cells but for its name."""
    rows = {row[0]: row[1:] for row in which.rows(results)}
    return rows[name]


def set_in_rounds(found: Row, side: str, **values: Any) -> None:
    for cell in found["cells"]:
        if cell["scheduler"] == side:
            for entry in cell["rounds"]:
                entry.update(values)


SERVERS = table(RESULTS, "model, driver, streams x tokens | tokens/s")
IN_SHORT = table(README, "model, driver, streams")
FEW = table(RESULTS, "model, driver, streams x tokens, processors")


def test_a_row_of_servers() -> None:
    found = measured()
    for cell in found["cells"]:
        cell["output_tokens"] = [384, 384]
    assert cells_of({"a": found}, SERVERS, "gpt-oss-20b, AsyncLLM, 64 x 384") == [
        "12,346 → 24,691",
        "16,000 → 32,000",
        "4.00 → 2.00",
        "8.00 → 4.00",
        "1,200 → 600",
        "50.0 → 25.0",
        "10.0 → 5.0",
        "3",
    ]


def test_small_models_and_the_simple_client_come_first() -> None:
    large = measured()
    for cell in large["cells"]:
        cell["model"] = "gpt-oss-120b"
    sync = measured()
    for cell in sync["cells"]:
        cell["mode"] = "sync"
    names = [row[0] for row in SERVERS.rows({"a": large, "b": sync, "c": measured()})]
    assert names == [
        "gpt-oss-20b, AsyncLLM, 64",
        "gpt-oss-20b, sync, AsyncLLM, 64",
        "gpt-oss-20b, HTTP, 64",
        "gpt-oss-20b, sync, HTTP, 64",
        "gpt-oss-120b, AsyncLLM, 64",
        "gpt-oss-120b, HTTP, 64",
    ]


def test_what_is_missing_is_no_number() -> None:
    found = measured()
    for cell in found["cells"]:
        if cell["scheduler"] == "sparksched":
            cell["phases"] = {"missing": "no probe"}
            del cell["rounds"][1:]
        for entry in cell["rounds"]:
            del entry["cpu"]
    cells = cells_of({"a": found}, SERVERS, "gpt-oss-20b, AsyncLLM, 64")
    assert cells[1] == "16,000 → missing"
    assert cells[4:] == ["1,200 → missing", "missing", "missing", "3 → 1"]


def test_sides_of_separate_runs_are_marked() -> None:
    stock, ours = measured(), measured()
    for found, side in ((stock, "stock"), (ours, "sparksched")):
        found["cells"] = [cell for cell in found["cells"] if cell["scheduler"] == side]
    names = [row[0] for row in SERVERS.rows({"a": stock, "b": ours})]
    assert names == ["gpt-oss-20b, AsyncLLM, 64 †", "gpt-oss-20b, HTTP, 64 †"]


def test_streams_that_catch_up() -> None:
    """The page says what happens to them; the selection has the times that they see."""
    found = measured()
    set_in_rounds(found, "sparksched", merged_share=0.75, itl_ms={"p50": 0.0, "p99": 40.0})
    merged = table(RESULTS, "streams x tokens")
    name = "gpt-oss-20b, HTTP, 64"
    assert cells_of({"a": found}, SERVERS, name)[2:4] == [r"4.00 → 0 \*", r"8.00 → 40.0 \*"]
    assert cells_of({"a": found}, IN_SHORT, name)[1:3] == [r"12.0 → 24.0 \*", r"30.0 → 60.0 \*"]
    assert cells_of({"a": found}, merged, name) == [
        "1.00 → 4.00",
        "12.0 → 24.0",
        "30.0 → 60.0",
        "150 → 75.0",
        "1,500 → 750",
    ]
    assert not list(merged.rows({"a": measured()}))
    set_in_rounds(found, "stock", merged_share=None)
    assert cells_of({"a": found}, merged, name)[0] == "missing → 4.00"
    # Those on all processors come first, though the other model does.
    confined = copy.deepcopy(found)
    for cell in confined["cells"]:
        cell |= {"cores": "2", "model": "Qwen2-1.5B"}
    names = [row[0] for row in merged.rows({"a": found, "b": confined})]
    assert names == ["gpt-oss-20b, AsyncLLM, 64", name, "Qwen2-1.5B, HTTP, 64, 2 processors"]


def test_times_while_kernels_were_compiled_are_marked() -> None:
    found = measured()
    set_in_rounds(found, "stock", compiled={"count": 3, "seconds": 1.5, "kernels": {}})
    for cell in found["cells"]:
        cell["cores"] = "2"
    assert cells_of({"a": found}, FEW, "gpt-oss-20b, HTTP, 64, 2 processors") == [
        "12,346 → 24,691",
        "16,000 → 32,000",
        "4.00 → 2.00",
        "8.00 → 4.00",
        "150 ¶ → 75.0",
        "1,500 ¶ → 750",
        "50.0 → 25.0",
        "10.0 → 5.0",
        "3",
    ]


def test_few_processors_are_told_over_http() -> None:
    one, sync = measured(), measured()
    for cell in one["cells"]:
        cell["cores"] = "1"
    for cell in sync["cells"]:
        cell |= {"cores": "2", "mode": "sync"}
    assert [row[0] for row in FEW.rows({"a": one, "b": sync, "c": measured()})] == [
        "gpt-oss-20b, HTTP, 64, 1 processor",
        "gpt-oss-20b, sync, HTTP, 64, 2 processors",
    ]


def compilations_of(*results: Row) -> dict[str, list[str]]:
    which = table(RESULTS, "model, driver, streams x tokens | vLLM: TTFT p99 by round, ms")
    return {row[0]: row[1:] for row in which.rows(dict(zip("abc", results, strict=False)))}


def test_rounds_in_which_kernels_were_compiled() -> None:
    found = measured()
    nothing = {"count": 0, "seconds": 0, "kernels": {}}
    for side in ("stock", "sparksched"):
        set_in_rounds(found, side, compiled=nothing)
    assert not compilations_of(found)
    for cell in found["cells"]:
        if (cell["driver"], cell["scheduler"]) == ("http", "stock"):
            cell["rounds"][1]["compiled"] = {"count": 2, "seconds": 1.25, "kernels": {}}
        if cell["driver"] == "http":
            cell["cores"] = "2"
    assert compilations_of(found) == {
        "gpt-oss-20b, AsyncLLM, 64": ["1,500, 1,500, 1,500", "750, 750, 750"],
        "gpt-oss-20b, HTTP, 64, 2 processors": [
            "1,500, 1,500 (1,250), 1,500",
            "750, 750, 750",
        ],
    }


def test_rounds_that_do_not_tell_of_kernels_are_in_no_such_table() -> None:
    """And neither is a single stream, which none were compiled for so far, nor several GPUs."""
    found, older, spread = measured(), measured(), on_several_gpus("TP 2")
    for it in (found, spread):
        for side in ("stock", "sparksched"):
            set_in_rounds(it, side, compiled={"count": 1, "seconds": 1.0, "kernels": {}})
    assert len(compilations_of(found)) == 2
    for cell in older["cells"]:
        cell["model"] = "gpt-oss-120b"
        cell["rounds"][0]["compiled"] = {"count": 1, "seconds": 1.0, "kernels": {}}
    assert list(compilations_of(found, older, spread)) == list(compilations_of(found))
    for cell in found["cells"]:
        cell["concurrency"] = 1
    assert not compilations_of(found)


def test_workloads() -> None:
    found = measured()
    for cell in found["cells"]:
        cell["workload"] = {"asyncllm": "mixed", "http": "prefix"}[cell["driver"]]
        cell["driver"] = "asyncllm"
    rows = list(table(RESULTS, "prompts").rows({"a": found}))
    assert [row[0] for row in rows] == ["mixed", "shared"]
    assert rows[0][1:] == ["12,346 → 24,691", "4.00 → 2.00", "8.00 → 4.00", "150 → 75.0", "3"]
    assert not list(SERVERS.rows({"a": found}))


def test_several_gpus() -> None:
    """By tensor comes before by pipeline, and that before by data; no row is among one GPU's."""
    results = {name: on_several_gpus(name) for name in ("DP 2", "PP 2", "TP 2")}
    for found in results.values():
        for cell in found["cells"]:
            factor = 1 if cell["scheduler"] == "stock" else 2
            cell["engine_cpu"]["without_waiting_us_per_token"] = 30.0 / factor
        found["cells"] = [cell for cell in found["cells"] if cell["driver"] == "asyncllm"]
    results["one"] = measured()
    rows = list(table(README, "model, layout, streams").rows(results))
    names = [f"gpt-oss-20b, {it}, 64" for it in ("TP 2", "PP 2", "DP 2")]
    assert [row[0] for row in rows] == names
    assert rows[0][3:] == ["30.0 → 15.0", "9.0 → 9.0"]
    assert [row[0] for row in table(RESULTS, "model, layout, streams x tokens").rows(results)] == (
        names
    )
    del results["one"]
    assert not list(SERVERS.rows(results))


def test_where_figures_come_from() -> None:
    found = measured()
    found["runs"] = [
        {"commit": "a" * 12, "date": "2026-01-01 10:00 UTC", "options": options}
        for options in (
            "--json x.json --model tiny --minutes 8.5",
            "--work-dir /tmp/w --model tiny --json y.json",
        )
    ]
    found["runs"][1] |= {"commit": "b" * 12, "date": "2026-01-02 10:00 UTC"}
    (row,) = table(RESULTS, "file").rows({"decode_x.json": found})
    assert row == [
        "`decode_x.json`",
        "AsyncLLM: 64; HTTP: 64",
        f"{'a' * 12} and {'b' * 12}",
        "2026-01-01 and 2026-01-02",
        "`--model tiny`",
    ]


def again(*orders: str) -> Row:
    """Return a result with a visit for each of these, which says whose server is the first."""
    found: Row = {"kind": "decode", "servers": [], "cells": []}
    for visit, first in enumerate(orders):
        it = measured()
        ordered = sorted(it["servers"], key=lambda server: server["scheduler"] != first)
        found["servers"] += [server | {"visit": visit} for server in ordered]
        for cell in it["cells"]:
            for number, entry in enumerate(cell["rounds"]):
                entry["tokens_per_s"] *= 1 + visit / 10 + number / 100
            execute = {"execute_us": {"p50": 500.0 + visit}}
            phases = cell["phases"] | execute
            found["cells"].append(cell | {"visit": visit, "phases": phases})
    return found


def test_servers_that_were_started_in_this_order_and_that() -> None:
    which = table(RESULTS, "model, driver, streams x tokens; order")
    rows = list(which.rows({"a": again("sparksched", "stock")}))
    assert [row[0] for row in rows] == [
        f"gpt-oss-20b, {driver}, 64; {first} first"
        for driver in ("AsyncLLM", "HTTP")
        for first in ("sparksched", "vLLM")
    ]
    assert rows[0][1:] == [
        "12,469 (12,346 to 12,593) → 24,938 (24,691 to 25,185)",
        "16,000 → 32,000",
        "4.00 → 2.00",
        "8.00 → 4.00",
        "1,200 → 600",
        "500 → 500",
        "50.0 → 25.0",
        "10.0 → 5.0",
    ]
    assert rows[1][1] == "13,704 (13,580 to 13,827) → 27,407 (27,160 to 27,654)"
    assert rows[1][6] == "501 → 501"


def test_small_rates_have_a_digit_more_and_missing_ones_none() -> None:
    which = table(RESULTS, "model, driver, streams x tokens; order")
    found = again("stock")
    for cell in found["cells"]:
        for entry in cell["rounds"]:
            entry["tokens_per_s"] /= 100
        if cell["scheduler"] == "sparksched":
            cell["rounds"] = []
    del found["servers"]
    row = next(which.rows({"a": found}))
    assert row[:2] == [
        "gpt-oss-20b, AsyncLLM, 64; missing first",
        "124.7 (123.5 to 125.9) → missing",
    ]


# ---- pages ----


def page_with(which: PageTable, *rows: str) -> str:
    return "\n".join(["# A page", "", which.heading, LINE, *rows, "", "and more text"]) + "\n"


def test_a_table_is_written_anew_and_the_text_stays() -> None:
    text = page_with(SERVERS, "| something old | 1 → 2 |", "| and more | 3 → 4 |")
    lines = written_anew(text, [SERVERS], {"a": measured()}).splitlines()
    assert lines[:4] == ["# A page", "", SERVERS.heading, LINE]
    assert [line.partition(" | ")[0] for line in lines[4:6]] == [
        "| gpt-oss-20b, AsyncLLM, 64",
        "| gpt-oss-20b, HTTP, 64",
    ]
    assert lines[6:] == ["", "and more text"]


def test_a_selection_keeps_its_rows_and_their_order() -> None:
    """A mark that the text explains stays; one that says that runs were separate goes."""
    text = page_with(
        IN_SHORT,
        "| **Over HTTP** | | | | | |",
        "| gpt-oss-20b, HTTP, 64 †‡ | 1 → 2 | | | | |",
        "| **Without** | | | | | |",
        "| gpt-oss-20b, AsyncLLM, 64 | 1 → 2 | | | | |",
    )
    rows = written_anew(text, [IN_SHORT], {"a": measured()}).splitlines()[4:8]
    figures = "12,346 → 24,691 | 4.00 → 2.00 | 8.00 → 4.00 | 50.0 → 25.0 | 10.0 → 5.0 |"
    assert rows == [
        "| **Over HTTP** | | | | | |",
        f"| gpt-oss-20b, HTTP, 64 ‡ | {figures}",
        "| **Without** | | | | | |",
        f"| gpt-oss-20b, AsyncLLM, 64 | {figures}",
    ]


def test_what_cannot_be_written_is_named() -> None:
    results = {"a": measured()}
    unknown = page_with(IN_SHORT, "| gpt-oss-20b, HTTP, 65 | 1 → 2 |")
    with pytest.raises(TableError, match=r"no result for a row, .*: gpt-oss-20b, HTTP, 65"):
        written_anew(unknown, [IN_SHORT], results)
    twice = page_with(IN_SHORT, *["| gpt-oss-20b, HTTP, 64 | 1 → 2 |"] * 2)
    with pytest.raises(TableError, match="the row is there twice: gpt-oss-20b, HTTP, 64"):
        written_anew(twice, [IN_SHORT], results)
    with pytest.raises(TableError, match=f"there is no table.*{re.escape(SERVERS.heading)}"):
        written_anew("# A page\n", [SERVERS], results)
    with pytest.raises(TableError, match="nothing was measured for the table"):
        written_anew(page_with(SERVERS), [SERVERS], {"a": {}})
    other = copy.deepcopy(results["a"])
    for cell in other["cells"]:
        cell["output_tokens"] = [384, 384]
    with pytest.raises(TableError, match="two results for a row: gpt-oss-20b, AsyncLLM, 64"):
        written_anew(page_with(IN_SHORT), [IN_SHORT], results | {"b": other})


# ---- results, and the command ----


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the root of a project with both pages and one file of results."""
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "ALL_TABLES", (SERVERS, IN_SHORT))
    for page, text in ((RESULTS, page_with(SERVERS, "| old | row |")), (README, SHORT_PAGE)):
        (tmp_path / page).parent.mkdir(exist_ok=True)
        (tmp_path / page).write_text(text)
    put(tmp_path, "decode_a", measured())
    return tmp_path


SHORT_PAGE = page_with(IN_SHORT, "| gpt-oss-20b, HTTP, 64 | 1 → 2 | | | | |")


def put(root: Path, name: str, found: Any) -> None:
    path = root / f"bench/results/{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found))


def test_pages_are_written_once(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tables.main() == 0
    assert "old" not in (root / RESULTS).read_text()
    assert "12,346 → 24,691" in (root / README).read_text()
    assert capsys.readouterr().out.count("was written anew") == 2
    assert tables.main() == 0
    assert not capsys.readouterr().out


def test_what_was_measured_again_is_in_a_table_of_its_own(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_again = table(RESULTS, "model, driver, streams x tokens; order")
    monkeypatch.setattr(tables, "ALL_TABLES", (SERVERS, of_again))
    both = page_with(SERVERS, "| old | row |") + page_with(of_again, "| old | row |")
    (root / RESULTS).write_text(both)
    found = again("stock")
    put(root, "again/decode_a", found)
    assert tables.main() == 0
    text = (root / RESULTS).read_text()
    assert "old" not in text
    assert text.count("| gpt-oss-20b, HTTP, 64 |") == 1
    assert text.count("| gpt-oss-20b, HTTP, 64; vLLM first |") == 1
    for cell in found["cells"]:
        cell["cores"] = "2"
    put(root, "again/decode_a", found)
    with pytest.raises(SystemExit, match="in no table: "):
        tables.main()


def test_all_pages_are_written_or_none(root: Path) -> None:
    (root / README).write_text("no table\n")
    with pytest.raises(SystemExit, match=r"README\.md: there is no table"):
        tables.main()
    assert "old" in (root / RESULTS).read_text()


def test_a_newer_file_beside_an_older_one_is_refused(root: Path) -> None:
    """Their rounds would make one figure, of two commits."""
    put(root, "decode_b", measured())
    with pytest.raises(SystemExit, match=r"measured twice: gpt-oss-20b, .* in decode_a.json and"):
        tables.main()
    other = measured()
    for cell in other["cells"]:
        cell["model"] = "gpt-oss-120b"
    put(root, "decode_b", other)
    assert tables.main() == 0
    # What has failed in one of them is no second measurement.
    failed = measured()
    for cell in failed["cells"]:
        del cell["rounds"]
        cell["error"] = "it is gone"
    put(root, "decode_b", failed)
    assert tables.main() == 0


@pytest.mark.parametrize(
    "change",
    [
        {"cores": "2"},
        {"cores": "2", "concurrency": 256, "driver": "asyncllm"},
        {"cores": "2", "workload": "mixed"},
        {"workload": "mixed", "driver": "http"},
        {"workload": "mixed", "driver": "asyncllm", "model": "Qwen2-1.5B"},
        {"model": "gpt-oss-20b, TP 2", "driver": "http"},
        {"model": "gpt-oss-20b, TP 2", "mode": "sync"},
    ],
)
def test_what_no_table_is_for_is_named(root: Path, change: Row) -> None:
    """The text above a table says what all of its rows have in common."""
    other = measured()
    for cell in other["cells"]:
        cell |= change  # noqa: PLW2901
    put(root, "decode_b", other)
    with pytest.raises(SystemExit, match="in no table: "):
        tables.main()


def test_files_that_are_no_results_are_named(root: Path) -> None:
    put(root, "decode_b", {"kind": "something else"})
    with pytest.raises(SystemExit, match=r"decode_b\.json holds results of something else"):
        tables.main()
    (root / "bench/results/decode_b.json").write_text("{")
    with pytest.raises(SystemExit, match=r"decode_b\.json is no JSON file"):
        tables.main()
    for path in (root / "bench/results").iterdir():
        path.unlink()
    with pytest.raises(SystemExit, match="there are no results in"):
        tables.main()
