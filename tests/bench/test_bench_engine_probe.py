"""What the probe notes in an engine that is made up."""

import json
import os
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed

from bench.serving import engine_probe
from bench.serving.phases import split_steps
from bench.serving.timers import PhaseTimer


class Executor:
    """Agrees with its peers on each batch, as vLLM's does."""

    def execute_model(self) -> None:
        torch.distributed.all_reduce(torch.zeros(2))

    def sample_tokens(self) -> None:
        pass

    def execute_dummy_batch(self) -> None:
        torch.distributed.all_reduce(torch.zeros(2))


class Scheduler:
    """Schedules one request less in each step."""

    def __init__(self) -> None:
        self.num_requests = 3

    def schedule(self) -> Any:
        self.num_requests -= 1
        ids = dict.fromkeys(map(str, range(self.num_requests)), 2)
        return SimpleNamespace(
            num_scheduled_tokens=ids, total_num_scheduled_tokens=2 * self.num_requests
        )

    def update_from_output(self) -> None:
        pass


def engine_of(data_parallel_size: int) -> Any:
    parallel = SimpleNamespace(data_parallel_size=data_parallel_size)
    return SimpleNamespace(
        scheduler=Scheduler(),
        model_executor=Executor(),
        output_queue=SimpleNamespace(put_nowait=lambda output: None),
        vllm_config=SimpleNamespace(parallel_config=parallel),
    )


@pytest.fixture
def group(tmp_path: Any) -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_agreeing_with_peers_and_dummy_batches_are_phases_of_their_own() -> None:
    engine = engine_of(data_parallel_size=2)
    reduce = torch.distributed.all_reduce
    engine_probe._start(engine)
    engine.scheduler.schedule()
    engine.model_executor.execute_model()
    engine.model_executor.execute_dummy_batch()
    torch.distributed.all_reduce(torch.zeros(1))
    recorded = json.loads(engine_probe._stop(engine))
    names = [event[0] for event in recorded["events"]]
    assert sorted(names) == sorted(["schedule", "execute", "dummy", "peer", "peer", "peer"])
    (step,) = split_steps(recorded)
    assert step.phase_us["peer"] > 0
    # What lies within a phase counts once.
    first, last = step.events[0][1], max(end for *_, end in step.events)
    assert sum(step.phase_us.values()) <= last - first
    assert torch.distributed.all_reduce is reduce
    assert "execute_dummy_batch" not in vars(engine.model_executor)


@pytest.mark.usefixtures("group")
def test_one_engine_alone_has_no_peers() -> None:
    engine = engine_of(data_parallel_size=1)
    reduce = torch.distributed.all_reduce
    engine_probe._start(engine)
    assert torch.distributed.all_reduce is reduce
    engine_probe._stop(engine)


def test_the_loop_s_cpu_time_is_noted_with_each_step() -> None:
    engine = engine_of(data_parallel_size=1)
    engine_probe._start(engine)
    engine.scheduler.schedule()
    spin(0.03)
    engine.scheduler.schedule()
    recorded = json.loads(engine_probe._stop(engine))
    first, second = recorded["cpu_ns"]
    assert len(recorded["sizes"]) == 2
    assert second - first >= 30_000_000


def spin(cpu_s: float) -> None:
    until = time.thread_time() + cpu_s
    while time.thread_time() < until:
        os.getpid()


def test_cpu_time_of_waiting_within_waiting_counts_once() -> None:
    timer = PhaseTimer()
    dequeue = timer.timed(lambda: spin(0.03), "wait", with_cpu=True)
    encode = timer.timed(dequeue, "execute")  # whose own CPU time isn't asked for
    result = timer.timed(encode, "wait", with_cpu=True)
    result()
    cpu_ns = [event[-1] for event in timer.events]
    assert cpu_ns[0] >= 30_000_000
    assert cpu_ns[1] == 0
    assert cpu_ns[2] < 10_000_000
