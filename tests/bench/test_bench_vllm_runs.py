"""A run of `bench.serving.vllm_bench`: what it has time for, and what it makes of failures."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.progress import Progress
from bench.serving import vllm_client, vllm_offline, vllm_runs
from bench.serving.benchmark import MAX_REASON, OutOfTimeError, reason_of
from bench.serving.models import QWEN2_1_5B, write_shape
from bench.serving.server import Server, ServerError, Start
from bench.serving.store import Store
from bench.serving.vllm_cases import CaseKey, Plan, Wanted
from bench.serving.vllm_client import ClientError, Order
from bench.serving.vllm_runs import VllmBench
from testkit.server import Server as Launched

Row = dict[str, Any]
START_S, CASE_S = 100.0, 50.0
SMALL = QWEN2_1_5B | {"vocab_size": 200, "eos_token_id": 199, "bos_token_id": 199}
LENGTHS = ("64/32", "64/33", "64/34", "64/35")


class Simulated:
    """Servers and a client that take their time by a clock that nothing else moves."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.started: list[str] = []
        self.memory: list[float | None] = []
        self.failure: str | None = None
        self.folder = folder
        self.log = folder / "serve.log"
        self.log.write_text("INFO up\nERROR ValueError: no tokens\nINFO down\n")
        write_shape(folder / "small", SMALL)
        monkeypatch.setattr(vllm_runs, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(vllm_runs, "serve", self.serve)
        monkeypatch.setattr(vllm_client, "run", self.send)
        monkeypatch.setattr(vllm_offline, "run", self.command)

    @contextmanager
    def serve(self, start: Start, work_dir: Path, deadline: float) -> Iterator[Server]:
        self.now += START_S
        self.started.append(start.scheduler)
        self.memory.append(start.kv_cache_gib)
        process: Any = SimpleNamespace(pid=1)
        yield Server(start, Launched("http://127.0.0.1:9", self.log, process), START_S)

    def send(self, order: Order, *more: Any) -> Row:
        if self.failure is not None:
            raise ClientError(self.failure)
        is_warm_up = order.lengths.output_tokens == vllm_runs.WARM_UP_TOKENS
        self.now += 0.0 if is_warm_up else CASE_S
        return {"requests_per_s": 2.0}

    def command(self, key: CaseKey, *more: Any) -> Row:
        self.started.append(key.server.scheduler)
        if self.failure is not None:
            raise ClientError(self.failure)
        self.now += CASE_S
        return {"requests_per_s": 2.0}

    def run(self, seconds: float, *offline: str) -> list[Row]:
        """Measure what there is time for, and return what is in the file then."""
        wanted = tuple(Wanted.named(it, (1,), ()) for it in LENGTHS)
        front_ends = () if offline else ("rust",)
        plan = Plan(
            "small",
            "sync",
            ("stock", "sparksched"),
            front_ends,
            wanted,
            offline=offline,
            client="rust",
        )
        store = Store(self.folder / "x.json", {}, "vllm_bench")
        bench = VllmBench(
            plans={str(self.folder / "small"): plan},
            store=store,
            progress=Progress(8),
            work_dir=self.folder,
            has_gpu=False,
            deadline=self.now + seconds,
        )
        with suppress(OutOfTimeError):
            bench.run()
        cells: list[Row] = store.result["cells"]
        return cells


@pytest.fixture
def simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Simulated:
    return Simulated(tmp_path, monkeypatch)


def test_a_case_is_measured_with_both_schedulers_or_left_for_the_next_run(
    simulated: Simulated,
) -> None:
    # There is time for the fourth with vLLM, but not with sparksched as well.
    seconds = 2 * START_S + 8 * CASE_S - 1
    cells = simulated.run(seconds)
    measured = [(it["scheduler"], it["lengths"]) for it in cells]
    assert measured == [(side, it) for side in ("stock", "sparksched") for it in LENGTHS[:3]]
    assert simulated.now <= seconds
    assert [it["lengths"] for it in simulated.run(seconds)[6:]] == [LENGTHS[3]] * 2
    assert simulated.started == ["stock", "sparksched"] * 2


def test_both_servers_have_as_much_memory_for_the_kv_cache(simulated: Simulated) -> None:
    simulated.log.write_text("Available KV cache memory: 3.05 GiB\n")
    simulated.run(3600.0)
    assert simulated.memory == [None, 3.05]


def test_a_command_without_a_server_is_run_with_both_schedulers_or_left_for_the_next_run(
    simulated: Simulated,
) -> None:
    # There is time for the fourth with vLLM's scheduler, but not with ours as well.
    seconds = 8 * CASE_S - 1
    cells = simulated.run(seconds, "throughput")
    measured = [(it["lengths"], it["scheduler"]) for it in cells]
    assert measured == [(it, side) for it in LENGTHS[:3] for side in ("stock", "sparksched")]
    assert [it["lengths"] for it in simulated.run(seconds, "throughput")[6:]] == [LENGTHS[3]] * 2


def test_where_vllms_command_fails_ours_is_not_run(simulated: Simulated) -> None:
    simulated.failure = "vllm bench throughput ended with status 1"
    cells = simulated.run(3600.0, "throughput")
    assert simulated.started == ["stock"] * len(LENGTHS)
    assert [it["error"] for it in cells] == [simulated.failure] * len(LENGTHS)


def test_the_cause_stands_first_in_what_is_kept_of_a_long_log() -> None:
    frames = MAX_REASON * "x"
    log = f"Traceback\n{frames}\nValueError: too long\n{frames}\nRuntimeError: it failed"
    kept = reason_of(ServerError(f"vllm serve ended with status 1:\n{log}"))
    assert kept.startswith("ValueError: too long\nvllm serve ended with status 1:\n")
    assert len(kept) == MAX_REASON


def test_after_a_warm_up_that_fails_nothing_else_of_the_model_is_started(
    simulated: Simulated,
) -> None:
    simulated.failure = "8 of 8 requests failed: no valid chunk"
    cells = simulated.run(3600.0)
    assert simulated.started == ["stock"]
    # with the server's reason, as the client knows none
    reason = "8 of 8 requests failed: no valid chunk; the server: ERROR ValueError: no tokens"
    assert [it["error"] for it in cells] == [reason] * len(LENGTHS)
