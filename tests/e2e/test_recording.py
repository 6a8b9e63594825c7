"""A recorded real server: what it was given replays to the same decisions on both schedulers."""

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sparksched.record.events import Arrive
from sparksched.record.read import Trace

from testkit.server import serve
from testkit.streaming import mixed_prompts, stream_all
from testkit.tiny_gpt_oss import write_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

VOCAB_SIZE = 400
# Few enough for preemptions.
ARGUMENTS = ("--num-gpu-blocks-override=52",)


def _wait_until_written(trace: Path, num_requests: int) -> None:
    """Wait for the lines that is written within a second."""
    deadline = time.monotonic() + 30
    while sum(isinstance(it, Arrive) for it in Trace(trace).events()) < num_requests:
        assert time.monotonic() < deadline, "the last requests are not written"
        time.sleep(0.2)


def test_a_server(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    environment = {
        "SPARKSCHED_STRICT": "1",
        "SPARKSCHED_RECORD": str(trace),
    }
    model = write_model(tmp_path / "model")
    with serve(
        model,
        tmp_path / "server.log",
        scheduler="sparksched",
        is_preloaded=True,
        arguments=ARGUMENTS,
        environment=environment,
    ) as server:
        prompts = mixed_prompts(24, vocab_size=VOCAB_SIZE)
        asyncio.run(stream_all(server.base_url, server.model, prompts))
        # The same prompts again: their blocks are found.
        asyncio.run(stream_all(server.base_url, server.model, prompts))
        assert f"recording the scheduler to {trace}" in server.log
        server.wait_until_idle()
        _wait_until_written(trace, 2 * len(prompts))
    answer = json.loads(
        subprocess.run(
            [sys.executable, "-m", "sparksched.cli", "replay", "--json", trace],
            stdout=subprocess.PIPE,
            check=True,
        ).stdout
    )
    # Signalled are all of its processes, and the first that ends has the others killed.
    missing = answer["trace"]["missing"]
    assert missing is None or missing.startswith(f"{trace} ")
    assert answer["trace"]["requests"] >= 48
    assert answer["trace"]["steps"] > 50
    for replay in answer["replays"]:
        assert replay["mismatch"] is None
        assert replay["equal_steps"] == answer["trace"]["steps"]
