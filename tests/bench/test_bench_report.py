"""The report: built from stored results, whole ones and broken ones."""

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import synthetic
from reported import parts_in, rows_in, table_with

from bench.report import build, read_all
from bench.reporting import plots
from bench.reporting.cells import pairs_of
from bench.reporting.decode import sections
from bench.reporting.document import Image, Section, Table, as_html, as_markdown, write
from bench.reporting.findings import Limits, findings, free_scheduler_gain
from bench.reporting.others import kind_of
from bench.reporting.values import pair_text, ratio_text, spread_text, text_of
from bench.serving.evaluate import evaluate
from bench.serving.streams import StreamLog

ROOT = Path(__file__).resolve().parents[2]
STORED = [
    Path(__file__).parent / "data/decode_tiny.json",
    *sorted((ROOT / "bench/results").glob("*.json"), key=lambda path: path.stat().st_size),
]

DRAWN = {"cells", "rounds", "itl_quantiles_ms", "ms", "percent", "phases", "timeline", "host_us"}
"""Keys of what the pictures show."""

Row = dict[str, Any]


def rows_of(parts: list[Section], first_column: str) -> list[list[str]]:
    return [row for row in rows_in(parts) if first_column in row[0]]


# ---- whole reports ----


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_it_builds_from_stored_results(path: Path, tmp_path: Path) -> None:
    results, unread = read_all([path])
    assert not unread
    written = write(tmp_path, "a report", build(results, unread))
    text = written[0].read_text()
    assert "vLLM" in text
    assert "sparksched" in text
    for image in re.findall(r"\]\((.*?\.png)\)", text):
        assert (tmp_path / image).read_bytes().startswith(b"\x89PNG")


def test_all_of_them_make_one_report_whose_page_needs_no_other_file(tmp_path: Path) -> None:
    results, unread = read_all(STORED)
    write(tmp_path, "a report", build(results, unread))
    page = (tmp_path / "report.html").read_text()
    sources = re.findall(r'(?:src|href)="([^"]{,30})', page)
    assert sources
    assert all(it.startswith("data:image/png;base64,") for it in sources)


def test_a_gpu_brings_its_rows_and_pictures(tmp_path: Path) -> None:
    parts = build([(Path("x.json"), synthetic.result())], [])
    names = {part.name for part in parts_in(parts) if isinstance(part, Image)}
    assert {name.partition("-")[0] for name in names} == {"itl", "host", "timeline"}
    (row,) = [row for row in rows_of(parts, "gpt-oss-20b, async, 256") if len(row) == 9]
    assert row[1] == "2,697 → 2.00"  # the gap
    assert row[3] == "40.0 % → 99.9 %"


def test_without_a_gpu_its_rows_say_so() -> None:
    results, _ = read_all(STORED[:1])
    text = as_markdown(sections([result for _, result in results]))
    assert "not available" in text
    assert re.search(r"\| tiny, sync, http, 4 x 48 \| (not available \| ){6}not available \|", text)


# ---- missing is missing ----


def without_rounds(cell: Row) -> None:
    cell["rounds"] = []


def failed(cell: Row) -> None:
    for name in ("rounds", "phases", "messages", "memory"):
        del cell[name]
    cell["error"] = "it has failed\nfor a reason"


def wrong_types(cell: Row) -> None:
    cell["rounds"] = [{"tokens_per_s": "fast", "itl_ms": None, "ttft_ms": [1]}]
    cell["phases"] = {"missing": "no step was recorded"}
    cell["messages"] = 7
    cell["memory"] = None


def no_numbers(cell: Row) -> None:
    cell["rounds"] = [{"tokens_per_s": {"missing": "not a number"}, "itl_ms": {"p50": None}}]
    cell["phases"] = {}


@pytest.mark.parametrize("damage", [without_rounds, failed, wrong_types, no_numbers])
def test_a_broken_cell_is_missing_and_never_zero(
    damage: Callable[[Row], None], tmp_path: Path
) -> None:
    result = synthetic.result((64,))
    for cell in result["cells"]:
        if cell["scheduler"] == "stock" and cell["driver"] == "asyncllm":
            damage(cell)
    parts = build([(Path("x.json"), result)], [])
    write(tmp_path, "a report", parts)
    label = "gpt-oss-20b, async, asyncllm, 64"
    rate = next(row for row in rows_of(parts, label) if len(row) == 8)
    assert rate[1] == "missing"
    assert rate[3] == "missing"
    assert rate[2].startswith("35,0")
    for row in rows_of(parts, label):
        for text in row[1:]:
            stock = text.partition(" → ")[0]
            assert stock not in ("0", "0 %", "nan"), row


def test_a_cell_that_is_not_there_is_missing() -> None:
    result = synthetic.result((64,))
    result["cells"] = [it for it in result["cells"] if it["scheduler"] == "sparksched"]
    result["traces"] = [it for it in result["traces"] if it["scheduler"] == "stock"]
    parts = sections([result])
    rate = next(row for row in rows_of(parts, "gpt-oss-20b, async, http, 64") if len(row) == 8)
    assert rate[1] == "missing"
    gap = next(row for row in rows_of(parts, "gpt-oss-20b, async, 64") if len(row) == 9)
    assert gap[1] == "9.00 → missing"


@pytest.mark.parametrize("table", ["cells", "traces", "servers", "streams", "runs"])
@pytest.mark.parametrize("content", [None, [], [None], [{}], "text"])
def test_a_broken_table_breaks_no_report(table: str, content: Any, tmp_path: Path) -> None:
    result = synthetic.result((1,))
    result[table] = content
    write(tmp_path, "a report", build([(Path("x.json"), result)], []))


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_stored_results_may_lack_anything(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take each key away in turn, and put nonsense in its place."""
    draw = plots.decode_images
    monkeypatch.setattr(plots, "_png", lambda figure: b"")
    whole = json.loads(path.read_text())
    # What smaller files have, too, has been tried with them.
    smaller = [json.loads(it.read_text()) for it in STORED[: STORED.index(path)]]
    tried = {keys for it in smaller if kind_of(it) == kind_of(whole) for keys in key_paths(it)}
    for keys in sorted(set(key_paths(whole)) - tried):
        # Drawing takes its time: only where it could make a difference.
        draws = keys[-1] in DRAWN
        monkeypatch.setattr(plots, "decode_images", draw if draws else lambda results: [])
        for nonsense in (None, "x"):
            result = copy.deepcopy(whole)
            change(result, keys, nonsense)
            if kind_of(result) is not None:
                as_markdown(build([(path, result)], []))


NEWER = [
    synthetic.on_several_gpus("PP 2, DP 2"),
    synthetic.with_late_messages(),
    synthetic.step_cost(),
    synthetic.recording(),
]


@pytest.mark.parametrize("whole", NEWER, ids=["decode", "late messages", "step_cost", "recording"])
def test_newer_results_may_lack_anything(whole: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "decode_images", lambda results: [])
    monkeypatch.setattr(plots, "step_cost_image", lambda result: [])
    former = set(key_paths(synthetic.result((64,))))
    for keys in sorted(set(key_paths(whole)) - former):
        for nonsense in (None, "x", [None], {"missing": "not available"}):
            result = copy.deepcopy(whole)
            change(result, keys, nonsense)
            if kind_of(result) is not None:
                as_markdown(build([(Path("x.json"), result)], []))


def key_paths(value: Any, depth: int = 4) -> list[tuple[str, ...]]:
    if isinstance(value, list):
        return [path for it in value for path in key_paths(it, depth)]
    if not isinstance(value, dict) or not depth:
        return []
    return [(key, *rest) for key, it in value.items() for rest in [(), *key_paths(it, depth - 1)]]


def change(value: Any, keys: tuple[str, ...], nonsense: Any) -> None:
    if isinstance(value, list):
        for it in value:
            change(it, keys, nonsense)
    elif isinstance(value, dict) and keys[0] in value:
        if len(keys) > 1:
            change(value[keys[0]], keys[1:], nonsense)
        elif nonsense is None:
            del value[keys[0]]
        else:
            value[keys[0]] = nonsense


def test_a_file_that_cant_be_read_is_named(tmp_path: Path) -> None:
    broken, other, none = tmp_path / "broken.json", tmp_path / "other.json", tmp_path / "none.json"
    broken.write_text('{"kind": "decode", ')
    other.write_text('{"a": 1}')
    results, unread = read_all([broken, other, none, STORED[0]])
    assert len(results) == 1
    assert [path for path, _ in unread] == [broken, other, none]
    text = as_markdown(build(results, unread))
    for path in (broken, other, none):
        assert path.name in text


def test_without_its_encoding_a_message_s_travel_is_missing() -> None:
    result = synthetic.result((64,))
    for cell in result["cells"]:
        del cell["messages"]["encode_us"]
    (row, _) = [
        row
        for row in rows_of(sections([result]), ", 64")
        if len(row) == 9 and row[6] == "60.0 → 60.0"
    ]
    assert row[1:4] == ["missing", "missing", "150 → 150"]


def test_a_message_is_handed_over_where_that_was_measured() -> None:
    result = synthetic.result((64,))
    assert "handed over" in table_with(sections([result]), "arrival p50").columns
    for cell in result["cells"]:
        del cell["messages"]["handed_us"]
    assert "handed over" not in table_with(sections([result]), "arrival p50").columns


def test_latencies_show_the_spread_of_rounds() -> None:
    result = synthetic.result((64,))
    for cell in result["cells"]:
        for entry, factor in zip(cell["rounds"], (1, 2, 6), strict=True):
            entry["ttft_ms"]["p50"] = 10.0 * factor
            entry["itl_ms"] |= {"p50": 2.0 * factor, "p99": 5.0 * factor}
    parts = sections([result])
    label = "gpt-oss-20b, async, asyncllm, 64"
    (row,) = [row for row in rows_of(parts, label) if "20.0 (10.0 to 60.0)" in row[-2]]
    assert row[1] == "4.00 (2.00 to 12.0) → 4.00 (2.00 to 12.0)"
    assert row[3] == "10.0 (5.00 to 30.0) → 10.0 (5.00 to 30.0)"
    rate = next(row for row in rows_of(parts, label) if len(row) == 8)
    assert rate[4] == "3 → 3"


# ---- figures as text ----


def test_what_is_no_number_is_no_number_in_text() -> None:
    for value in (None, "5", True, float("nan"), float("inf"), {"missing": "x"}, [], {}):
        assert text_of(value) == "missing"
    assert text_of({"missing": "not available: there is no GPU"}) == "not available"
    assert text_of(0) == "0"
    assert text_of(0.034) == "0.034"
    assert text_of(1234.5) == "1,234"
    assert pair_text(None, 5) == "missing → 5.00"
    assert pair_text(None, None) == "missing"
    assert ratio_text(0, 5) == ratio_text(None, 5) == ratio_text(5, None) == "missing"
    assert spread_text([None, 5.0, "x"]) == "5.00"
    assert spread_text([]) == "missing"


def test_text_is_escaped() -> None:
    section = Section("<b>", [Table(("a|b",), [("<i>|</i>",)])])
    assert "<i>" not in as_html("t", [section])
    assert "a\\|b" in as_markdown([section])


# ---- findings ----


def test_who_limits_is_computed() -> None:
    text = "\n".join(findings([synthetic.result()]))
    assert "asyncllm, vLLM: the limit is the GPU at 1 and 64; the engine's host code at 256" in text
    assert "asyncllm, sparksched: the limit is the GPU at 1, 64 and 256 streams" in text
    assert "+150 % at 256" in text
    assert "within the spread of rounds" in text


def test_host_code_that_hardly_waits_is_the_limit() -> None:
    """Even if the model's results are never there before they are asked for."""
    result = synthetic.result((256,))
    for cell in result["cells"]:
        cell["phases"]["gap_estimate"]["host_late_share"] = 0.1
        if cell["scheduler"] == "stock":
            cell["phases"]["host_us"]["p50"] = 0.97 * cell["phases"]["period_us"]["p50"]
    text = "\n".join(findings([result]))
    assert "asyncllm, vLLM: the limit is the engine's host code at 256" in text
    assert "asyncllm, sparksched: the limit is the GPU at 256" in text


def with_full_api_servers(*counts: int) -> Row:
    found = synthetic.result(counts)
    for cell in found["cells"]:
        for entry in cell["rounds"]:
            entry["cpu"]["share"]["API server"] |= {"percent": 100.0, "busiest": 99.0}
    return found


def test_a_full_api_server_is_the_limit_only_if_clients_lack_something() -> None:
    result = with_full_api_servers(64, 256)
    for cell in result["cells"]:
        if cell["concurrency"] == 256 and cell["scheduler"] == "sparksched":
            for entry in cell["rounds"]:
                entry["tokens_per_s"] /= 1.1
    text = "\n".join(findings([result]))
    full = "the API server's thread has all or nearly all of a processor, too, and keeps up."
    assert (
        "http, sparksched: the limit is the GPU at 64; the API server at 256 streams. "
        f"At 64 {full}" in text
    )
    assert (
        "http, vLLM: the limit is the GPU at 64; the engine's host code at 256 streams. "
        f"At 64 and 256 {full}" in text
    )
    assert "a scheduler that takes no time" not in text


def test_a_full_api_server_keeps_up_only_if_rates_agree_and_messages_are_young() -> None:
    """A slow round with the probe has the engine make less than clients get, which says nothing."""
    for factor, age_us in ((1.1, None), (1.0, 1e6)):
        result = with_full_api_servers(64)
        for cell in result["cells"]:
            for entry in cell["rounds"]:
                entry["tokens_per_s"] *= factor
            if age_us is not None:
                cell["messages"] = {"handed_us": {"p50": age_us}}
        text = "\n".join(findings([result]))
        assert "http, sparksched: the limit is the API server at 64 streams." in text
        assert "keeps up" not in text


def test_nothing_is_said_without_figures() -> None:
    assert findings([]) == [
        "Nothing can be said: no decode with all processors has been measured with success."
    ]
    result = synthetic.result((1,))
    for cell in result["cells"]:
        failed(cell)
    (line,) = findings([result])
    assert line.startswith("Missing: 4 of 4")


def test_what_a_free_scheduler_gives() -> None:
    # The host takes 4 ms, 3 of them the scheduler's; the GPU takes 2.
    host_bound = Limits(4000, 4000, 3000, 2000, "the engine's host code")
    assert free_scheduler_gain(host_bound, 4000, is_async=True) == (pytest.approx(100), False)
    # Without the probe a step took 12 ms: 3 are left of the host's.
    assert free_scheduler_gain(host_bound, 12000, is_async=True) == (pytest.approx(300), False)
    unknown_gpu = Limits(4000, 4000, 3000, None, "the engine's host code")
    assert free_scheduler_gain(unknown_gpu, 4000, is_async=True) == (pytest.approx(300), True)
    gpu_bound = Limits(4000, 3000, 2000, 3900, "the GPU")
    assert free_scheduler_gain(gpu_bound, 4000, is_async=True) == (0.0, False)
    # In turns: what the scheduler takes is gained.
    assert free_scheduler_gain(gpu_bound, 4000, is_async=False) == (pytest.approx(100), False)


def test_more_than_a_free_scheduler_gives_is_called_that() -> None:
    result = synthetic.result((256,))
    assert "+154 % at 256 (sparksched: +150 %) streams" in "\n".join(findings([result]))
    ours = [cell for cell in result["cells"] if cell["scheduler"] == "sparksched"]
    for cell in ours:
        for entry in cell["rounds"]:
            entry["tokens_per_s"] *= 1.5
    more = "+154 % at 256 (sparksched: +276 %, more than that: "
    assert f"{more}rounds differ) streams" in "\n".join(findings([result]))
    for cell in ours:
        cell["phases"]["host_us"]["p50"] -= 100
    text = "\n".join(findings([result]))
    assert f"{more}the rest of its step takes less, too, 850 → 750 µs) streams" in text


def test_doubts_are_told() -> None:
    result = synthetic.result((1,))
    for cell in result["cells"]:
        for entry in cell["rounds"]:
            entry["load"]["busiest_percent"] = 99.0
            entry["counters"]["num_preemptions"] = 3.0
    text = "\n".join(findings([result]))
    assert "The load itself may have been the limit" in text
    assert "Requests were preempted" in text
    assert "isn't told" not in text


def test_what_would_show_a_doubt_is_missed() -> None:
    result = synthetic.result((1,))
    assert "isn't told" not in "\n".join(findings([result]))
    for cell in result["cells"]:
        # One round without it is enough.
        cell["rounds"][0]["load"] = None
        del cell["rounds"][0]["counters"]["num_preemptions"]
    text = "\n".join(findings([result]))
    assert (
        "Whether the load itself was the limit isn't told, for want of its CPU time: "
        "gpt-oss-20b, async, http, 1." in text
    )
    assert "Whether requests were preempted isn't told, for want of a counter: " in text


def test_what_is_missing_is_where_the_finding_says() -> None:
    result = synthetic.result((1,))
    failed(result["cells"][0])
    parts = sections([result])
    (finding,) = [it for it in findings([result]) if it.startswith("Missing")]
    title = finding.partition('"')[2].partition('"')[0]
    assert title in [section.title for section in parts]


def test_cells_of_several_files_and_visits_are_put_together() -> None:
    first, second = synthetic.result((64,)), synthetic.result((64,))
    first["cells"] = [it for it in first["cells"] if it["scheduler"] == "stock"]
    second["cells"] = [it for it in second["cells"] if it["scheduler"] == "sparksched"]
    pair = pairs_of([first, second])[0]
    assert pair.stock.rounds()
    assert pair.ours.rounds()
    assert len(pairs_of([first, first])[0].stock.rounds()) == 6


# ---- merged outputs ----


def test_streams_with_merged_outputs_show_their_gaps() -> None:
    result = synthetic.result((64,))
    for cell in result["cells"]:
        if cell["scheduler"] == "sparksched" and cell["driver"] == "http":
            cell["rounds"] = [evaluate(merged_logs(64, 4, 8.0), is_steady=True)]
    parts = build([(Path("x.json"), result)], [])
    (row,) = [row for row in rows_of(parts, "gpt-oss-20b, async, http, 64") if "1.00 → 4.00" in row]
    assert [cell.partition(" → ")[2] for cell in row[2:]] == ["8.00"] * 3


def merged_logs(num_streams: int, tokens_per_output: int, gap_ms: float) -> list[StreamLog]:
    return [
        StreamLog(log.sent_at, log.times, log.num_tokens * tokens_per_output)
        for log in synthetic.stream_logs(num_streams, 64, gap_ms)
    ]


def test_an_itl_of_zero_is_no_missing_one() -> None:
    result = synthetic.result((64,))
    for cell in result["cells"]:
        if cell["scheduler"] == "sparksched" and cell["driver"] == "http":
            cell["rounds"] = [evaluate(merged_logs(64, 4, 8.0), is_steady=True)]
    parts = build([(Path("x.json"), result)], [])
    (row,) = [
        row for row in rows_of(parts, "gpt-oss-20b, async, http, 64") if "in update" in row[1]
    ]
    assert row[-1].partition(" → ")[2] == "ITL is 0"


def test_tokens_that_come_at_once_have_no_latency_between_them() -> None:
    found = evaluate(merged_logs(2, 4, 8.0), is_steady=True)
    assert found["itl_ms"]["p50"] == 0
    assert found["itl_ms"]["max"] == pytest.approx(8.0)
    assert found["output_gap_ms"]["p50"] == pytest.approx(8.0)
    assert found["merged_share"] == pytest.approx(0.75)


def test_other_runs_are_not_compared() -> None:
    """They may be from another machine: what HTTP costs is said within one run only."""
    whole = synthetic.result((64,))
    for cell in whole["cells"]:
        for entry in cell["rounds"] if cell["driver"] == "http" else ():
            entry["tokens_per_s"] /= 2
    assert "HTTP and text" in "\n".join(findings([whole]))
    halves = [copy.deepcopy(whole), copy.deepcopy(whole)]
    for half, driver in zip(halves, ("asyncllm", "http"), strict=True):
        half["cells"] = [cell for cell in half["cells"] if cell["driver"] == driver]
    assert "HTTP and text" not in "\n".join(findings(halves))
