"""Who stays on ZMQ, and says why; and who may not."""

import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine.harness import new_request, restored_vllm
from sparksched import _core
from sparksched.engine import core_proc as engine_side
from vllm.config import VllmConfig

from .clients import (
    connected,
    engines_of_clients,
    expected_tokens,
    front_end,
    make_client,
    prompt_of,
    run_async,
)
from .engines import Engine, running_engine

pytestmark = pytest.mark.timeout(180)


def live_elsewhere() -> None:
    engine_side.host_identity = lambda: "another boot of another host"


def have_no_memory() -> None:
    def no_rings(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("shared memory of 1 bytes can't be made: out of luck")

    _core.EngineRings = no_rings


@dataclass(frozen=True)
class Case:
    """An engine whose clients stay on ZMQ."""

    reason: str
    prepare: Callable[[], None] | None = None
    of_engine: dict[str, str] = field(default_factory=dict)


CASES = {
    "engine-says-zmq": Case("SPARKSCHED_TRANSPORT=zmq", None, {"SPARKSCHED_TRANSPORT": "zmq"}),
    "another-host": Case("it runs on another host", live_elsewhere),
    "stock-engine": Case("it runs without sparksched", None, {"VLLM_SCHEDULER": ""}),
    "no-memory": Case("shared memory of 1 bytes can't be made: out of luck", have_no_memory),
}
RUST_FRONT_END = {"VLLM_USE_RUST_FRONTEND": "1", "VLLM_RUST_FRONTEND_PATH": sys.executable}
EACH_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


async def check_that_it_works(config: VllmConfig, engine: Engine) -> None:
    async with connected(config, engine) as reader:
        rings = getattr(reader.client.resources, "sparksched_rings", None)
        assert rings is None or not rings.channels
        await reader.add(new_request("request", prompt_of(3), 40))
        await reader.finish(["request"])
        assert reader.tokens["request"] == expected_tokens(prompt_of(3), 40)
        assert await reader.call("is_sleeping") is False


@EACH_CASE
def test_engines_without_rings(case: Case, config: VllmConfig, logged: list[str]) -> None:
    with front_end(), running_engine(config, prepare=case.prepare, **case.of_engine) as engine:
        run_async(check_that_it_works(config, engine))
        assert "uses shared memory" not in engine.log
        assert "ERROR" not in engine.log
    assert logged == [f"INFO sparksched: messages to engine 0 go over ZMQ: {case.reason}"]


@pytest.mark.parametrize("transport", ["zmq", None], ids=["told", "stock"])
def test_clients_without_rings(
    transport: str | None, config: VllmConfig, logged: list[str]
) -> None:
    client = front_end(SPARKSCHED_TRANSPORT=transport) if transport else restored_vllm()
    with client, running_engine(config) as engine:
        if not transport:
            os.environ.pop("VLLM_SCHEDULER", None)
        run_async(check_that_it_works(config, engine))
        assert "uses shared memory" not in engine.log
        assert "ERROR" not in engine.log
    reason = "INFO sparksched: messages to engine 0 go over ZMQ: SPARKSCHED_TRANSPORT=zmq"
    assert logged == ([reason] if transport else [])


def test_engine_of_the_rust_front_end(config: VllmConfig, logged: list[str]) -> None:
    """It says so itself, because that front end doesn't; nothing new is in its ready response."""
    with front_end(), running_engine(config, **RUST_FRONT_END) as engine:
        run_async(check_that_it_works(config, engine))
        lines = engine.log_lines("go over ZMQ")
    assert len(lines) == 1
    assert "INFO" in lines[0]
    assert lines[0].endswith(
        "messages of this engine go over ZMQ: vLLM's Rust front end speaks ZMQ only"
    )
    assert logged == [
        "INFO sparksched: messages to engine 0 go over ZMQ: it runs without sparksched"
    ]


def test_elastic_expert_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARKSCHED_TRANSPORT", raising=False)
    parallel_config = SimpleNamespace(enable_elastic_ep=True)
    engine = SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=parallel_config))
    rings, offer = engine_side._offer_rings(engine, 1)
    assert rings is None
    assert offer.reason == "elastic expert parallelism changes the set of engines"


# ----------------------------------------------------------------------------------------
# Those who insist on shared memory
# ----------------------------------------------------------------------------------------


@EACH_CASE
def test_shared_memory_or_nothing(
    case: Case, config: VllmConfig, logged: list[str], tmp_path: Path
) -> None:
    of_engine = {"SPARKSCHED_TRANSPORT": "shm", **case.of_engine}
    with (
        front_end(SPARKSCHED_TRANSPORT="shm"),
        engines_of_clients(tmp_path / "log", case.prepare, **of_engine) as processes,
    ):
        with pytest.raises(RuntimeError) as error:
            make_client(config, None)
        assert str(error.value) == (
            "SPARKSCHED_TRANSPORT=shm, but engine 0 can't be reached through shared memory: "
            f"{case.reason}"
        )
        (process,) = processes
        process.join(30)
        assert process.exitcode is not None
    assert logged == []


# ----------------------------------------------------------------------------------------
# Strangers
# ----------------------------------------------------------------------------------------


def knock(name: str, hello: bytes) -> bytes:
    """Say hello to an engine as another version of sparksched would; return its answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.settimeout(30)
        stranger.connect(f"\0{name}")
        stranger.send(hello)
        return stranger.recv(4096)


def test_a_refused_stranger(config: VllmConfig) -> None:
    """What it is told in which case, rust/links/ring/tests/refusals.rs knows."""

    async def run(engine: Engine) -> None:
        async with connected(config, engine, 0, count=2) as reader:
            reason = "the other process doesn't speak this protocol"
            told = knock(await reader.call("ring_name"), b"GET / HTTP/1.1")
            assert told == b"SPRKRING\x01" + reason.encode()
            engine.wait_for_line(reason)
            (line,) = engine.log_lines("refused a connection")
            assert "WARNING" in line
            # Nobody else suffers, and the stranger took nobody's place.
            assert await reader.call("is_sleeping") is False
            async with connected(config, engine, 1, count=2) as other:
                assert await other.call("is_sleeping") is False

    with front_end(SPARKSCHED_TRANSPORT="shm"), running_engine(config, num_clients=2) as engine:
        run_async(run(engine))
