"""Two engines that are compared with both schedulers, by a run that is stopped and goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from testkit import tiny_llama

ROOT = Path(__file__).resolve().parents[2]
STREAMS = 4

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2400)]


def command(directory: Path) -> list[str]:
    model = tiny_llama.write_model(directory / "llama")
    (model / "model.safetensors").unlink()  # vLLM makes up random weights, as for large models
    options = {
        "--model": model,
        "--json": directory / "x.json",
        "--work-dir": directory / "work",
        "--layout": "dp2",
        "--concurrency": STREAMS,
        "--driver": "asyncllm",
        "--rounds": 1,
        "--tokens": 256,
    }
    chosen = [str(part) for option in options.items() for part in option]
    return [sys.executable, "-m", "bench.decode", *chosen, "--compare-streams"]


def stop_after_the_first_cell(directory: Path) -> dict[str, Any]:
    """Run the benchmark, stop it once a cell is in its file, and return what is there."""
    with subprocess.Popen(command(directory), cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        path, result = directory / "x.json", dict[str, Any]()
        while process.poll() is None and not result.get("cells"):
            time.sleep(0.2)
            result = json.loads(path.read_text()) if path.exists() else result
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 3
    assert "error" not in result["cells"][0], result["cells"]
    return result


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what was there after a run that was stopped, and after the one that went on."""
    directory = tmp_path_factory.mktemp("layout")
    first = stop_after_the_first_cell(directory)
    for server in first["servers"]:
        assert not is_alive(server["engine"]["pid"])
    subprocess.run(command(directory), cwd=ROOT, check=True)
    return first, json.loads((directory / "x.json").read_text())


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_run_that_was_stopped_goes_on_with_what_is_missing(
    runs: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    first, whole = runs
    assert [cell["scheduler"] for cell in first["cells"]] == ["stock"]
    assert whole["cells"][0] == first["cells"][0]
    assert [(cell["scheduler"], cell["run"]) for cell in whole["cells"]] == [
        ("stock", 0),
        ("sparksched", 1),
    ]


def test_requests_are_spread_evenly_over_the_engines(
    runs: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    for cell in runs[1]["cells"]:
        assert "error" not in cell, cell
        (entry,) = cell["rounds"]
        half = STREAMS / 2
        assert entry["counters"]["requests_by_engine"] == {"0": half, "1": half}
        assert cell["phases"]["requests"] == half
        assert not cell["is_held"]
        cpu = cell["engine_cpu"]
        assert 0 < cpu["working_us_per_token"] < cpu["loop_us_per_token"]


def test_both_schedulers_bring_the_same_lively_tokens(
    runs: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    stock, ours = sorted(runs[1]["streams"], key=lambda row: row["scheduler"] != "stock")
    for first, second in ((stock, ours), (stock["greedy"], ours["greedy"])):
        assert first["streams"] == 64
        assert first["digests"][0] == first["digests"][1] == second["digests"][0]
        assert first["batches"][0] == first["batches"][1] == second["batches"][0]
        assert len(first["batches"][0]) == 2
    assert stock["distinct_tokens_median"] > 20
    assert stock["scaled"] == ours["scaled"] > 0


def test_a_server_says_how_it_is_set_up(runs: tuple[dict[str, Any], dict[str, Any]]) -> None:
    for server in runs[1]["servers"]:
        engine = server["engine"]
        assert (engine["experts"], engine["model_runner"]) == ("none", "V1")
        assert not engine["is_async"]
        assert engine["executor"].endswith("Executor")
        assert server["num_engines"] == 2
