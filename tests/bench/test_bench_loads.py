"""Loads against a server that is made up: their metrics, and what they tell of failures."""

import gzip
import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_server
import pytest

from bench.cpu import Threads
from bench.models import Model
from bench.results import Results
from bench.serving import agents, experts, mixed, tenants, vllm_client
from bench.serving.__main__ import LOADS, Case, _Run
from bench.serving.client import RequestError, percentiles
from bench.serving.servers import Server
from bench.sides import Side
from testkit.server import Server as Launched

CONFIG = {"vocab_size": 4096, "num_local_experts": 32, "num_experts_per_tok": 4}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    with fake_server.serving() as port:
        launched = Launched(f"http://127.0.0.1:{port}", tmp_path / "log", process, "m")
        model = Model("m", tmp_path, CONFIG, has_dummy_weights=True)
        yield Server(Side("vllm"), model, launched, tmp_path, {"SPARKSCHED_BENCH_FILLER": "bench"})
    process.kill()
    process.wait()


def test_a_long_prompt_beside_streams(server: Server) -> None:
    point = {"streams": 3, "stream_tokens": 5000, "long": 50, "short_every": 0.01, "window_s": 1}
    found = mixed.measure(server, point, 1)
    assert found["long_ttft_s"] > 0
    assert found["stream_tokens"] > 0
    assert found["gap_ms_max"] >= found["gap_ms_p50"] > 0
    with pytest.raises(RequestError, match="stream_tokens"):
        mixed.measure(server, point | {"stream_tokens": 10}, 1)


def test_a_round_in_which_a_kernel_was_compiled_is_repeated(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def measure(server: Server, point: dict[str, Any], seed: int) -> dict[str, float]:
        seen.append(seed)
        (server.folder / "compiled").write_text("kernel\n" * (len(seen) > 2))
        return {"seconds": 1.0}

    monkeypatch.setitem(LOADS, "made up", SimpleNamespace(measure=measure))
    point = {"name": "1", "load": "made up"}
    case = Case("case", "", "m", ["vllm"], [point], rounds=2)
    run = _Run(case, Results(None, "case", model="m"), Namespace(minutes=1.0))
    run.measure([server])
    compiled = [it["value"] for it in run.results.rows if it["metric"] == "compiled"]
    assert compiled == ["0", "1", "0"]


def test_what_a_server_refuses_is_told(server: Server) -> None:
    point = {"flood": 2, "input": 10, "output": 10**7}
    with pytest.raises(RequestError, match="too many"):
        tenants.measure(server, point, 1)


def test_tenants_are_told_apart(server: Server) -> None:
    point = {"flood": 5, "input": 10, "output": 50, "every_s": 0.02}
    found = tenants.measure(server, point, 1)
    assert found["steady_ttft_ms_p99"] > 0
    assert found["requests_per_s"] > 5


def test_experts_and_distinct_tokens_are_counted(server: Server) -> None:
    steps = [{"tokens": 10, "experts": 4.0}]
    (server.folder / "experts").write_text("\n".join(map(json.dumps, steps)) + "\n")
    found = experts.measure(server, {"streams": 2, "input": 10, "output": 14}, 1)
    assert found["distinct_tokens"] == 0.5
    assert found["expected_experts"] == pytest.approx(32 * (1 - (28 / 32) ** 2))
    assert "experts" not in found  # no step of two tokens since then


KV_CACHE_TESTER = [
    {
        "id": f"session-{number}",
        "tool": 64,
        "sys": 64,
        "r": [
            {"i": 200, "o": 3, "th": 0.0, "h": [1, 2, 3, 4]},
            {"i": 260, "o": 3, "th": 0.1, "h": [1, 2, 3, 4, 5]},
        ],
    }
    for number in range(2)
]
MOONCAKE = [
    {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]},
    {"timestamp": 5, "input_length": 700, "output_length": 5, "hash_ids": [7, 8]},
    {"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 2, 3]},
    {"timestamp": 3000, "input_length": 1200, "output_length": 5, "hash_ids": [0, 2, 4]},
]


def test_recordings_of_both_forms_are_read(tmp_path: Path) -> None:
    path = tmp_path / "agents.json.gz"
    path.write_bytes(gzip.compress(json.dumps(KV_CACHE_TESTER).encode()))
    first, second = agents.read(path)
    # tools and system prompt in common, the rest of its own
    assert first.requests[0].blocks[:2] == second.requests[0].blocks[:2]
    assert not set(first.requests[0].blocks[2:]) & set(second.requests[0].blocks[2:])
    path = tmp_path / "mooncake.jsonl"
    path.write_text("\n".join(map(json.dumps, MOONCAKE)))
    (session,) = agents.read(path)
    assert [it.pause_s for it in session.requests] == [0.0, 1.0, 2.0]


def test_agents_go_on_in_the_next_round(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "agents.json"
    path.write_text(json.dumps(KV_CACHE_TESTER))
    point: dict[str, Any] = {"agents": 1, "chats": 1, "max_input": 250, "trace": str(path)}
    point |= {"warm_up_s": 0.4, "begin_s": 0.2, "round_s": 0.8}
    agents.measure(server, point | {"is_warm_up": True}, 1)
    found = agents.measure(server, point | {"is_warm_up": False}, 2)
    assert found["agent_replies"] >= 1
    assert found["chat_gap_ms_p99.9"] > 0


def test_the_client_that_lost_a_request_has_failed() -> None:
    result: dict[str, Any] = {
        "completed": 2,
        "num_prompts": 2,
        "request_throughput": 4.0,
        "output_throughput": 40.0,
        "total_output_tokens": 20,
        "duration": 0.5,
        "p50_ttft_ms": 7.0,
        "itls": [[0.1] * 4, [0.1, 0.3, 0.1, 0.1]],
    }
    found = vllm_client.metrics(result)
    assert (found["ttft_ms_p50"], found["tokens_per_output"]) == (7.0, 2.0)
    assert found["itl_ms_max"] == pytest.approx(300)
    with pytest.raises(RequestError, match="1 of 2 requests failed: full"):
        vllm_client.metrics(result | {"completed": 1, "errors": ["", "full"]})


def test_cpu_time_is_told_by_role(server: Server) -> None:
    pid = server.launched.process.pid
    before = Threads.of(pid)
    while Threads.of(pid).seconds == before.seconds:
        pass
    found = Threads.of(pid).since(before, 0.1, 10)
    assert found["cpu_front_end_us_per_token"] > 0


def test_percentiles_have_their_names() -> None:
    found = percentiles("x", range(1000), 50, 99.9)
    assert found == {"x_p50": 500, "x_p99.9": 999, "x_max": 999}
    assert percentiles("x", [], 50) == {}
