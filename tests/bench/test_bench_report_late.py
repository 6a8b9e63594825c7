"""What the report says of late messages, and nothing of them where results don't have it."""

import copy
from typing import Any

import pytest
import synthetic
from reported import tables_in

from bench.reporting.cells import pairs_of
from bench.reporting.decode import sections
from bench.reporting.decode_late import late
from bench.reporting.document import Table

Row = dict[str, Any]

LABEL = "gpt-oss-20b, async, asyncllm, 64"


def tables_of(result: Row) -> list[Table]:
    return tables_in(late(pairs_of([result])))


def rows_of(table: Table) -> list[list[str]]:
    return [list(row[1:]) for row in table.rows if row[0] == LABEL]


def texts_of(result: Row) -> list[str]:
    return [text for table in tables_of(result) for row in rows_of(table) for text in row]


def set_in(value: Any, path: tuple[str, ...], content: Any) -> None:
    for name in path[:-1]:
        value = value[name]
    value[path[-1]] = content


def test_who_was_late_and_why() -> None:
    table, _ = tables_of(synthetic.with_late_messages())
    decode, process = rows_of(table)
    assert decode[:3] == ["decode", "100 → 100", "910 → 100"]
    assert decode[3:5] == ["1,100 → 100", "1 of 20 → 0 of 18"]
    assert decode[5:] == ["60.0 % → none late", "30.0 % → none late", "10.0 % → none late"]
    assert process[4] == "0 of 18 → 2 of 20"
    assert process[5:] == ["none late → 0 %", "none late → 0 %", "none late → 100 %"]


def test_collections_by_generation() -> None:
    _, table = tables_of(synthetic.with_late_messages())
    assert rows_of(table) == [
        ["0", "1 → 1", "0 → 0", "0.040 → 0.040", "0.040 → 0.040"],
        ["1", "0 → 0", "0 → 0", "0 → 0", "none"],
        ["2", "1 → 0", "1 → 0", "0.600 → 0", "0.600 → none"],
    ]


def test_they_stand_below_the_table_of_messages() -> None:
    (section,) = [it for it in sections([synthetic.with_late_messages()]) if "messages" in it.title]
    assert ["arrival p50" in it.columns for it in tables_in([section])] == [True, False, False]


def test_nothing_is_said_of_results_that_dont_have_it() -> None:
    assert late(pairs_of([synthetic.result((64,))])) == []


def test_a_side_that_wasnt_measured_is_missing_and_never_zero() -> None:
    result = synthetic.with_late_messages()
    for row in result["cells"]:
        if row["scheduler"] == "sparksched":
            for name in synthetic.OF_LATE_MESSAGES:
                del row["messages"][name]
    table, collections = tables_of(result)
    decode, _ = rows_of(table)
    assert decode[4:6] == ["1 of 20 → missing", "60.0 % → missing"]
    assert rows_of(collections)[0][1:] == [
        "1 → missing",
        "0 → missing",
        "0.040 → missing",
        "0.040 → missing",
    ]


UNSEEN = {
    ("late", "decode", "extra_ms"),
    *(("late", "process", it) for it in ("collecting_share", "stopped_share", "working_share")),
    ("late", "process", "extra_ms"),
    ("collections", "1", "longest_ms"),
}
"""What vLLM's side has and no table shows: none were late, or there were none."""


@pytest.mark.parametrize("nonsense", [None, "x", [None], {"missing": "x"}, float("nan")])
def test_a_figure_that_is_none_is_missing(nonsense: Any) -> None:
    whole = synthetic.with_late_messages()
    former = texts_of(whole)
    messages = whole["cells"][0]["messages"]
    paths = {
        (part, name, figure)
        for part in ("late", "collections")
        for name, row in messages[part].items()
        for figure in row
    }
    unseen = set()
    for path in paths:
        result = copy.deepcopy(whole)
        for row in result["cells"]:
            if row["scheduler"] == "stock":
                set_in(row["messages"], path, nonsense)
        texts = texts_of(result)
        changed = [new for new, old in zip(texts, former, strict=True) if new != old]
        assert all(it.startswith("missing") for it in changed), path
        unseen |= set() if changed else {path}
    assert unseen == UNSEEN
