"""Each benchmark runs from end to end, in the smallest size: what it measures means nothing."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.serving.models import QWEN2_1_5B, write_shape
from testkit import tiny_llama

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(1500)]


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


def decode(path: Path, *arguments: str | Path) -> dict[str, Any]:
    options = ("--quick", "--json", path, "--work-dir", path.parent / "work")
    run("bench.serving.decode", *options, *arguments)
    result: dict[str, Any] = json.loads(path.read_text())
    return result


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    path = tmp_path_factory.mktemp("decode") / "x.json"
    # On one processor: vLLM's engine and worker spin while they wait, and on two they leave the API
    # server none, so that a whole stream may come in one piece.
    arguments = ("--concurrency", "1,4", "--cores", "1")
    return path, decode(path, "--model", "tiny", *arguments, "--compare-streams")


def test_decode_measures_all_cells_of_both_schedulers(
    measured: tuple[Path, dict[str, Any]],
) -> None:
    _, result = measured
    cells = result["cells"]
    # two numbers of streams with two drivers
    assert len(cells) == 2 * 2 * 2
    for cell in cells:
        assert "error" not in cell, cell
        (entry,) = cell["rounds"]
        assert entry["tokens_per_s"] > 0
        assert entry["output_gap_ms"]["count"] > 0
        assert len(cell["cpus"]) == 1
        assert cell["phases"]["steps"] > 3
        assert cell["phases"]["mean_period_us"] > 0


def test_both_schedulers_bring_the_same_tokens(measured: tuple[Path, dict[str, Any]]) -> None:
    stock, ours = sorted(measured[1]["streams"], key=lambda row: row["scheduler"] != "stock")
    assert stock["digests"][0] == stock["digests"][1] == ours["digests"][0]
    assert len(set(stock["digests"][0])) == 8
    assert {it["scheduler"]: it["transport"] for it in measured[1]["servers"]} == {
        "stock": "ZMQ",
        "sparksched": "rings",
    }


def test_a_second_run_starts_no_server(measured: tuple[Path, dict[str, Any]]) -> None:
    path, result = measured
    before = {it.name: it.stat().st_mtime_ns for it in (path.parent / "work").rglob("serve.log")}
    again = decode(path, "--model", "tiny", "--concurrency", "1,4", "--cores", "1")
    after = {it.name: it.stat().st_mtime_ns for it in (path.parent / "work").rglob("serve.log")}
    assert before == after
    assert again["cells"] == result["cells"]


def test_the_report_is_made_of_it(measured: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    run("bench.report", measured[0], "--out", tmp_path)
    text = (tmp_path / "report.md").read_text()
    for title in ("Servers under load", "The same tokens?"):
        assert f"## {title}" in text
    assert "| tiny, sync | 8 | 8 | 8 |" in text


def test_both_servers_run_side_by_side_and_take_turns(tmp_path: Path) -> None:
    options = (
        "--in-turn",
        "--cores",
        "1",
        "--concurrency",
        "1",
        "--driver",
        "http",
        "--rounds",
        "2",
    )
    result = decode(tmp_path / "x.json", "--model", "tiny", *options)
    assert [cell["scheduler"] for cell in result["cells"]] == ["stock", "sparksched"]
    assert [len(cell["rounds"]) for cell in result["cells"]] == [2, 2]
    stock, ours = ([it["start_s"] for it in cell["rounds"]] for cell in result["cells"])
    assert stock[0] < ours[0] < ours[1] < stock[1]


def test_asynchronous_scheduling_is_missing_where_there_is_none(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    options = ("--model", "tiny", "--quick", "--json", path, "--work-dir", tmp_path)
    arguments = ("--mode", "async", "--concurrency", "1", "--schedulers", "stock")
    run("bench.serving.decode", *options, *arguments, status=1)
    cells = json.loads(path.read_text())["cells"]
    assert len(cells) == 2
    assert all("async scheduling isn't available here" in cell["error"] for cell in cells)


def test_a_run_of_two_engines_is_stopped_and_goes_on(tmp_path: Path) -> None:
    model, path = tiny_llama.write_model(tmp_path / "llama"), tmp_path / "x.json"
    # Where processors are taken, the second API server may begin seconds after the first.
    options = ("--layout", "dp2", "--concurrency", "4", "--driver", "asyncllm", "--tokens", "4096")
    arguments = ("--model", model, "--quick", *options, "--json", path, "--work-dir", tmp_path)
    command = [sys.executable, "-m", "bench.serving.decode", *map(str, arguments)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        first = dict[str, Any]()
        while process.poll() is None and not first.get("cells"):
            time.sleep(0.2)
            first = json.loads(path.read_text()) if path.exists() else first
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 3
    with contextlib.suppress(psutil.NoSuchProcess):  # it may take a moment to be gone
        psutil.Process(first["servers"][0]["engine"]["pid"]).wait(30)
    subprocess.run(command, cwd=ROOT, check=True)
    whole = json.loads(path.read_text())
    assert [(it["scheduler"], it["run"]) for it in whole["cells"]] == [
        ("stock", 0),
        ("sparksched", 1),
    ]
    for server in whole["servers"]:
        assert (server["num_engines"], server["num_api_servers"]) == (2, 2)
    for cell in whole["cells"]:
        assert "error" not in cell, cell
        assert cell["model"] == "llama, DP 2"
        assert cell["engine_cpu"]["without_waiting_us_per_token"] > 0
        (entry,) = cell["rounds"]
        assert {"API server", "engine"} < entry["cpu"]["us_per_token"].keys()


# `vllm bench latency` has prompts of any of 10,000 tokens. For this type of model, transformers
# takes nothing of a tokenizer's file but vocabulary and merges.
SMALL = QWEN2_1_5B | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 10_240,
    "eos_token_id": 10_239,
    "bos_token_id": 10_239,
}


def vllm_bench(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    write_shape(folder / "small", SMALL)
    options = (
        "--least",
        "8",
        "--model",
        folder / "small",
        "--json",
        folder / "x.json",
        "--work-dir",
        folder,
    )
    run("bench.serving.vllm_bench", *options, *arguments)
    cells: list[dict[str, Any]] = json.loads((folder / "x.json").read_text())["cells"]
    assert not [it for it in cells if "error" in it]
    return cells


def test_vllms_own_client_measures_both_schedulers(tmp_path: Path) -> None:
    loads = ("--concurrency", "4", "--rates", "50", "--waves", "2", "--seconds", "1")
    arguments = ("--cases", "64/8,64+32/8", *loads, "--cores", "1")
    cells = vllm_bench(tmp_path, *arguments)
    # two lengths of requests with two loads
    assert len(cells) == 2 * 2 * 2
    for cell in cells:
        (entry,) = cell["rounds"]
        assert entry["output_tokens"] == 8 * entry["completed"]
        assert entry["ttft_ms"]["p99"] >= entry["ttft_ms"]["p50"] > 0
        assert entry["cpu"]["us_per_token"]["engine"] > 0
        assert len(cell["cpus"]) == 1
    # At a rate of vLLM's: the same for both.
    rates = {(it["lengths"], it["request_rate"]) for it in cells if it["rate_percent"]}
    assert len(rates) == 2
    assert vllm_bench(tmp_path, *arguments) == cells
    run("bench.report", tmp_path / "x.json", "--out", tmp_path)
    assert (
        "| small, 1 processor, 64 + 32 in, 8 out, 50 % of vLLM's rate |"
        in (tmp_path / "report.md").read_text()
    )


def test_vllms_offline_commands_run(tmp_path: Path) -> None:
    commands = ("--offline", "latency,throughput", "--no-serve", "--schedulers", "sparksched")
    cells = vllm_bench(tmp_path, "--cases", "64/8", "--concurrency", "4", *commands)
    latency, throughput = (it["rounds"][0] for it in cells)
    assert latency["batch_ms"]["p99"] >= latency["batch_ms"]["p50"] > 0
    assert throughput["requests_per_s"] > 0


@pytest.mark.parametrize(
    ("module", "arguments", "key"),
    [
        ("bench.micro.messages", (), "cases"),
        ("bench.micro.host_path", ("--streams", "1", "--step-ms", "0"), "decode"),
        ("bench.micro.steps", (), "decode"),
    ],
)
def test_the_others_run(module: str, arguments: tuple[str, ...], key: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    text = run(module, "--quick", "--json", path, *arguments)
    result = json.loads(path.read_text())
    assert result[key]
    assert {"commit", "cpu", "gpu", "vllm", "torch", "python"} <= result["run"].keys()
    assert "| --- |" in text
    run("bench.report", path, "--out", tmp_path)
