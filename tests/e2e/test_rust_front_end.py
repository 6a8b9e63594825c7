"""vLLM's Rust front end before an engine of ours: users can't tell it from vLLM's own.

`make test` fetches it; it is not part of vLLM's CPU build.
"""

import asyncio
import os
import signal
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from testkit import tiny_llama, vllm_rs
from testkit.server import Server, serve
from testkit.streaming import Completion, Prompt, mixed_prompts, stream_all, stream_chunks
from testkit.tiny_gpt_oss import write_model

from .test_rings import health, process_named, processes_of, wait_until
from .test_serve import SCHEMA, VOCAB_SIZE

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(vllm_rs.binary() is None, reason="make test fetches it"),
]

NUM_REQUESTS = 32
STRICT = {"SPARKSCHED_STRICT": "1"}
SENDS = "outputs go straight to API server 0"


@dataclass
class Observed:
    """What users see of one server."""

    streams: list[Completion]
    sampled: list[int]
    structured: list[int]
    logprobs: list[dict[str, float]]
    after_aborts: Completion
    statuses: dict[str, int]
    log: str = field(repr=False)


def observe(server: Server) -> Observed:
    prompts = mixed_prompts(NUM_REQUESTS, vocab_size=VOCAB_SIZE)
    streams = asyncio.run(stream_all(server.base_url, server.model, prompts))
    with httpx.Client(base_url=server.base_url, timeout=120) as client:
        # One sample: vLLM's Rust front end refuses more of a prompt.
        sampled = post(client, Prompt([5, 6, 7], 16, {"temperature": 1, "seed": 7}))
        structure = {"structured_outputs": {"json": SCHEMA}}
        structured = post(client, Prompt([8, 9], 200, structure))
        scored = post(client, Prompt([3, 4], 8, {"logprobs": 3, "ignore_eos": True}))
        asyncio.run(leave_in_mid_stream(server))
        after = asyncio.run(stream_all(server.base_url, server.model, prompts[:1]))
        statuses = {
            "health": client.get("/health").status_code,
            "metrics": client.get("/metrics").status_code,
            "models": client.get("/v1/models").status_code,
            "unknown": client.post("/v1/completions", json={"model": "none"}).status_code,
        }
    return Observed(
        streams=streams,
        sampled=sampled["choices"][0]["token_ids"],
        structured=structured["choices"][0]["token_ids"],
        logprobs=scored["choices"][0]["logprobs"]["top_logprobs"],
        after_aborts=after[0],
        statuses=statuses,
        log=server.log,
    )


def post(client: httpx.Client, prompt: Prompt) -> dict[str, Any]:
    body = {**prompt.body("tiny"), "stream": False}
    del body["stream_options"]
    answer = client.post("/v1/completions", json=body)
    assert answer.is_success, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def leave_in_mid_stream(server: Server) -> None:
    """Begin streams that would be long, and leave them after a few tokens."""
    prompt = Prompt([1, 2, 3], 900, {"ignore_eos": True})
    async with httpx.AsyncClient(base_url=server.base_url, timeout=60) as client:
        for _ in range(4):
            chunks = stream_chunks(client, server.model, prompt)
            for _ in range(3):
                await anext(chunks)
            await chunks.aclose()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", name="stock")
def _stock(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Observed:
    """Observe vLLM's Python front end and vLLM's scheduler."""
    with serve(model_dir, tmp_path_factory.mktemp("stock") / "log", is_preloaded=True) as server:
        return observe(server)


@pytest.fixture(scope="module", name="ours")
def _ours(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Observed:
    """Observe vLLM's Rust front end and our scheduler."""
    log_path = tmp_path_factory.mktemp("ours") / "log"
    variables = {**vllm_rs.variables(), **STRICT}
    with serve(
        model_dir, log_path, scheduler="sparksched", is_preloaded=True, environment=variables
    ) as server:
        observed = observe(server)
        assert server.runs_sparksched
        return observed


def outcomes(streams: list[Completion]) -> list[Any]:
    # Not the text: the two front ends write bytes that are no text in different ways.
    return [
        (it.token_ids, it.finish_reason, it.usage and it.usage["completion_tokens"])
        for it in streams
    ]


def test_streams_are_equal_token_for_token(stock: Observed, ours: Observed) -> None:
    assert SENDS in ours.log
    assert outcomes(ours.streams) == outcomes(stock.streams)
    assert len({tuple(it.token_ids) for it in ours.streams}) == NUM_REQUESTS


def test_what_few_requests_want_is_equal(stock: Observed, ours: Observed) -> None:
    assert ours.sampled == stock.sampled
    assert ours.structured == stock.structured
    assert [sorted(it.values()) for it in ours.logprobs] == [
        pytest.approx(sorted(it.values()), abs=1e-3) for it in stock.logprobs
    ]


def test_the_server_goes_on_after_aborts(stock: Observed, ours: Observed) -> None:
    assert ours.after_aborts.token_ids == stock.after_aborts.token_ids
    assert ours.statuses == stock.statuses


def test_vllms_own_scheduler_after_a_fallback(
    model_dir: Path, tmp_path: Path, ours: Observed
) -> None:
    """The engine sends what vLLM's scheduler decides the same way."""
    with serve(
        model_dir,
        tmp_path / "log",
        scheduler="sparksched",
        is_preloaded=True,
        arguments=("--scheduler-cls=vllm.v1.core.sched.scheduler.Scheduler",),
        environment=vllm_rs.variables(),
    ) as server:
        prompts = mixed_prompts(8, vocab_size=VOCAB_SIZE)
        streams = asyncio.run(stream_all(server.base_url, server.model, prompts))
        assert not server.runs_sparksched
        assert SENDS in server.log
    expected = mixed_prompts(NUM_REQUESTS, vocab_size=VOCAB_SIZE)[:8]
    assert prompts == expected
    assert outcomes(streams) == outcomes(ours.streams[:8])


def test_two_engines_and_a_chat_template(tmp_path: Path) -> None:
    """Both engines serve; a conversation goes through its template."""
    model = tiny_llama.write_model(tmp_path / "model")
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    (tmp_path / "chat.jinja").write_text(template)
    with serve(
        model,
        tmp_path / "log",
        scheduler="sparksched",
        is_preloaded=True,
        arguments=("--data-parallel-size=2", f"--chat-template={tmp_path}/chat.jinja"),
        environment={**vllm_rs.variables(), **STRICT},
    ) as server:
        prompts = mixed_prompts(NUM_REQUESTS, vocab_size=VOCAB_SIZE)
        streams = asyncio.run(stream_all(server.base_url, server.model, prompts))
        assert all(it.finish_reason in ("length", "stop") for it in streams)
        body = {
            "model": server.model,
            "messages": [{"role": "user", "content": "a"}],
            "max_tokens": 4,
        }
        answer = httpx.post(f"{server.base_url}/v1/chat/completions", json=body, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] > 0, answer.text
        assert server.log.count(SENDS) == 2


def is_front_end(pid: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/comm").read_text().strip() == "vllm-rs"
    return False


@pytest.mark.parametrize("killed", ["launcher", pytest.param("front end", marks=pytest.mark.full)])
def test_nothing_outlives_a_kill(killed: str, model_dir: Path, tmp_path: Path) -> None:
    """The engine ends by itself, its worker with it.

    Without its launcher the front end goes on: it answers that its engine is dead.
    """
    variables = {**vllm_rs.variables(), **STRICT}
    with serve(
        model_dir,
        tmp_path / "log",
        scheduler="sparksched",
        is_preloaded=True,
        environment=variables,
    ) as server:
        front_end = next(filter(is_front_end, processes_of(server)))
        engine = process_named(server, "EngineCore")
        pid = server.process.pid if killed == "launcher" else front_end
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: engine not in processes_of(server), "for the engine's end")
        if killed == "launcher":
            # It learns of the death, and that the engine's process is gone, in either order.
            wait_until(lambda: health(server) == 503, "for the front end to know")
            os.kill(front_end, signal.SIGKILL)
        wait_until(lambda: not processes_of(server), "for the end of each process")
