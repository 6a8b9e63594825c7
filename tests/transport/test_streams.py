"""What clients get through rings is what they get through ZMQ."""

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest
import uvloop
from engine.harness import new_request
from sparksched import _core
from sparksched.engine.warm_up import PREFIX
from vllm.config import VllmConfig
from vllm.v1.engine import FinishReason
from vllm.v1.engine.core_client import SyncMPClient
from vllm.v1.serial_utils import MsgpackEncoder

from .clients import (
    Reader,
    connected,
    engines_of_clients,
    expected_tokens,
    front_end,
    prompt_of,
    run_async,
)
from .engines import Engine, PacedExecutor, running_engine

pytestmark = pytest.mark.timeout(180)

NUM_STREAMS = 24
MAX_TOKENS = 40
TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "zmq"])


def requests(prefix: str = "stream") -> dict[str, Any]:
    ids = [f"{prefix}-{index}" for index in range(NUM_STREAMS)]
    return {it: new_request(it, prompt_of(index), MAX_TOKENS) for index, it in enumerate(ids)}


def check_streams(tokens: dict[str, list[int]], finishes: dict[str, list[FinishReason]]) -> None:
    """Each request has its own tokens, and ended once."""
    for request_id, request in requests(next(iter(tokens)).rsplit("-", 1)[0]).items():
        assert tokens[request_id] == expected_tokens(request.prompt_token_ids, MAX_TOKENS)
    assert len(tokens) == NUM_STREAMS
    reasons = {reason for (reason,) in finishes.values()}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}


def forbid_sockets() -> None:
    """Let an engine fail that sends outputs through a socket: only those are encoded so."""

    def encode_into(self: MsgpackEncoder, obj: Any, buf: bytearray) -> Any:
        raise AssertionError("an output goes over ZMQ")

    MsgpackEncoder.encode_into = encode_into


def forbid_rings() -> None:
    """Let an engine fail that is connected to."""
    del _core.EngineRings


def assert_transport(reader: Reader, transport: str) -> None:
    channels = reader.client.resources.sparksched_rings.channels
    assert bool(channels) == (transport == "shm")


async def stream(reader: Reader, prefix: str = "stream") -> None:
    wave = requests(prefix)
    await reader.add(*wave.values())
    await reader.finish(wave)


@TRANSPORTS
@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_streams(transport: str, loop_factory: Any, config: VllmConfig) -> None:
    async def run(engine: Engine) -> None:
        async with connected(config, engine) as reader:
            assert_transport(reader, transport)
            for round_number in range(3):
                await stream(reader, f"round{round_number}")
                check_streams(reader.tokens, reader.finishes)
                reader.tokens.clear()
                reader.finishes.clear()
            assert reader.stats

    prepare = forbid_sockets if transport == "shm" else forbid_rings
    with (
        front_end(SPARKSCHED_TRANSPORT=transport),
        running_engine(config, prepare=prepare, SPARKSCHED_TRANSPORT=transport) as engine,
    ):
        run_async(run(engine), loop_factory)
        assert engine.wait_for_exit() == 0 if transport == "shm" else engine.process.is_alive()
        assert "ERROR" not in engine.log


@TRANSPORTS
def test_streams_of_a_client_without_a_loop(
    transport: str, config: VllmConfig, tmp_path: Path
) -> None:
    log_path = tmp_path / "engine.log"
    with (
        front_end(SPARKSCHED_TRANSPORT=transport),
        engines_of_clients(log_path, SPARKSCHED_TRANSPORT=transport),
    ):
        client = SyncMPClient(copy.deepcopy(config), PacedExecutor, log_stats=True)
        try:
            assert bool(client.resources.sparksched_rings.channels) == (transport == "shm")
            tokens: dict[str, list[int]] = {}
            finishes: dict[str, list[FinishReason]] = {}
            for request in requests().values():
                client.add_request(request)
            while len(finishes) < NUM_STREAMS:
                for output in client.get_output().outputs:
                    tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                    if output.finish_reason is not None:
                        finishes.setdefault(output.request_id, []).append(output.finish_reason)
            check_streams(tokens, finishes)
            assert client.is_sleeping() is False
            assert client.reset_prefix_cache() is True
            (process,) = client.resources.engine_manager.processes
        finally:
            client.shutdown()
    process.join(30)
    assert process.exitcode is not None
    assert "ERROR" not in log_path.read_text()


@pytest.mark.parametrize("transport", ["shm", "libzmq"])
def test_an_engine_that_paces_is_warm_before_it_answers(transport: str, config: VllmConfig) -> None:
    async def ask(engine: Engine) -> dict[str, int]:
        async with connected(config, engine) as reader:
            (sampled,) = await reader.call("collective_rpc", "get_num_sampled")
            return dict(sampled)

    variables = {"SPARKSCHED_MAX_STALL_MS": "100", "SPARKSCHED_TRANSPORT": transport}
    with front_end(SPARKSCHED_TRANSPORT=transport), running_engine(config, **variables) as engine:
        sampled = run_async(ask(engine))
        assert engine.log_lines("paced prefill is warm")
    assert any(request_id.startswith(PREFIX) for request_id in sampled)
