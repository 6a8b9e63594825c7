"""Kernels that are compiled while requests wait: counted and waited for."""

import sys
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bench.serving import compilations, engine_probe, measure
from bench.serving.compilations import Compilations
from bench.serving.workload import Workload


class Knobs:
    """Triton's, of a Triton that compiles nothing."""

    def __init__(self) -> None:
        self.listener: Any = None

    def compile(self, name: str, is_on_disk: bool = False) -> None:
        if self.listener:
            self.listener(src=name, cache_hit=is_on_disk)


# ---- in a worker ----


def test_what_is_compiled_is_counted_once_and_what_is_on_the_disk_is_not() -> None:
    knobs = Knobs()
    found = Compilations(knobs)
    assert found.take() == 0
    knobs.compile("_matmul")
    knobs.compile("_sum", is_on_disk=True)
    knobs.compile("_topk")
    assert found.take() == 2
    assert found.take() == 0


def test_whoever_else_listens_to_triton_still_does() -> None:
    knobs, called = Knobs(), []
    knobs.listener = lambda **about: called.append(about)
    Compilations(knobs)
    knobs.compile("_matmul")
    assert called == [{"src": "_matmul", "cache_hit": False}]


def test_workers_count_what_they_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    knobs = Knobs()
    monkeypatch.setattr(triton.knobs, "compilation", knobs)
    module: Any = ModuleType("worker_base")
    module.WorkerBase = type("WorkerBase", (), {})
    compilations.install(module)
    worker = module.WorkerBase()
    assert worker.bench_take_compiled() == 0
    knobs.compile("_matmul")
    assert worker.bench_take_compiled() == 1


def test_without_triton_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert compilations._take_compiled(SimpleNamespace()) is None


def test_an_engine_asks_all_its_workers() -> None:
    executor = SimpleNamespace(collective_rpc=lambda method: [None, 1])
    engine = SimpleNamespace(model_executor=executor)
    assert engine_probe._take_compiled(engine) == "[null, 1]"


# ---- in a round ----


class Fake:
    """A server, and what drives it: in each of the first bursts kernels are compiled."""

    def __init__(self, compiling: int, is_known: bool = True) -> None:
        self.compiling, self.is_known = compiling, is_known
        self.prompts: list[Any] = []
        self.left = 1
        self.remote = self
        self.remotes = [self]
        self.start = SimpleNamespace(layout=SimpleNamespace(num_stages=1))

    def settle(self) -> None:
        pass

    def call(self, command: str) -> list[int | None]:
        assert command == "take_compiled"
        found, self.left = self.left, 0
        return [found if self.is_known else None]

    def run(self, workload: Workload, on_event: Any) -> None:
        self.prompts.append(workload.requests()[0].prompt)
        if len(self.prompts) <= self.compiling:
            self.left += 1


@pytest.mark.parametrize(
    ("fake", "bursts"),
    [
        (Fake(0), 1),
        (Fake(2), 3),
        (Fake(100), measure.MOST_WARM_UPS),
        (Fake(100, is_known=False), 1),
    ],
)
def test_requests_warm_up_until_nothing_is_compiled(fake: Any, bursts: int) -> None:
    workload = Workload(2, 100, (8, 8), (64, 64))
    measure.warm_up(fake, partial(measure._send_shortened, fake, fake, workload, "http, all"))
    assert len(fake.prompts) == bursts
    assert len({tuple(it) for it in fake.prompts}) == bursts
