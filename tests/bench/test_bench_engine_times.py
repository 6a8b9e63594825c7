"""What the report makes of an engine's own times, beside what clients and the GPU's traces say."""

import json
from pathlib import Path
from typing import Any

import pytest
import synthetic
from reported import rows_in, table_with, tables_in

from bench.reporting.cells import Side, pairs_of, steady, traces_of
from bench.reporting.decode import sections
from bench.reporting.engine import busiest_thread, engine_rate, gap_of, is_busy
from bench.reporting.engine_and_client import engine_against_client
from bench.reporting.findings import findings

ROOT = Path(__file__).resolve().parents[2]
STORED = sorted((ROOT / "bench/results").glob("decode_*.json"))
NO_GAP_US = 20.0
OFTEN_LATE = 0.25
"""Profiling slows the host down: late in this share of the steps without, it may be so in most."""

Row = dict[str, Any]


# ---- the gap between steps ----


def older(waits_us: tuple[float, float, float, float], spins: float) -> Side:
    """Return a side of a result whose waits counted as soon as they took 20 µs."""
    wait_us = dict(zip(("p10", "p50", "p90", "p99"), waits_us, strict=True))
    estimate = {"us": {"p50": 0.0}, "host_late_share": 0.0, "is_bound": True}
    phases = {"wait_us": wait_us, "wait_spins": spins, "gap_estimate": estimate}
    return Side([{"phases": phases}])


@pytest.mark.parametrize(
    ("streams", "waits_us", "spins", "gap", "late"),
    [
        # All of it is what a result takes that is there already.
        (256, (52, 62, 196, 1489), 1.0, "not told", "not told"),
        (256, (88, 106, 1301, 2473), 0.6, "not told", "not told"),
        # Longer waits may be spinning.
        (256, (900, 1000, 1100, 1200), 0.9, "not told", "not told"),
        (256, (1006, 1594, 2046, 2954), 0.13, "0", "under 10 %"),
        (1, (23, 378, 651, 923), 0.15, "0", "10 to 50 %"),
    ],
)
def test_short_waits_don_t_tell_of_the_gpu(
    streams: int, waits_us: tuple[float, float, float, float], spins: float, gap: str, late: str
) -> None:
    found = gap_of(older(waits_us, spins), streams)
    assert (found.text, found.late_text) == (gap, late)


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_no_gap_is_said_only_where_a_trace_has_none(path: Path) -> None:
    result = json.loads(path.read_text())
    traces = traces_of([result])
    for pair in steady(pairs_of([result])):
        for scheduler, side in (("stock", pair.stock), ("sparksched", pair.ours)):
            for key, sides in traces.items():
                is_same = (key.model, key.mode) == (pair.key.model, pair.key.mode)
                if not is_same or key.concurrency != pair.key.concurrency:
                    continue
                gap = gap_of(side, key.concurrency)
                traced_us = sides[scheduler]["gap_us"]["p50"]
                if gap.late is not None and gap.late[0] >= OFTEN_LATE:
                    continue
                assert traced_us < NO_GAP_US or gap.text != "0", (pair.label, scheduler)


def test_newer_estimates_are_shown_as_they_are() -> None:
    rows = gaps_of(synthetic.result((256,)))
    assert rows[0][1:3] == ["4,197 → 0", "100 % → 0 %"]


def test_a_host_that_spins_is_not_told_to_be_in_time() -> None:
    result = synthetic.result((256,))
    for cell in result["cells"]:
        if cell["scheduler"] == "sparksched":
            untold = {"us": {"missing": "x"}, "host_late_share": {"missing": "x"}}
            cell["phases"]["gap_estimate"] = untold | {"untold_share": 1.0, "is_bound": True}
    assert gaps_of(result)[0][1:3] == ["4,197 → not told", "100 % → not told"]


def gaps_of(result: Row) -> list[list[str]]:
    return rows_in([table_with(sections([result]), "late steps")])


# ---- the busiest thread ----


def with_threads(percent: Any, threads: Any) -> Side:
    share = {"API server": {"percent": percent, "threads": threads}}
    return Side([{"rounds": [{"cpu": {"share": share}}]}])


def test_a_thread_s_share_that_is_missing_promotes_no_other() -> None:
    threads: Row = {"MainThread": 95.0, "io": 5.0}
    assert busiest_thread(with_threads(100.1, threads), "API server") == 95
    assert busiest_thread(with_threads(100.1, threads | {"MainThread": None}), "API server") is None
    assert busiest_thread(with_threads(100.1, {"io": 5.0}), "API server") is None
    assert busiest_thread(with_threads(None, threads), "API server") is None
    assert busiest_thread(with_threads(100.1, None), "API server") is None
    assert busiest_thread(Side([{"rounds": []}]), "API server") is None


def test_threads_of_several_processes_are_not_taken_for_one() -> None:
    """Two API servers of 60 % each are none of 120 %."""
    threads: Row = {"MainThread": 120.0, "io": 5.0}
    older = with_threads(125.0, threads)
    for entry in older.rounds():
        entry["counters"] = {"requests_by_engine": {"0": 2.0, "1": 2.0}}
    assert busiest_thread(older, "API server") is None
    assert is_busy(older, "API server") is None
    newer = with_threads(125.0, threads)
    newer.rounds()[0]["cpu"]["share"]["API server"]["busiest"] = 60.0
    assert busiest_thread(newer, "API server") == 60
    assert is_busy(newer, "API server") is False


def test_who_is_busy() -> None:
    assert is_busy(with_threads(100.1, {"MainThread": 95.0, "io": 5.0}), "API server") is True
    assert is_busy(with_threads(100.1, {"MainThread": 85.0, "io": 15.0}), "API server") is False
    assert is_busy(with_threads(89.0, None), "API server") is False
    assert is_busy(with_threads(100.1, None), "API server") is None


def test_without_threads_it_is_not_told_who_limits() -> None:
    result = synthetic.result((1, 64))
    for cell in result["cells"]:
        if cell["concurrency"] == 64:
            for entry in cell["rounds"]:
                entry["cpu"]["share"]["API server"]["percent"] = 100.0
                del entry["cpu"]["share"]["API server"]["threads"]["MainThread"]
    text = "\n".join(findings([result]))
    assert "asyncllm, vLLM: the limit is the GPU at 1; not told at 64 streams" in text


def test_the_table_of_threads_shows_what_is_not_listed() -> None:
    result = synthetic.result((64,))
    for cell in result["cells"]:
        for entry in cell["rounds"]:
            del entry["cpu"]["share"]["API server"]["threads"]["MainThread"]
            entry["cpu"]["share"]["engine"]["threads"]["MainThread"] = None
    (table,) = [
        it
        for it in tables_in(sections([result]))
        if it.columns[1:] == ("vLLM", "sparksched") and "64" in it.rows[0][0]
    ]
    assert table.rows[0][1] == (
        "API server: process_output_sockets 5.00, not listed 50.0; "
        "engine: MainThread missing, process_output_sockets 5.00, not listed 50.0"
    )


# ---- steps against streams ----


def test_the_engine_s_rate_is_that_of_its_steps() -> None:
    phases: Row = {"period_us": {"p50": 4000.0}}
    assert engine_rate(Side([{"phases": phases}]), 256) == 64_000
    phases |= {"mean_period_us": 5000.0, "requests": 256}
    assert engine_rate(Side([{"phases": phases}]), 256) == 51_200
    # With several engines a step brings a part of the streams' tokens.
    phases |= {"requests": 128}
    assert list(engine_rate(Side([{"phases": phases}]), 256)) == ["missing"]
    assert engine_rate(Side([{}]), 256) is None


def differing(
    engine_percent: float | None,
    api_percent: float,
    rate: float,
    mode: str = "async",
    cores: str = "all",
    waits_us: float = 100.0,
) -> str:
    """Return what is said where the engine's steps bring 64,000 tokens a second."""
    result = synthetic.result((256,))
    result["cells"] = [it for it in result["cells"] if it["driver"] == "asyncllm"]
    for cell in result["cells"]:
        cell |= {"output_tokens": [512, 512], "mode": mode, "cores": cores}
        cell["phases"] |= {"mean_period_us": 4000.0, "wait_spins": 0.97}
        cell["phases"] |= {"period_us": {"p50": 4000.0}, "wait_us": {"p50": waits_us}}
        for entry in cell["rounds"]:
            is_stock = cell["scheduler"] == "stock"
            entry["tokens_per_s"] = rate if is_stock else 64_000.0
            shares = (("engine", engine_percent), ("API server", api_percent))
            entry["cpu"]["share"] = {
                name: {"percent": share, "threads": {"MainThread": share}} for name, share in shares
            }
    return "\n".join(engine_against_client(pairs_of([result])))


def test_an_engine_that_is_ahead_is_told() -> None:
    # 512 tokens take 4.096 s where clients see them, and half of that in the engine.
    assert differing(50.0, 100.0, 32_000.0) == (
        "gpt-oss-20b, async, asyncllm, 256 x 512, vLLM: 64,000 tokens a second by the engine's "
        "steps, 32,000 at the client: the limit is the API server's thread (busiest threads: "
        "engine 50 % and API server 100 % of a processor); so the engine is ahead of what clients "
        "have, by both rates 2.05 s when it has made its last token."
    )


def test_an_engine_at_its_limit_is_not_ahead() -> None:
    text = differing(97.0, 50.0, 32_000.0)
    assert "the limit is the engine's thread" in text
    assert text.endswith("the engine was faster in the round with the probe than in the others.")
    assert "slower in the round with the probe" in differing(97.0, 50.0, 80_000.0)
    assert "neither thread is the limit" in differing(60.0, 50.0, 32_000.0)
    assert "host and GPU work in turns" in differing(60.0, 50.0, 32_000.0, mode="sync")
    assert "who limits isn't told" in differing(None, 100.0, 32_000.0)


def test_an_engine_that_spins_while_it_waits_is_not_at_its_limit() -> None:
    text = differing(100.0, 29.0, 32_000.0, waits_us=3000.0)
    assert "no thread is the limit, as the engine's spins while it waits (busiest" in text
    text = differing(100.0, 100.0, 32_000.0, waits_us=3000.0)
    assert "the limit is the API server's thread (busiest" in text
    assert "so the engine is ahead of what clients have" in text


def test_an_engine_that_shares_its_processor_may_be_ahead() -> None:
    text = differing(40.0, 58.0, 32_000.0, cores="1")
    assert "engine and API server share the processors, which are the limit" in text
    assert text.endswith("the engine may be ahead of what clients have, or differ between rounds.")


def test_processors_with_time_to_spare_are_no_limit() -> None:
    text = differing(46.0, 47.0, 55_000.0, mode="sync", cores="2")
    assert "host and GPU work in turns" in text
    assert text.endswith("the engine was faster in the round with the probe than in the others.")
    assert "share the processors" in differing(90.0, 90.0, 32_000.0, mode="sync", cores="1")
    assert "share the processors" not in differing(60.0, 80.0, 32_000.0, mode="sync", cores="2")
    assert "the limit is the engine's thread" in differing(97.0, 15.0, 70_000.0, cores="2")


def test_equal_rates_need_no_words() -> None:
    assert differing(97.0, 50.0, 64_000.0) == ""
    assert differing(97.0, 50.0, 62_000.0) == ""
    assert differing(97.0, 50.0, 60_000.0) != ""


def test_both_rates_stand_side_by_side() -> None:
    result = synthetic.result((256,))
    for cell in result["cells"]:
        cell["phases"]["mean_period_us"] = 4000.0
    table = table_with(sections([result]), "by the engine's steps")
    assert table.rows[0][table.columns.index("by the engine's steps")] == "64,000 → 64,000"
