"""Pipeline parallelism in vLLM's real `EngineCore` over both schedulers: several batches in flight.

Each scenario is played in all ways in which vLLM schedules stages: see `CADENCES`.
"""

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from vllm.config import vllm as vllm_config_module
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import FinishReason

from testkit.device import continuation
from testkit.pipeline import PipelineExecutor

from .harness import DrivenEngine, Record, Scenario, new_request, run_both
from .test_engine_core import add_long_requests, arriving_in_turn, mixed_requests
from .test_structured_output import (
    COLOURS,
    REGEX,
    SCHEMA,
    choice_grammar,
    structured_request,
    text_of,
)

NUM_STAGES = 2


@dataclass(frozen=True)
class Cadence:
    """How steps follow each other."""

    async_scheduling: bool
    model_runner: int

    def num_batches(self, num_stages: int) -> int:
        """Return how many batches are in flight: asynchronous scheduling is one step ahead."""
        return num_stages + self.async_scheduling

    def __str__(self) -> str:
        return f"{'async' if self.async_scheduling else 'sync'}-v{self.model_runner}"


CADENCES = [Cadence(False, 1), Cadence(False, 2), Cadence(True, 2)]
"""vLLM refuses asynchronous scheduling with Model Runner V1."""


@pytest.fixture(params=CADENCES, ids=str)
def cadence(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Cadence:
    """Return a cadence once vLLM's configuration lets it pass."""
    chosen: Cadence = request.param
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(chosen.model_runner - 1))
    # Model Runner V2 needs Triton for its kernels. There are none here, so only this is waived.
    monkeypatch.setattr(vllm_config_module, "HAS_TRITON", True)
    return chosen


Play = Callable[..., Record]


@pytest.fixture
def play(cadence: Cadence, model_directory: Path) -> Play:
    """Return what plays a scenario over both schedulers and compares all they did."""

    def play(scenario: Scenario, num_stages: int = NUM_STAGES, **settings: Any) -> Record:
        num_batches = cadence.num_batches(num_stages)

        def checked(engine: DrivenEngine) -> None:
            assert engine.core.batch_queue_size == num_batches
            assert engine.core.vllm_config.use_v2_model_runner == (cadence.model_runner == 2)
            scenario(engine)

        record = run_both(
            checked,
            model_directory,
            async_scheduling=cadence.async_scheduling,
            strict=True,
            pipeline_parallel_size=num_stages,
            distributed_executor_backend=PipelineExecutor,
            **settings,
        )
        # The next step fills the queue and waits for its oldest batch.
        assert max(record.batches_in_flight) == num_batches - 1
        if cadence.async_scheduling:
            assert min(distances_of_decodes(record.steps)) == num_stages
        return record

    return play


def distances_of_decodes(steps: list[SchedulerOutput]) -> set[int]:
    """Return how many steps lie between tokens of a request, of any request."""
    distances = set()
    latest: dict[str, int] = {}
    for number, step in enumerate(steps):
        cached = step.scheduled_cached_reqs
        for request_id, num_output_tokens in zip(
            cached.req_ids, cached.num_output_tokens, strict=True
        ):
            if num_output_tokens > 1 and request_id in latest:
                distances.add(number - latest[request_id])
            latest[request_id] = number
    return distances


# ----------------------------------------------------------------------------------------
# Requests that run to their end
# ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_stages", [2, 4])
def test_mixed_requests(num_stages: int, play: Play) -> None:
    record = play(arriving_in_turn, num_stages)
    requests = mixed_requests()
    assert len(record.finish_reasons) == len(requests)
    assert set(record.finish_reasons.values()) == {FinishReason.STOP, FinishReason.LENGTH}
    assert record.num_cached_tokens > 0
    for request in requests:
        prompt = request.prompt_token_ids
        tokens = record.tokens[request.request_id]
        assert prompt is not None
        assert tokens == list(itertools.islice(continuation(prompt), len(tokens)))


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_preempted_requests(policy: str, play: Play) -> None:
    record = play(
        arriving_in_turn,
        scheduling_policy=policy,
        num_gpu_blocks_override=36,
        scheduler_reserve_full_isl=False,
    )
    assert len(record.finish_reasons) == len(mixed_requests())
    assert record.num_preemptions > 0


def test_room_for_what_is_in_flight(play: Play) -> None:
    """With a sliding window a request is admitted once there are blocks for all batches of it."""
    record = play(arriving_in_turn, max_num_batched_tokens=32, num_gpu_blocks_override=36)
    assert record.num_preemptions > 0


# ----------------------------------------------------------------------------------------
# Grammars
# ----------------------------------------------------------------------------------------


def test_grammars(play: Play, cadence: Cadence) -> None:
    def scenario(engine: DrivenEngine) -> None:
        engine.add(structured_request("regex", [1] * 20, regex=REGEX))
        engine.add(new_request("free", [2] * 120, max_tokens=30, ignore_eos=True))
        engine.step(3)
        engine.add(structured_request("choice", [3] * 40, grammar=choice_grammar(COLOURS)))
        engine.add(structured_request("json", [4] * 100, json=SCHEMA))
        engine.run()

    record = play(scenario)
    assert re.fullmatch(REGEX, text_of(record.tokens["regex"]))
    assert text_of(record.tokens["choice"]) in COLOURS
    assert record.finish_reasons["regex"] == FinishReason.STOP
    # Ahead of its tokens a grammar can't say what it allows: sampling is put off.
    puts_off = any(step.pending_structured_output_tokens for step in record.steps)
    assert puts_off == cadence.async_scheduling


# ----------------------------------------------------------------------------------------
# What happens while batches are in flight
# ----------------------------------------------------------------------------------------


def test_aborts(play: Play) -> None:
    def scenario(engine: DrivenEngine) -> None:
        add_long_requests(engine, "stays", "between")
        engine.step()
        add_long_requests(engine, "in-flight", "waits")
        engine.step(5)
        engine.core.abort_requests(["between"])
        engine.step(2)
        # What the input thread does: the abort acts while batches are being executed.
        engine.core.aborts_queue.put_nowait(["in-flight"])
        engine.step()
        add_long_requests(engine, "between")  # ids may come again
        engine.run()

    record = play(scenario)
    assert set(record.finish_reasons) == {"stays", "waits", "between"}
    assert len(record.tokens["in-flight"]) < 30


def test_requests_reset_in_flight(play: Play) -> None:
    def scenario(engine: DrivenEngine) -> None:
        add_long_requests(engine, "a", "b")
        engine.step()
        add_long_requests(engine, "c")
        engine.step(5)
        engine.note(engine.core.reset_prefix_cache(reset_running_requests=True))
        engine.note(engine.core.scheduler.get_request_counts())
        engine.run()

    record = play(scenario)
    assert record.answers == [True, (0, 3)]
    assert record.num_preemptions == 3
    assert record.finish_reasons == dict.fromkeys("abc", FinishReason.LENGTH)


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_pause_in_flight(mode: str, play: Play) -> None:
    def scenario(engine: DrivenEngine) -> None:
        add_long_requests(engine, "a", "b")
        engine.step(5)
        engine.core.pause_scheduler(mode, clear_cache=False)
        add_long_requests(engine, "queued")
        engine.step(4)
        engine.note(engine.core.scheduler.get_request_counts())
        engine.core.resume_scheduler()
        engine.run()

    record = play(scenario)
    ended = {"queued"} if mode == "abort" else {"a", "b", "queued"}
    assert set(record.finish_reasons) == ended
