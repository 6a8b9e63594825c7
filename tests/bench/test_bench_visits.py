"""In which order a server's visit measures, when it stops, and what is left for the next run."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.progress import Progress
from bench.serving import benchmark as module
from bench.serving import server as server_module
from bench.serving.benchmark import Benchmark, OutOfTimeError, Subject
from bench.serving.evaluate import NothingMeasuredError
from bench.serving.layouts import Layout
from bench.serving.measure import QUICK_EFFORT
from bench.serving.models import SHAPES, Model
from bench.serving.plan import Plan
from bench.serving.remote import RemoteError
from bench.serving.server import ServerError, Start
from bench.serving.store import Store
from testkit.server import Server as Launched

MODEL = Model("gpt-oss-20b", Path("/nowhere"), SHAPES["gpt-oss-20b"], has_dummy_weights=True)
NAME = "gpt-oss-20b, DP 2"


class Visits:
    """Servers that are made up, and a clock that goes on by what is measured."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self.now = 1000.0
        self.begun: list[str] = []
        self.memory: list[float | None] = []
        self.start_s, self.cell_s = 100.0, 40.0
        self.cores = "all"
        self.fails: Exception | None = None
        self.start_fails: Exception | None = None
        self.is_healthy = True
        for name, replacement in (
            ("running_loaders", lambda streams, cores: nullcontext([])),
            ("serve", self.serve),
            ("prepare", lambda source, work_dir: MODEL),
            ("measure_in_turn", self.measure_in_turn),
            ("measure_same_streams", self.measure_same_streams),
        ):
            monkeypatch.setattr(module, name, replacement)
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))

    @contextmanager
    def serve(self, start: Start, work_dir: Path, deadline: float) -> Iterator[Any]:
        self.begun.append(f"start {start.scheduler}")
        self.memory.append(start.kv_cache_gib)
        self.now += self.start_s
        if self.start_fails is not None:
            raise self.start_fails
        described = {"engines": [{}] * 2, "transport": "rings", "num_api_servers": 2}
        yield SimpleNamespace(
            start=start,
            start_s=self.start_s,
            kv_cache_gib=start.kv_cache_gib or 22.6,
            described=described,
            remotes=[None, None],
            is_healthy=lambda: self.is_healthy,
            launched=SimpleNamespace(log_path="its log"),
            confine=lambda cores: None,
        )

    def measure_in_turn(self, subjects: Any, workload: Any, *rest: Any) -> Any:
        self.begun.append(f"cell {workload.num_requests}")
        self.now += self.cell_s
        if self.fails is not None:
            raise self.fails
        return [{"rounds": []} for _ in subjects]

    def measure_same_streams(self, *_: Any) -> Any:
        self.begun.append("streams")
        return {"digests": [["a"], ["a"]]}

    def run(self, minutes: float = 1000.0) -> None:
        """Run the benchmark as a process of its own would: with what the file says."""
        plan = Plan(
            models=(NAME,),
            schedulers=("stock", "sparksched"),
            modes=("async",),
            cores=(self.cores,),
            concurrencies=(4, 8),
            drivers=("asyncllm",),
            compares_streams=True,
        )
        self.begun.clear()
        Benchmark(
            plan=plan,
            subjects={NAME: Subject("gpt-oss-20b", Layout.named("dp2"))},
            effort=QUICK_EFFORT,
            store=Store(self.path, {"commit": "x"}),
            progress=Progress(4),
            work_dir=self.path.parent,
            gpu=None,
            serve_arguments="",
            deadline=self.now + 60 * minutes,
        ).run()

    def cells(self) -> list[tuple[str, int]]:
        cells = json.loads(self.path.read_text())["cells"]
        return [(it["scheduler"], it["concurrency"]) for it in cells if "error" not in it]


@pytest.fixture
def visits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Visits:
    return Visits(tmp_path / "x.json", monkeypatch)


def test_tokens_are_compared_before_the_cells(visits: Visits) -> None:
    visits.run()
    visit = ["streams", "cell 4", "cell 8"]
    assert visits.begun == ["start stock", *visit, "start sparksched", *visit]
    visits.run()
    assert visits.begun == []


def test_a_cell_that_would_end_too_late_is_left_for_the_next_run(visits: Visits) -> None:
    visits.run(minutes=1000)
    done = visits.cells()
    Path(visits.path).unlink()
    # Nothing is known of the first cells. A start and two cells take 180 s, and so on the other
    # side: for its second cell 30 s are left, and it takes 40.
    with pytest.raises(OutOfTimeError):
        visits.run(minutes=350 / 60)
    assert visits.cells() == done[:3]
    visits.memory.clear()
    visits.run(minutes=1000)
    assert visits.begun == ["start sparksched", "cell 8"]
    assert visits.memory == [22.6], "as much for the KV cache as vLLM's had, in an earlier run"
    assert sorted(visits.cells()) == sorted(done)


def test_no_server_is_started_that_would_not_come_to_a_cell(visits: Visits) -> None:
    with pytest.raises(OutOfTimeError):
        visits.run(minutes=330 / 60)
    assert visits.begun[-1] == "cell 8"
    assert visits.cells() == [("stock", 4), ("stock", 8)]


def test_a_run_that_is_killed_in_a_cell_leaves_those_before_it(visits: Visits) -> None:
    visits.fails = KeyboardInterrupt()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        visits.run()
    assert visits.cells() == []
    assert json.loads(visits.path.read_text())["streams"]
    visits.fails = None
    visits.run()
    assert visits.begun[:3] == ["start stock", "cell 4", "cell 8"]


def test_a_comparison_that_fails_leaves_the_cells_alone(
    visits: Visits, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise RemoteError("no answer")

    monkeypatch.setattr(module, "measure_same_streams", fail)
    visits.run()
    assert len(visits.cells()) == 4
    assert all("error" in it for it in json.loads(visits.path.read_text())["streams"])


@pytest.mark.parametrize(
    ("attribute", "reason"),
    [
        ("fails", NothingMeasuredError("never together")),
        ("start_fails", ServerError("not healthy")),
        ("cores", "4096"),
    ],
    ids=["a cell", "a server", "too few processors"],
)
def test_a_failure_is_told_of_the_lengths_that_were_tried(
    visits: Visits, attribute: str, reason: Any
) -> None:
    """So that a row of the other scheduler's stands beside it."""
    setattr(visits, attribute, reason)
    visits.run()
    cells = json.loads(visits.path.read_text())["cells"]
    assert [bool(it["error"]) for it in cells] == [True] * 4
    assert [it["prompt_tokens"] for it in cells] == [[128, 128]] * 4
    assert [it["output_tokens"] for it in cells] == [[768, 768]] * 4


def test_why_a_server_died_is_told_of_all_its_cells(visits: Visits) -> None:
    """What a driver saw, and what the log says."""
    visits.fails, visits.is_healthy = RemoteError("no answer"), False
    visits.run()
    cells = json.loads(visits.path.read_text())["cells"]
    assert [it["error"] for it in cells] == [
        "no answer; the server is gone: its log",
    ] * 4


# ---- servers ----


def arguments(layout: str, **changes: Any) -> list[str]:
    given = Start(MODEL, "sparksched", "async", 64, 2048, True, Layout.named(layout))
    return server_module.arguments_of(replace(given, **changes))


@pytest.mark.parametrize("layout", ["1", "tp2", "dp2"])
def test_steps_are_as_large_as_vllm_has_them_without_stages(layout: str) -> None:
    assert not any("batched-tokens" in it for it in arguments(layout))


def test_prompts_of_many_requests_take_several_steps_with_stages() -> None:
    found = arguments("pp2")
    assert "--max-num-batched-tokens=2048" in found
    assert "--pipeline-parallel-size=2" in found


def test_a_server_gets_the_memory_that_the_one_before_it_had(tmp_path: Path) -> None:
    assert not any("kv-cache-memory" in it for it in arguments("1"))
    assert f"--kv-cache-memory-bytes={3 * 2**30}" in arguments("1", kv_cache_gib=3.0)
    log = tmp_path / "serve.log"
    log.write_text("Available KV cache memory: 22.61 GiB\nAvailable KV cache memory: 22.5 GiB\n")
    first = Start(MODEL, "stock", "async", 64, 2048, True)
    process: Any = SimpleNamespace(pid=1)
    server = server_module.Server(first, Launched("http://127.0.0.1:9", log, process), 1.0)
    assert server.kv_cache_gib == 22.5, "of the GPU that has the least"


def launched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log: str, **changes: Any
) -> dict[str, Any]:
    """Start a server whose log says this; return what it was started with."""
    found: dict[str, Any] = {}

    @contextmanager
    def launch(directory: Path, log_path: Path, **given: Any) -> Iterator[Any]:
        found.update(given)
        yield SimpleNamespace(runs_sparksched="in Rust" in log, log_path=log_path)

    monkeypatch.setattr(server_module, "launch", launch)
    start = Start(MODEL, "sparksched", "async", 64, 2048, True, front_end="rust")
    with server_module.serve(replace(start, **changes), tmp_path):
        return found


def test_a_front_end_in_rust_has_no_probe_and_its_log_says_who_schedules(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = launched(monkeypatch, tmp_path, "scheduling in Rust")
    assert found["scheduler"] == "sparksched"
    assert found["environment"]["VLLM_USE_RUST_FRONTEND"] == "1"
    assert "SPARKSCHED_BENCH_CONTROL" not in found["environment"]
    assert not found["is_on_cpu"]
    for log, scheduler in (("", "sparksched"), ("scheduling in Rust", "stock")):
        with pytest.raises(ServerError, match="doesn't run"):
            launched(monkeypatch, tmp_path, log, scheduler=scheduler)


def test_an_api_server_that_doesn_t_listen_in_time_is_given_up() -> None:
    process = SimpleNamespace(poll=lambda: None)
    server: Any = SimpleNamespace(launched=SimpleNamespace(process=process, log_path="its log"))
    with pytest.raises(ServerError, match="doesn't listen to the benchmark; see its log"):
        server_module._wait_until(lambda: False, server, time.monotonic() - 1)
