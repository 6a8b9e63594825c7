"""That vLLM's objects show the native scheduler's state, and that nobody can write to them."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from differential.compare import first_difference, stock_snapshot
from differential.model import FakeStructuredOutputManager
from differential.world import (
    World,
    build_world,
    draw_configuration,
    stock_block_hasher,
    vllm_environment,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from .mirror import StateWasChangedByHand
from .scheduler import AssignsToTheScheduler, MirroredAsyncScheduler, MirroredScheduler


@pytest.fixture(params=[MirroredScheduler, MirroredAsyncScheduler], ids=["sync", "async"])
def mirrored(request: pytest.FixtureRequest) -> Iterator[Any]:
    mode = "async" if request.param.async_scheduling else "sync"
    configuration = draw_configuration(f"{mode}-hybrid", 0)
    with vllm_environment(configuration):
        world = build_world(configuration)
        scheduler = world.build_scheduler(request.param, FakeStructuredOutputManager())
        for request_id in ("a", "b", "c"):
            scheduler.add_request(build_request(world, request_id))
        yield scheduler


def build_request(world: World, request_id: str) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=list(range(10)),
        sampling_params=SamplingParams(max_tokens=4),
        pooling_params=None,
        block_hasher=stock_block_hasher(world),
    )


def step(scheduler: Any) -> None:
    output = scheduler.schedule()
    request_ids = list(output.num_scheduled_tokens)
    sampled = [[] if scheduler.requests[it].is_prefill_chunk else [7] for it in request_ids]
    rows = {request_id: row for row, request_id in enumerate(request_ids)}
    scheduler.update_from_output(output, ModelRunnerOutput(request_ids, rows, sampled))


def assert_shows_native_state(scheduler: Any) -> None:
    shown = by_key(stock_snapshot(scheduler))
    assert first_difference(shown, by_key(scheduler.snapshot()), "state") is None


def by_key(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: dict(sorted(value.items())) if isinstance(value, dict) else value
        for name, value in state.items()
    }


def test_state_is_shown_after_each_call(mirrored: Any) -> None:
    requests = list(mirrored.requests.values())
    assert_shows_native_state(mirrored)
    for _ in range(3):
        step(mirrored)
        assert_shows_native_state(mirrored)
    mirrored.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    assert_shows_native_state(mirrored)
    while mirrored.has_unfinished_requests():
        step(mirrored)
        assert_shows_native_state(mirrored)
    assert [it.num_output_tokens for it in requests] == [4, requests[1].num_output_tokens, 4]
    assert [it.status.name for it in requests] == [
        "FINISHED_LENGTH_CAPPED",
        "FINISHED_ABORTED",
        "FINISHED_LENGTH_CAPPED",
    ]


def test_assignments_are_refused(mirrored: Any) -> None:
    with pytest.raises(AssignsToTheScheduler, match="connector"):
        mirrored.connector = mock.Mock()
    with pytest.raises(AttributeError, match="_free_request"):
        mirrored._free_request  # noqa: B018


def test_settings_that_are_assigned_are_configured(mirrored: Any) -> None:
    mirrored.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    core = mirrored._core
    mirrored.pp_size = 2
    mirrored.use_pp = True
    assert mirrored._core is not core
    parallel_config = mirrored.vllm_config.parallel_config
    with mirrored._settings_of(mirrored.vllm_config):
        assert parallel_config.pipeline_parallel_size == 2
    assert parallel_config.pipeline_parallel_size == 1
    with pytest.raises(AssignsToTheScheduler, match="use_pp"):
        mirrored.use_pp = False


def test_settings_cannot_change_under_requests(mirrored: Any) -> None:
    with pytest.raises(AssignsToTheScheduler, match="pp_size"):
        mirrored.pp_size = 2


def test_preemptions_can_be_observed_but_not_made(mirrored: Any) -> None:
    preempt = mirrored._preempt_request
    observed = []

    def observe(request: Request, timestamp: float) -> None:
        observed.append((request.request_id, request.status))
        preempt(request, timestamp)

    mirrored._preempt_request = observe
    step(mirrored)
    mirrored.reset_prefix_cache(reset_running_requests=True)
    assert observed
    assert {status for _, status in observed} == {RequestStatus.RUNNING}
    with pytest.raises(StateWasChangedByHand, match="_preempt_request"):
        preempt(mirrored.requests["a"], 0.0)


def change_counter(scheduler: Any) -> None:
    scheduler.requests["a"].num_computed_tokens += 1


def append_token(scheduler: Any) -> None:
    scheduler.requests["a"].append_output_token_ids(7)


def give_drafts(scheduler: Any) -> None:
    scheduler.requests["a"].spec_token_ids = [1]


def take_from_queue(scheduler: Any) -> None:
    scheduler.waiting.pop_request()


def replace_method(scheduler: Any) -> None:
    scheduler.kv_cache_manager.allocate_slots = mock.Mock()


def take_block(scheduler: Any) -> None:
    scheduler.kv_cache_manager.block_pool.get_new_blocks(1)


@pytest.mark.parametrize(
    "change",
    [change_counter, append_token, give_drafts, take_from_queue, replace_method, take_block],
)
def test_changes_by_hand_are_noticed(mirrored: Any, change: Any) -> None:
    change(mirrored)
    with pytest.raises(StateWasChangedByHand):
        mirrored.schedule()
