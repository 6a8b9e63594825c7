"""The report's table of equal tokens: sampled and greedy ones, of newer and older results."""

from typing import Any

import synthetic
from reported import rows_in, texts_in

from bench.reporting.decode_streams import streams
from bench.reporting.document import Part

Row = dict[str, Any]

BOTH = ("stock", "sparksched")
ONE_START = ("none", "none")


def compared(*rows: Row) -> list[Part]:
    return streams([{"streams": list(rows)}])


def as_formerly(scheduler: str) -> Row:
    """Return what an older benchmark has kept: greedy tokens, by weights as they were drawn."""
    row = synthetic.compared(scheduler)
    greedy = row.pop("greedy")
    del row["is_sampled"], row["scaled"], greedy["is_sampled"]
    return row | greedy


def test_sampled_and_greedy_tokens_have_a_row_each() -> None:
    parts = compared(*map(synthetic.compared, BOTH))
    assert rows_in(parts) == [
        [
            "gpt-oss-20b, async",
            "greedy, weights scaled",
            *("1 of 5", "5 of 5", "0 of 5", *ONE_START, "yes", "11.0"),
        ],
        [
            "gpt-oss-20b, async",
            "sampled, weights scaled",
            *("3 of 5", "4 of 5", "2 of 5", *ONE_START, "yes", "47.0"),
        ],
    ]
    (text,) = texts_in(parts)
    assert "sampled at temperature 1" in text
    assert "Weights scaled: random ones" in text


def test_older_results_have_greedy_tokens_alone() -> None:
    parts = compared(*map(as_formerly, BOTH))
    assert rows_in(parts) == [
        ["gpt-oss-20b, async", "greedy", "1 of 5", "5 of 5", "0 of 5", *ONE_START, "yes", "11.0"]
    ]
    (text,) = texts_in(parts)
    assert text.startswith("Greedy streams that are equal")
    assert "scaled" not in text


def test_a_newer_result_is_shown_beside_an_older_one() -> None:
    older, newer = (
        {"streams": [make(it) for it in BOTH]} for make in (as_formerly, synthetic.compared)
    )
    rows = rows_in(streams([older, newer]))
    assert [row[1] for row in rows] == [
        "greedy",
        "greedy, weights scaled",
        "sampled, weights scaled",
    ]
    assert [row[2] for row in rows] == ["1 of 5", "1 of 5", "3 of 5"]


def test_several_starts_are_compared_with_each_other() -> None:
    """Each with the other scheduler's of its own run; what is the same is said once."""
    runs = [[synthetic.compared(it) for it in BOTH] for _ in range(3)]
    # The second run's vLLM brings one greedy stream that is another one.
    digests = [list(it) for it in runs[1][0]["greedy"]["digests"]]
    digests[0][0] = "another"
    runs[1][0]["greedy"] = runs[1][0]["greedy"] | {"digests": digests}
    stock, ours = runs[0][0]["greedy"]["digests"][0], runs[0][1]["greedy"]["digests"][0]
    assert stock[0] == ours[0]  # the one of five
    rows = rows_in(streams([{"streams": run} for run in runs]))
    assert rows == [
        [
            "gpt-oss-20b, async",
            "greedy, weights scaled",
            *("1 of 5, 0 of 5, 1 of 5", "5 of 5, 4 of 5, 5 of 5", "0 of 5"),
            *("4 of 5, 5 of 5, 4 of 5", "5 of 5", "yes", "11.0"),
        ],
        [
            "gpt-oss-20b, async",
            "sampled, weights scaled",
            *("3 of 5", "4 of 5", "2 of 5", "5 of 5", "5 of 5", "yes", "47.0"),
        ],
    ]


def test_it_is_said_whether_batches_were_the_same() -> None:
    stock, ours = map(synthetic.compared, BOTH)
    stock["batches"] = [["other"], ["other"]]
    assert [row[7] for row in rows_in(compared(stock, ours))] == ["yes", "no"]
    del ours["batches"], ours["greedy"]["batches"]
    assert [row[7] for row in rows_in(compared(stock, ours))] == ["missing", "missing"]


def test_so_are_several_visits_of_one_run() -> None:
    rows = [synthetic.compared(it) | {"visit": visit} for visit in (0, 1) for it in BOTH]
    # Of the second visit ours brings other tokens throughout.
    rows[3] |= {"digests": [["x"] * 5, ["x"] * 5]}
    (sampled,) = [row for row in rows_in(compared(*rows)) if row[1].startswith("sampled")]
    assert sampled[2:7] == ["3 of 5, 0 of 5", "4 of 5", "2 of 5, 5 of 5", "5 of 5", "0 of 5"]


def test_runs_with_both_schedulers_are_taken_before_others() -> None:
    stock, ours = map(synthetic.compared, BOTH)
    lone = synthetic.compared("stock") | {"digests": [["x"] * 5, ["x"] * 5]}
    rows = rows_in(streams([{"streams": [lone]}, {"streams": [stock, ours]}]))
    assert rows[1][:3] == ["gpt-oss-20b, async", "sampled, weights scaled", "3 of 5"]
    assert rows[1][5:7] == ["0 of 5", "none"]


def test_tokens_by_other_weights_are_no_pair() -> None:
    """Random weights that are scaled on one side alone bring other tokens, whoever schedules."""
    stock, ours = map(synthetic.compared, BOTH)
    stock["scaled"] = {"missing": "it has no such method"}
    parts = compared(stock, ours)
    rows = rows_in(parts)
    assert {row[0] for row in rows} == {"gpt-oss-20b, async"}
    assert [row[1:5] for row in rows] == [
        ["greedy §", "missing", "5 of 5", "missing"],
        ["greedy, weights scaled", "missing", "missing", "0 of 5"],
        ["sampled §", "missing", "4 of 5", "missing"],
        ["sampled, weights scaled", "missing", "missing", "2 of 5"],
    ]
    assert {tuple(row[5:8]) for row in rows} == {(*ONE_START, "missing")}
    assert [row[8] for row in rows] == ["11.0", "11.0", "47.0", "47.0"]
    assert texts_in(parts)[-1] == (
        "§ random weights could not be scaled. gpt-oss-20b, async, stock: it has no such method."
    )


def test_weights_from_files_are_not_scaled() -> None:
    rows = [synthetic.compared(it) | {"scaled": 0} for it in BOTH]
    parts = compared(*rows)
    assert [row[1] for row in rows_in(parts)] == ["greedy", "sampled"]
    assert len(texts_in(parts)) == 1


def test_a_side_that_failed_is_missing() -> None:
    failed = synthetic.key("stock", "async") | {"run": 0, "error": "it has failed"}
    rows = rows_in(compared(failed, synthetic.compared("sparksched")))
    assert [row[2:5] for row in rows] == [
        ["missing", "missing", "0 of 5"],
        ["missing", "missing", "2 of 5"],
    ]
    assert rows_in(compared(failed)) == [["gpt-oss-20b, async", *["missing"] * 8]]
