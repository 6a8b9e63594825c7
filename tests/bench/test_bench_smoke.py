"""Each benchmark runs from end to end, in the smallest size: what it measures means nothing."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from testkit import tiny_llama

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]


def run(module: str, *arguments: str | Path, status: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def decode(path: Path, *arguments: str) -> dict[str, Any]:
    options = ("--model", "tiny", "--quick", "--json", path, "--work-dir", path.parent / "work")
    run("bench.decode", *options, *arguments)
    result: dict[str, Any] = json.loads(path.read_text())
    return result


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    path = tmp_path_factory.mktemp("decode") / "x.json"
    arguments = ("--concurrency", "1,4", "--workload", "decode,mixed,prefix", "--cores", "all,1")
    return path, decode(path, *arguments, "--compare-streams", "--trace")


def test_decode_measures_all_cells_of_both_schedulers(
    measured: tuple[Path, dict[str, Any]],
) -> None:
    _, result = measured
    cells = result["cells"]
    # (two numbers of streams, and two workloads with one) with two drivers, on all cores and one
    assert len(cells) == 2 * 4 * 2 * 2
    for cell in cells:
        assert "error" not in cell, cell
        (entry,) = cell["rounds"]
        assert entry["tokens_per_s"] > 0
        assert entry["itl_ms"]["count"] > 0
        assert (entry["load"] is None) == (cell["driver"] == "asyncllm")
        assert cell["cpus"] is None or len(cell["cpus"]) == 1
        if cell["workload"] == "decode":
            phases = cell["phases"]
            assert phases["steps"] > 3
            assert phases["schedule_us"]["p50"] > 0
            assert cell["messages"]["arrival_us"]["p50"] > 0
            assert cell["messages"]["handed_us"]["count"] > 3
            assert_late_messages_are_explained(cell["messages"])
            assert phases["mean_period_us"] > 0
            assert cell["memory"]["missing"].startswith("not available")
        assert "missing" in entry["compiled"]  # there is no GPU
        if cell["workload"] == "prefix":
            assert entry["counters"]["prefix_cache_queries"] > 0


def assert_late_messages_are_explained(messages: dict[str, Any]) -> None:
    assert set(messages["collections"]) == {"0", "1", "2"}
    for call, found in messages["late"].items():
        assert found["calls"] == messages[f"{call}_us"]["count"]
        assert found["calls"] == messages[f"{call}_cpu_us"]["count"]
        if found["count"]:
            parts = [found[f"{it}_share"] for it in ("collecting", "stopped", "working")]
            assert sum(parts) == pytest.approx(1.0)


def test_both_schedulers_bring_the_same_tokens(measured: tuple[Path, dict[str, Any]]) -> None:
    stock, ours = sorted(measured[1]["streams"], key=lambda row: row["scheduler"] != "stock")
    assert stock["digests"][0] == ours["digests"][0]
    assert stock["batches"] == ours["batches"]
    assert stock["distinct_tokens_median"] > 4
    assert {it["scheduler"]: it["transport"] for it in measured[1]["servers"]} == {
        "stock": "ZMQ",
        "sparksched": "rings",
    }


def test_without_a_gpu_a_trace_is_not_available(measured: tuple[Path, dict[str, Any]]) -> None:
    traces = measured[1]["traces"]
    assert len(traces) == 4
    assert all(it["missing"].startswith("not available") for it in traces)


def test_a_second_run_starts_no_server(measured: tuple[Path, dict[str, Any]]) -> None:
    path, result = measured
    before = {it.name: it.stat().st_mtime_ns for it in (path.parent / "work").rglob("serve.log")}
    again = decode(path, "--concurrency", "1,4", "--workload", "decode")
    after = {it.name: it.stat().st_mtime_ns for it in (path.parent / "work").rglob("serve.log")}
    assert before == after
    assert again["cells"] == result["cells"]


def test_the_report_is_made_of_it(measured: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    stored = sorted((ROOT / "bench/results").glob("*.json"))
    run("bench.report", measured[0], *stored, "--out", tmp_path)
    text = (tmp_path / "report.md").read_text()
    for title in ("tokens a second", "host's time", "CPU time", "few processors", "same tokens"):
        assert title in text
    assert "8 of 8" in text
    assert list(tmp_path.glob("timeline-*.png"))


def test_asynchronous_scheduling_is_missing_where_there_is_none(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    options = ("--model", "tiny", "--quick", "--json", path, "--work-dir", tmp_path)
    arguments = ("--mode", "async", "--concurrency", "1", "--schedulers", "stock")
    run("bench.decode", *options, *arguments, status=1)
    cells = json.loads(path.read_text())["cells"]
    assert len(cells) == 2
    assert all("async scheduling isn't available here" in cell["error"] for cell in cells)


def test_decode_measures_several_engines_and_api_servers(tmp_path: Path) -> None:
    model, path = tiny_llama.write_model(tmp_path / "llama"), tmp_path / "x.json"
    options = ("--model", model, "--quick", "--json", path, "--work-dir", tmp_path / "work")
    arguments = ("--layout", "dp2", "--concurrency", "4", "--schedulers", "sparksched")
    run("bench.decode", *options, *arguments, "--compare-streams")
    result = json.loads(path.read_text())
    (server,) = result["servers"]
    assert (server["num_engines"], server["num_api_servers"]) == (2, 2)
    assert len(result["cells"]) == 2
    for cell in result["cells"]:
        assert cell["model"] == "llama, DP 2"
        assert cell["phases"]["steps"] > 3
        assert "one engine" in cell["messages"]["missing"]
        (entry,) = cell["rounds"]
        # Each request is in one of the API servers and in one of the engines.
        assert entry["ttft_ms"]["count"] == 4
        assert entry["counters"]["prefix_cache_queries"] == 4 * 128
        assert {"API server", "engine"} < entry["cpu"]["us_per_token"].keys()
    (streams,) = result["streams"]
    assert streams["streams"] == 8


@pytest.mark.parametrize(
    ("module", "arguments", "key"),
    [
        ("bench.ipc", (), "cases"),
        ("bench.host_path", ("--streams", "1", "--step-ms", "0", "--no-short"), "decode"),
        ("bench.step_cost", (), "decode"),
    ],
)
def test_the_others_run(module: str, arguments: tuple[str, ...], key: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    run(module, "--quick", "--json", path, *arguments)
    result = json.loads(path.read_text())
    assert result[key]
    assert {"commit", "cpu", "gpu", "vllm", "torch", "python"} <= result["run"].keys()
    run("bench.report", path, "--out", tmp_path)
