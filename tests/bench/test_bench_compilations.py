"""Kernels that are compiled while requests wait: noted and waited for."""

from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bench.serving import compilations, engine_probe, measure
from bench.serving.compilations import Compilations, evaluate_compiled
from bench.serving.workload import Workload

CLOCK = [10.0, 12.5, 20.0, 20.25]


class Triton:
    """Compiles as Triton does, but nothing."""

    def __init__(self) -> None:
        self.runtime = SimpleNamespace(jit_cache_hook=None, jit_post_compile_hook=None)

    def compile(self, name: str) -> bool:
        """Return whether it was compiled."""
        about = {"key": "k", "fn": SimpleNamespace(name=name), "compile": {}}
        if self.runtime.jit_cache_hook and self.runtime.jit_cache_hook(**about):
            return False
        if self.runtime.jit_post_compile_hook:
            self.runtime.jit_post_compile_hook(**about)
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilations.time, "monotonic", iter(CLOCK).__next__)


# ---- in a worker ----


@pytest.mark.usefixtures("clock")
def test_what_is_compiled_is_noted_once() -> None:
    triton = Triton()
    found = Compilations(triton.runtime)
    assert found.take() == []
    assert triton.compile("_matmul")
    assert triton.compile("_topk")
    assert found.take() == [("_matmul", 2.5), ("_topk", 0.25)]
    assert found.take() == []


def test_whoever_else_is_called_by_triton_still_is() -> None:
    triton, called = Triton(), []
    triton.runtime.jit_cache_hook = lambda **about: called.append(("before", about["fn"].name))
    triton.runtime.jit_post_compile_hook = lambda **about: called.append(("after", about["key"]))
    Compilations(triton.runtime)
    assert triton.compile("_matmul")
    assert called == [("before", "_matmul"), ("after", "k")]


def test_what_another_hook_forbids_is_not_compiled() -> None:
    triton = Triton()
    triton.runtime.jit_cache_hook = lambda **about: True
    found = Compilations(triton.runtime)
    assert not triton.compile("_matmul")
    assert found.take() == []


def test_workers_note_what_they_compile_if_vllm_lets_triton_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import triton
    from vllm.utils import jit_monitor

    made_up = Triton()
    monkeypatch.setattr(triton.knobs, "runtime", made_up.runtime)
    module: Any = ModuleType("worker_base")
    module.WorkerBase = type("WorkerBase", (), {})
    compilations.install(module)
    worker = module.WorkerBase()
    monkeypatch.setattr(jit_monitor, "_active", False)
    assert worker.bench_take_compiled() is None
    assert made_up.runtime.jit_cache_hook is None
    monkeypatch.setattr(jit_monitor, "_active", True)
    assert worker.bench_take_compiled() == []
    made_up.compile("_matmul")
    (found,) = worker.bench_take_compiled()
    assert found[0] == "_matmul"


def test_an_engine_asks_all_its_workers() -> None:
    executor = SimpleNamespace(collective_rpc=lambda method: [None, [("_topk", 1.0)]])
    engine = SimpleNamespace(model_executor=executor)
    assert engine_probe._take_compiled(engine) == '[null, [["_topk", 1.0]]]'


def test_the_worker_counts_that_took_longest() -> None:
    quick, slow = [("a", 0.5)] * 3, [("a", 1.0), ("b", 2.0)]
    expected = {"count": 2, "seconds": 3.0, "kernels": {"a": 1, "b": 1}}
    assert evaluate_compiled([quick, None, slow]) == expected
    assert evaluate_compiled([[], None]) == {"count": 0, "seconds": 0, "kernels": {}}
    assert list(evaluate_compiled([None])) == ["missing"]


# ---- in a round ----


class Fake:
    """A server, and what drives it: in each of the first bursts kernels are compiled."""

    def __init__(self, compiling: int, is_known: bool = True) -> None:
        self.compiling, self.is_known = compiling, is_known
        self.prompts: list[Any] = []
        self.left: list[Any] = [("before", 1.0)]
        self.remote = self
        self.remotes = [self]
        self.start = SimpleNamespace(layout=SimpleNamespace(num_stages=1))

    def settle(self) -> None:
        pass

    def call(self, command: str) -> list[Any]:
        assert command == "take_compiled"
        found, self.left = self.left, []
        return [found if self.is_known else None]

    def run(self, workload: Workload, on_event: Any) -> None:
        self.prompts.append(workload.requests()[0].prompt)
        if len(self.prompts) <= self.compiling:
            self.left.append(("_matmul", 1.0))


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
