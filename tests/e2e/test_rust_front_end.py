"""vLLM's Rust front end before an engine of ours, in servers with real models.

`test_storms.py` compares what it answers. `make test` fetches it: vLLM's CPU build lacks it.
"""

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from testkit import vllm_rs
from testkit.server import serve
from testkit.streaming import mixed_prompts, stream_all
from testkit.tiny_models import write_model

from .test_rings import health, process_named, processes_of, wait_until
from .test_serve import VOCAB_SIZE

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(vllm_rs.binary() is None, reason="make test fetches it"),
]

PROMPTS = mixed_prompts(16, vocab_size=VOCAB_SIZE)
STRICT = {"SPARKSCHED_STRICT": "1"}
SENDS = "outputs go straight to API server 0"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.mark.full
def test_vllms_own_scheduler_after_a_fallback(model_dir: Path, tmp_path: Path) -> None:
    """The engine sends what vLLM's scheduler decides the same way."""
    seen = []
    for fallback in ([], ["--scheduler-cls=vllm.v1.core.sched.scheduler.Scheduler"]):
        with serve(
            model_dir,
            tmp_path / f"log-{len(fallback)}",
            scheduler="sparksched",
            is_preloaded=True,
            arguments=fallback,
            environment=vllm_rs.variables(),
        ) as server:
            streams = asyncio.run(stream_all(server.base_url, server.model, PROMPTS))
            assert server.runs_sparksched == (not fallback)
            assert SENDS in server.log
        # Not the text: Rust's and Python's front ends write bytes that are no text differently.
        seen.append([(it.token_ids, it.finish_reason) for it in streams])
    assert seen[0] == seen[1]
    assert len({tuple(tokens) for tokens, _ in seen[0]}) == len(PROMPTS)


def test_two_engines_and_a_chat_template(tmp_path: Path) -> None:
    """Both engines serve; a conversation goes through its template."""
    model = write_model(tmp_path / "model", "llama")
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
        streams = asyncio.run(stream_all(server.base_url, server.model, PROMPTS))
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
