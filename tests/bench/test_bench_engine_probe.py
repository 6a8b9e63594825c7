"""What the probe notes in an engine that is made up."""

import json
import os
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed

from bench.serving import engine_probe


class Executor:
    """Agrees with its peers on each batch, as vLLM's does."""

    def execute_model(self) -> None:
        torch.distributed.all_reduce(torch.zeros(2))

    def sample_tokens(self) -> Any:
        return SimpleNamespace(result=take_tokens)


class Scheduler:
    """Schedules one request less in each step."""

    def __init__(self) -> None:
        self.num_requests = 3

    def schedule(self, throttle_prefills: bool) -> Any:
        self.num_requests -= 1
        ids = dict.fromkeys(map(str, range(self.num_requests)), 2)
        return SimpleNamespace(
            num_scheduled_tokens=ids, total_num_scheduled_tokens=2 * self.num_requests
        )


def engine_of(data_parallel_size: int) -> Any:
    parallel = SimpleNamespace(data_parallel_size=data_parallel_size)
    return SimpleNamespace(
        scheduler=Scheduler(),
        model_executor=Executor(),
        vllm_config=SimpleNamespace(parallel_config=parallel),
    )


@pytest.fixture
def group(tmp_path: Any) -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def take_tokens() -> str:
    """Return what a future has, after some time."""
    spin(0.03)
    return "tokens"


def waiting(engine: Any, wait: Callable[[], None]) -> tuple[int, int]:
    """Return for how long the engine has waited in this, and with what CPU time, in ns."""
    engine_probe._start(engine)
    engine.scheduler.schedule(False)
    wait()
    engine.scheduler.schedule(False)
    first, second = json.loads(engine_probe._stop(engine))
    return second[4] - first[4], second[5] - first[5]


@pytest.mark.usefixtures("group")
def test_agreeing_with_peers_is_waiting() -> None:
    engine = engine_of(data_parallel_size=2)
    reduce = torch.distributed.all_reduce

    def agree() -> None:
        engine.model_executor.execute_model()
        torch.distributed.all_reduce(torch.zeros(1))

    assert waiting(engine, agree)[0] > 0
    assert torch.distributed.all_reduce is reduce
    assert "execute_model" not in vars(engine.model_executor)


@pytest.mark.usefixtures("group")
def test_one_engine_alone_has_no_peers() -> None:
    engine = engine_of(data_parallel_size=1)
    assert waiting(engine, lambda: torch.distributed.all_reduce(torch.zeros(1))) == (0, 0)


def test_steps_are_noted_with_the_loop_s_cpu_time() -> None:
    engine = engine_of(data_parallel_size=1)
    engine_probe._start(engine)
    engine.scheduler.schedule(False)
    spin(0.03)
    engine.scheduler.schedule(False)
    first, second = json.loads(engine_probe._stop(engine))
    assert (first[:2], second[:2]) == ([2, 4], [1, 2])
    assert second[2] > first[2]
    assert second[3] - first[3] >= 30_000_000


def test_waiting_for_what_was_launched_is_timed() -> None:
    engine = engine_of(data_parallel_size=1)

    def wait() -> None:
        spin(0.03)
        assert engine.model_executor.sample_tokens().result() == "tokens"

    waited_ns, cpu_ns = waiting(engine, wait)
    assert waited_ns > 29_000_000
    assert 29_000_000 < cpu_ns < 60_000_000


def spin(cpu_s: float) -> None:
    until = time.thread_time() + cpu_s
    while time.thread_time() < until:
        os.getpid()
