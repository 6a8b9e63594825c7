"""A run of `bench.serving.mixed`: what fails is told and left out, and a start ends in time."""

import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.serving import mixed
from bench.serving.models import QWEN2_1_5B, write_shape
from bench.serving.server import OURS, ServerError, Start
from bench.serving.streams import StreamLog

SMALL = QWEN2_1_5B | {"vocab_size": 200, "eos_token_id": 199, "bos_token_id": 199}
TIMES = {"p50": 1.0, "p99": 2.0}


class Bench:
    """Requests whose long prompt comes too late."""

    def __init__(self, server: Any, options: Any) -> None: ...

    def mixed(self, streams: int) -> dict[str, Any]:
        # asyncio's says nothing.
        raise mixed._FailedError("streams ended") if streams == 16 else TimeoutError

    def sustained_rate(self) -> float:
        return 2.0

    def ordinary(self, part: float, sustained: float) -> dict[str, Any]:
        found = {"requests_per_s": part * sustained, "ttft_ms": TIMES, "gap_ms": TIMES}
        return {"rounds": [found]}


def test_what_fails_is_told_and_the_rest_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    deadlines, memory = [], []

    @contextmanager
    def serve(start: Start, work_dir: Path, deadline: float = math.inf) -> Iterator[Any]:
        deadlines.append(deadline)
        memory.append(start.kv_cache_gib)
        if start.scheduler == OURS:
            raise ServerError("it doesn't come up")
        yield SimpleNamespace(kv_cache_gib=start.kv_cache_gib or 3.05)

    write_shape(tmp_path / "small", SMALL)
    path = tmp_path / "x.json"
    options = (
        "--sides",
        "vllm,sparksched",
        "--streams",
        "16,64",
        "--rates",
        "0.5",
        "--minutes",
        "9",
        "--json",
        path,
    )
    arguments = ["mixed", "--model", tmp_path / "small", "--work-dir", tmp_path, *options]
    monkeypatch.setattr(sys, "argv", list(map(str, arguments)))
    monkeypatch.setattr(mixed, "serve", serve)
    monkeypatch.setattr(mixed, "_Bench", Bench)
    latest = time.monotonic() + 9 * 60
    assert mixed.main() == 1
    said = capsys.readouterr().err
    assert "failed: vllm, 16 streams: streams ended" in said
    assert "failed: vllm, 64 streams: it takes too long" in said
    assert "failed: sparksched: it doesn't come up" in said
    result = json.loads(path.read_text())
    assert result["mixed"] == []
    (ordinary,) = result["ordinary"]
    assert (ordinary["side"], ordinary["rounds"][0]["requests_per_s"]) == ("vllm", 1.0)
    assert memory == [None, 3.05], "the first server's share is the others'"
    assert all(latest <= it <= time.monotonic() + 9 * 60 for it in deadlines)
    mixed.main()
    assert len(json.loads(path.read_text())["runs"]) == 1, "nothing new was measured"
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--rates", "0.5,0.9"])
    mixed.main()
    assert len(json.loads(path.read_text())["runs"]) == 2


def test_a_compiler_holds_up_all_and_a_full_cache_one() -> None:
    usual = [0.1 * at for at in range(100)]
    preempted = [it for it in usual if not 3.0 < it < 6.0]
    logs = [log_of(0.0, usual), log_of(0.05, preempted)]
    assert mixed._silence_ms(logs) == pytest.approx(100)
    held_up = [it for it in usual if not 4.0 < it < 5.5]
    assert mixed._silence_ms([log_of(0.0, held_up), logs[1]]) == pytest.approx(1500)
    # Nobody waited between these.
    assert mixed._silence_ms([log_of(0.0, [0.2]), log_of(7.0, [7.5])]) == pytest.approx(500)
    # Before the first output, and whoever has the next one.
    assert mixed._silence_ms([log_of(0.0, [5.0, 5.1]), log_of(4.9, [5.2])]) == pytest.approx(5000)
    assert mixed._silence_ms([log_of(0.9, [1.0, 7.1]), log_of(6.9, [7.0])]) == pytest.approx(6000)


def log_of(sent_at: float, times: list[float]) -> StreamLog:
    return StreamLog(sent_at, np.array(times), np.ones(len(times), np.int64))


def test_what_streams_get_before_and_beside_a_long_prompt() -> None:
    streams = [log_of(0.0, [0.1 * at for at in range(1, 31)]) for _ in range(2)]
    found = mixed._evaluate(streams, log_of(1.55, [2.05]), [], 100)
    assert found["before_tokens_per_s"] == pytest.approx(10)
    assert found["stream_tokens_per_s"] == pytest.approx(10)
    held_up = [log_of(0.0, [0.1 * at for at in range(1, 16)]) for _ in range(2)]
    found = mixed._evaluate(held_up, log_of(1.55, [2.05]), [], 100)
    assert found["before_tokens_per_s"] == pytest.approx(10)
    assert found["stream_tokens_per_s"] == 0
