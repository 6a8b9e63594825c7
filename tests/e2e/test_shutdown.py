"""SIGTERM within `--shutdown-timeout`: what is in flight is answered, and what comes is refused.

vLLM's Rust front end closes new connections instead of answering 503.
"""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import httpx
import pytest

from testkit.executor import write_model_directory
from testkit.server import Server
from testkit.streaming import Prompt, stream_chunks

from .test_storms import RINGS, ZMQ, serving

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

NUM_REQUESTS = 40
NUM_TOKENS = 400
TIMEOUT_S = 120
REQUEST = {"model": "tiny", "prompt": [1], "max_tokens": 1}

SERVERS = {"one-zmq": (1, ZMQ), "two-rings": (2, RINGS)}


@pytest.mark.parametrize("name", SERVERS)
def test_a_restart_loses_no_answer(name: str, tmp_path: Path) -> None:
    num_servers, environment = SERVERS[name]
    arguments = (
        f"--api-server-count={num_servers}",
        f"--shutdown-timeout={TIMEOUT_S}",
        f"--max-num-seqs={NUM_REQUESTS}",
    )
    model = write_model_directory(tmp_path / "model", max_position_embeddings=512)
    with serving(model, tmp_path / "log", *arguments, environment=environment) as server:
        nums_of_tokens, refusal = asyncio.run(stream_through_a_shutdown(server))
        assert nums_of_tokens == [NUM_TOKENS] * NUM_REQUESTS
        assert "shutting down" in refusal.text
        assert int(refusal.headers["Retry-After"]) > 0
        assert server.process.wait(TIMEOUT_S) == 0


async def stream_through_a_shutdown(server: Server) -> tuple[list[int], httpx.Response]:
    """Return how many tokens came of each stream, and the answer to a request that was refused.

    Each server refuses requests until the last stream ends, also one that has ended its own.
    """
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.base_url, timeout=300, limits=limits) as client:
        have_begun = [asyncio.Event() for _ in range(NUM_REQUESTS)]
        streams = [asyncio.create_task(read_one(client, it)) for it in have_begun]
        await asyncio.gather(*(it.wait() for it in have_begun))
        assert not all(it.done() for it in streams)
        os.kill(server.process.pid, signal.SIGTERM)
        refusals: list[httpx.Response] = []
        while not all(it.done() for it in streams):
            with contextlib.suppress(httpx.TransportError):  # a server without streams is gone
                answer = await client.post("/v1/completions", json=REQUEST)
                assert answer.is_success or answer.status_code == 503, answer.text
                refusals += [] if answer.is_success else [answer]
            await asyncio.sleep(0.01)
        return await asyncio.gather(*streams), refusals[-1]


async def read_one(client: httpx.AsyncClient, has_begun: asyncio.Event) -> int:
    num_tokens = 0
    async for chunk in stream_chunks(client, "tiny", Prompt([1], NUM_TOKENS, {"ignore_eos": True})):
        num_tokens += sum(len(choice["token_ids"] or ()) for choice in chunk["choices"])
        has_begun.set()
    return num_tokens
