"""Real servers with several processes a model: tensor parallelism, and engines side by side.

vLLM's CPU build has neither pipeline parallelism nor data parallelism of mixtures of experts: both
end in an error of vLLM's, with its own scheduler, too.
"""

import asyncio
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from testkit import tiny_gpt_oss, tiny_llama
from testkit.server import Server, serve
from testkit.streaming import Completion, mixed_prompts, stream_all

from .pair import Pair, observe_pair
from .test_rings import (
    NUM_ENDLESS,
    ROOM_FOR_ENDLESS,
    kill_in_mid_stream,
    process_named,
    processes_of,
    shared_memory_of,
    wait_until,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

NUM_REQUESTS = 24
VOCAB_SIZE = 400
TWO_ENGINES = ("--data-parallel-size=2", "--api-server-count=2", ROOM_FOR_ENDLESS)


def stream_mixed(server: Server) -> list[Completion]:
    prompts = mixed_prompts(NUM_REQUESTS, vocab_size=VOCAB_SIZE)
    return asyncio.run(stream_all(server.base_url, server.model, prompts))


def outcomes(streams: list[Completion]) -> list[Any]:
    return [it.outcome for it in streams]


# ----------------------------------------------------------------------------------------
# Tensor parallelism: each step goes to two workers
# ----------------------------------------------------------------------------------------


def test_two_workers_do_the_same_for_both_schedulers(tmp_path: Path) -> None:
    model = tiny_gpt_oss.write_model(tmp_path / "model")
    pair: Pair[list[Completion]] = observe_pair(
        model, tmp_path, stream_mixed, ("--tensor-parallel-size=2",)
    )
    assert outcomes(pair.ours) == outcomes(pair.stock)
    assert len({tuple(it.token_ids) for it in pair.stock}) == NUM_REQUESTS
    assert {f"Worker_TP{rank}" in pair.log for rank in range(2)} == {True}
    assert "API server 0" in pair.log  # over rings


# ----------------------------------------------------------------------------------------
# Data parallelism: two engines, two API servers
# ----------------------------------------------------------------------------------------


@dataclass
class Observed:
    """What happened in the life of a server with two engines."""

    streams: list[Completion]
    requests_by_engine: dict[str, float]
    ends: list[str]
    status: int | None = None
    log: str = field(default="", repr=False)


def observe_engines(server: Server) -> Observed:
    """Send requests, then kill one of the engines under load."""
    wait_until(lambda: "(ApiServer_1 pid=" in server.log, "for the second API server")
    streams = stream_mixed(server)
    server.wait_until_idle()
    # An API server counts a request after its last chunk is sent.
    wait_until(lambda: sum(finished_by_engine(server).values()) >= NUM_REQUESTS, "for all counts")
    by_engine = finished_by_engine(server)
    # vLLM's launcher ends the other engine, whose last outputs must not overtake the news.
    launcher = server.process.pid if server.runs_sparksched else None
    ends = asyncio.run(
        kill_in_mid_stream(server, process_named(server, "EngineCore_DP1"), stopped=launcher)
    )
    wait_until(lambda: not processes_of(server), "for the end of each process")
    return Observed(streams, by_engine, ends, server.process.wait(), server.log)


def finished_by_engine(server: Server) -> dict[str, float]:
    """Return how many requests each engine has ended."""
    text = httpx.get(f"{server.base_url}/metrics", timeout=60).raise_for_status().text
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = re.match(r'vllm:request_success_total\{.*?engine="(\d+)".*\} (\S+)$', line)
        if match:
            found[match[1]] = found.get(match[1], 0.0) + float(match[2])
    return found


def run_engines(model: Path, directory: Path, scheduler: str | None) -> Observed:
    directory.mkdir()
    with serve(
        model,
        directory / "serve.log",
        scheduler=scheduler,
        is_preloaded=True,
        arguments=TWO_ENGINES,
        environment={"SPARKSCHED_STRICT": "1", "SPARKSCHED_TRANSPORT": "shm"} if scheduler else {},
    ) as server:
        shared = shared_memory_of(server)
        observed = observe_engines(server)
    assert not [path for path in shared if path.exists()]
    return observed


@pytest.mark.parametrize("num_stock_engines", [1, pytest.param(2, marks=pytest.mark.full)])
def test_two_engines_serve_and_end_as_with_vllms_scheduler(
    num_stock_engines: int, tmp_path: Path
) -> None:
    """One engine of vLLM's streams the same; how it ends takes two."""
    model = tiny_llama.write_model(tmp_path / "model")
    if num_stock_engines == 2:
        stock = run_engines(model, tmp_path / "stock", None)
        expected, status = stock.streams, stock.status
    else:
        with serve(model, tmp_path / "stock.log", is_preloaded=True) as server:
            expected, status = stream_mixed(server), 1
    ours = run_engines(model, tmp_path / "ours", "sparksched")
    assert outcomes(ours.streams) == outcomes(expected)
    # Rings tell each API server at once; vLLM's learn nothing until they are stopped.
    assert ours.ends == ["an error in the stream"] * NUM_ENDLESS
    assert ours.status == status
    # Both engines have had their share, and each API server has rings to each of them.
    assert all(ours.requests_by_engine[it] > 0 for it in ("0", "1")), ours.requests_by_engine
    assert sum(ours.requests_by_engine.values()) == NUM_REQUESTS
    for engine in range(2):
        assert re.search(rf"\(EngineCore_DP{engine} pid=\d+\).*scheduling in Rust", ours.log)
        assert len(re.findall(rf"messages to engine {engine} go through shared", ours.log)) == 2
