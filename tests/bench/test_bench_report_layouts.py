"""What the report says of models on several GPUs, and nothing of it where results don't have it."""

from typing import Any

import pytest
import synthetic
from reported import rows_in, section_of, table_with, tables_in, texts_in

from bench.reporting.cells import pairs_of, servers_of
from bench.reporting.decode import sections
from bench.reporting.document import Paragraph, Section

Row = dict[str, Any]

LAYOUTS = ("DP 2", "TP 2", "PP 2")
SPLIT = "Serving: how requests were split"
LATENCY = "Serving: tokens a second and latency"


def cells_of(found: list[Section], title: str, name: str, *columns: str) -> list[str]:
    """Return what the only table of a section with these columns has in its first such row."""
    table = table_with([section_of(found, title)], *columns)
    row = next(row for row in table.rows if name in row[0])
    by_name = dict(zip(table.columns, row, strict=True))
    return [by_name[column] for column in columns]


def columns_of(found: list[Section], title: str) -> list[str]:
    return [column for table in tables_in([section_of(found, title)]) for column in table.columns]


# ---- pairs ----


def test_layouts_are_no_pair_with_one_gpu_or_each_other() -> None:
    results = [synthetic.result((64,)), *map(synthetic.on_several_gpus, LAYOUTS)]
    pairs = pairs_of(results)
    assert len(pairs) == 2 * len(results)
    assert len({pair.label for pair in pairs}) == len(pairs)
    assert {pair.key.layout for pair in pairs} == {"", *LAYOUTS}
    assert not any(pair.is_of_separate_runs for pair in pairs)
    assert len(servers_of(results, "servers")) == len(results)


def test_a_side_of_another_layout_is_missing() -> None:
    stock, ours = synthetic.result((64,)), synthetic.on_several_gpus("DP 2")
    for result, scheduler in ((stock, "stock"), (ours, "sparksched")):
        for table in ("cells", "streams"):
            result[table] = [it for it in result[table] if it["scheduler"] == scheduler]
    pairs = pairs_of([stock, ours])
    assert len(pairs) == 4
    assert all(bool(pair.stock.cells) != bool(pair.ours.cells) for pair in pairs)
    rates = [
        cells_of(sections([stock, ours]), LATENCY, name, "vLLM", "sparksched", "ratio")
        for name in ("gpt-oss-20b, async, http", "gpt-oss-20b, DP 2, async, http")
    ]
    assert [[text == "missing" for text in row] for row in rates] == [
        [False, True, True],
        [True, False, True],
    ]


@pytest.mark.parametrize("layout", ["TP 2, DP 2", "PP 8"])
def test_a_layout_is_told_by_the_model_s_name(layout: str) -> None:
    (first, *_) = pairs_of([synthetic.on_several_gpus(layout)])
    assert first.key.layout == layout


# ---- splits ----


def test_requests_are_split_over_engines() -> None:
    found = sections([synthetic.on_several_gpus("DP 2")])
    name = "decode: gpt-oss-20b, DP 2, async, http, 64"
    columns = ("requests by engine", "requests a step", "waiting for peers p50, µs")
    assert cells_of(found, SPLIT, name, *columns) == [
        "32/32, 33/31, 34/30 → 40/24",
        "31.5 → 31.0",
        "41.0 → 51.0",
    ]
    assert cells_of(found, SPLIT, name, "batches of nothing p50, µs") == ["0 → 0"]
    (table,) = tables_in([section_of(found, SPLIT)])
    assert [list(row[-3::2]) for row in table.rows] == [["410 → 410", "61.0 → 71.0"]] * 2
    assert "in batches that take turns" not in table.columns


def test_requests_are_split_over_stages() -> None:
    found = sections([synthetic.on_several_gpus("PP 2")])
    columns = ("requests by engine", "in batches that take turns")
    assert cells_of(found, SPLIT, "PP 2", *columns) == ["64 → 64", "33/31 → 34.5/29.5"]


def test_each_engine_s_stages_are_told() -> None:
    found = sections([synthetic.on_several_gpus("PP 2, DP 2")])
    (turns,) = cells_of(found, SPLIT, "PP 2, DP 2", "in batches that take turns")
    assert turns == "33/31 + 33/31 → 34.5/29.5 + 34.5/29.5"


def test_without_stages_no_batches_take_turns() -> None:
    found = sections([synthetic.on_several_gpus(layout) for layout in ("DP 2", "PP 2")])
    assert cells_of(found, SPLIT, "DP 2", "in batches that take turns") == ["none"]


def test_turns_that_are_not_known_are_missing() -> None:
    result = synthetic.on_several_gpus("PP 2")
    for cell in result["cells"]:
        if cell["scheduler"] == "stock":
            for entry in cell["rounds"]:
                entry["turns"] = [{"missing": "there were too few steps"}]
    (turns,) = cells_of(sections([result]), SPLIT, "PP 2", "in batches that take turns")
    assert turns == "missing → 34.5/29.5"


def test_mixed_lengths_are_split_without_being_timed() -> None:
    result = synthetic.on_several_gpus("DP 2")
    for cell in result["cells"]:
        if cell["driver"] == "http":
            cell["workload"] = "mixed"
            del cell["phases"]
    columns = ("requests by engine", "requests a step")
    assert cells_of(sections([result]), SPLIT, "mixed: ", *columns) == [
        "32/32, 33/31, 34/30 → 40/24",
        "none",
    ]


def test_phases_say_where_the_time_for_peers_is_told() -> None:
    said = []
    for result in (synthetic.result((64,)), synthetic.on_several_gpus("DP 2")):
        (section,) = [it for it in sections([result]) if it.title.endswith("host's time in a step")]
        first = section.parts[0]
        assert isinstance(first, Paragraph)
        said.append("Where engines wait for each other" in first.text)
    assert said == [False, True]


def test_one_gpu_splits_nothing() -> None:
    result = synthetic.on_several_gpus("DP 2")
    for cell in result["cells"]:
        cell["model"] = "gpt-oss-20b"
    assert SPLIT not in [section.title for section in sections([result])]


def test_older_results_of_several_gpus_say_nothing_of_splits() -> None:
    result = synthetic.result((64,))
    for cell in result["cells"]:
        cell["model"] = "gpt-oss-20b, DP 2"
        del cell["phases"]["requests"], cell["phases"]["peer_us"], cell["phases"]["dummy_us"]
    assert SPLIT not in [section.title for section in sections([result])]


# ---- times to the first token ----


def test_held_requests_are_marked_where_their_first_tokens_are() -> None:
    result = synthetic.on_several_gpus("PP 2")
    for cell in result["cells"]:
        cell["is_held"] = cell["scheduler"] == "stock"
        p50 = 10.0 if cell["is_held"] else 30.0
        for entry in cell["rounds"]:
            entry["ttft_ms"] |= {"p50": p50, "p99": 2 * p50}
    section = section_of(sections([result]), LATENCY)
    (row, *_) = table_with([section], "TTFT p50, ms").rows
    assert list(row[-2:]) == ["10.0 (10.0 to 10.0) ‡ → 30.0 (30.0 to 30.0)", "20.0 ‡ → 60.0"]
    assert not any("‡" in text for text in row[:-2])
    assert _notes(section) == 1


def test_requests_that_were_not_held_are_not_marked() -> None:
    section = section_of(sections([synthetic.on_several_gpus("DP 2")]), LATENCY)
    assert not any("‡" in text for row in rows_in([section]) for text in row)
    assert _notes(section) == 0


def _notes(section: Section) -> int:
    start = "‡ requests were held until all were there"
    return sum(text.startswith(start) for text in texts_in([section]))


# ---- servers and CPU ----


def test_servers_say_how_they_run() -> None:
    found = sections([synthetic.on_several_gpus("TP 2")])
    columns = ("executor", "model runner", "batches at once", "experts")
    for scheduler, said in (
        ("stock", ["V1", "3", "whole"]),
        ("sparksched", ["V2", "4", "in parts"]),
    ):
        name = f"TP 2, async, {scheduler}"
        row = cells_of(found, "Serving: servers", name, *columns)
        assert row == ["MultiprocExecutor", *said]


def test_the_engine_s_cpu_time_without_waiting() -> None:
    found = sections([synthetic.on_several_gpus("DP 2")])
    columns = ("engine, µs a token", "engine without waiting")
    row = cells_of(found, "Serving: CPU time", "DP 2", *columns)
    assert row == ["12.0 → 12.0", "7.50 → 4.50"]


def test_a_side_without_it_is_missing() -> None:
    result = synthetic.on_several_gpus("DP 2")
    for row in result["cells"] + result["servers"]:
        if row["scheduler"] == "stock":
            row["engine_cpu"] = {"missing": "no step was recorded that only decodes"}
            row["engine"] = {}
    found = sections([result])
    row = cells_of(found, "Serving: CPU time", "DP 2", "engine without waiting")
    assert row == ["missing → 4.50"]
    names = ("model runner", "batches at once", "experts")
    row = cells_of(found, "Serving: servers", "DP 2, async, stock", *names)
    assert row == ["missing"] * 3


def test_older_results_have_no_columns_of_what_they_lack() -> None:
    found = sections([synthetic.result((64,))])
    assert "engine without waiting" not in columns_of(found, "Serving: CPU time")
    newer = {"model runner", "batches at once", "experts"}
    assert not newer & set(columns_of(found, "Serving: servers"))
