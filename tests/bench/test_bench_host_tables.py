"""Tables of the page about benchmarks that start no server, from results that are made up."""

from typing import Any

from bench.reporting.page_hosts import HOST_TABLES
from bench.reporting.page_tables import Results
from bench.tables import ALL_TABLES

Row = dict[str, Any]


def rows(first: str, found: Row) -> list[list[str]]:
    """Return the rows of the table whose heading begins so."""
    (table,) = (it for it in HOST_TABLES if it.heading.startswith(f"| {first} |"))
    results: Results = {"decode_a.json": {"kind": "decode"}, "a.json": found}
    return list(table.rows(results))


def spread(median: float) -> Row:
    return {"median": median, "p10": median - 1, "p90": 2 * median}


def step(vllm: float, sparksched: float) -> Row:
    calls = ("schedule_us", "update_us", "message_us", "step_us")
    sides = (("stock", vllm), ("sparksched", sparksched))
    return {side: {it: spread(figure) for it in calls} for side, figure in sides}


def test_steps() -> None:
    found = {"kind": "step_cost", "decode": [{"requests": 1024} | step(400, 8)]}
    calls = ["400 / 400 / 400", "8.00 / 8.00 / 8.00"]
    assert rows("running requests", found) == [
        ["1,024", "400 (399 to 800)", "8.00 (7.00 to 16.0)", "50x", *calls]
    ]
    del found["decode"][0]["sparksched"]["step_us"]["median"]
    (row,) = rows("running requests", found)
    assert row[2:4] == ["missing (7.00 to 16.0)", "missing"]


def test_features_and_prompts() -> None:
    features = [{"feature": "LoRA", "requests": it} | step(40, 16) for it in (64, 256)]
    found = {"kind": "step_cost", "features": features}
    expected = ["40.0 (39.0 to 80.0)", "16.0 (15.0 to 32.0)", "2.5x"]
    assert rows("what: running requests", found) == [
        ["LoRA: 64", *expected],
        ["LoRA: 256", *expected],
    ]
    prompt = {"tokens": 8192, "stock": spread(90), "sparksched": spread(9)}
    found = {"kind": "step_cost", "prefill": [prompt, prompt | {"prefix_cached": True}]}
    assert rows("prompt tokens", found) == [
        ["8,192", "90.0", "9.00", "10x"],
        ["8,192, prefix cached", "90.0", "9.00", "10x"],
    ]


def message(group: str, **figures: float) -> Row:
    times = {f"{what}_{it}_us": 10.0 for what in ("arrived", "ready") for it in ("p50", "p99")}
    ours = {name: value / 4 for name, value in (times | figures).items()}
    return {"group": group, "message": "ABORT", "vLLM": times | figures, "sparksched": ours}


def test_messages() -> None:
    costs = {f"{who}_{it}_us": 8.0 for who in ("engine", "client") for it in ("cpu", "transport")}
    asleep = message("Client to engine, asleep", **costs)
    busy = message("Engine to client, its event loop busy with callbacks of 200 µs")
    unheard_of = message("to the moon")
    del unheard_of["sparksched"]["ready_p99_us"]
    found = {"kind": "ipc", "cases": [asleep, busy, unheard_of]}
    quarter = "10.0 → 2.50 (0.25)"
    heading = "message | arrived, p50"
    assert rows(heading, found) == [
        ["ABORT", *[quarter] * 4],
        ["ABORT, client busy", *[quarter] * 4],
        ["ABORT, to the moon", *[quarter] * 3, "10.0 → missing"],
    ]
    heading = "message | engine"
    assert rows(heading, found) == [["ABORT", *["8.00 → 2.00 (0.25)"] * 4]]


def test_tokens() -> None:
    vllm = {
        "tokens_per_s": 1234.5,
        "itl_ms": {"p50": 1.0, "p90": 2.0, "p99": 3.0},
        "launch_us": {"p50": 40.0},
        "engine_us": {"one": 5.0, "other": 3.0},
        "client_us": {"one": 5.0, "other": None},
    }
    row = {"streams": 64, "step_ms": 1.5, "vLLM": vllm, "sparksched": vllm | {"launch_us": None}}
    assert rows("streams, GPU step", {"kind": "host_path", "decode": [row]}) == [
        [
            "64, 1.5 ms",
            "1,234 → 1,234",
            "1.00 → 1.00",
            "2.00 → 2.00",
            "3.00 → 3.00",
            "40.0 → missing",
            "8.00 → 8.00",
            "missing",
        ]
    ]


def test_each_table_has_a_heading_of_its_own() -> None:
    headings = [(it.page, it.heading) for it in ALL_TABLES]
    assert len(set(headings)) == len(headings)
