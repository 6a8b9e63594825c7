"""That vLLM's objects show the native scheduler's state, and that nobody can write to them."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
from differential.state import stock_snapshot
from sparksched.compat import releases
from sparksched.verify.compare import first_difference
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from testkit.worlds.candidates import stock_block_hasher
from testkit.worlds.draw import draw_configuration
from testkit.worlds.model import FakeStructuredOutputManager
from testkit.worlds.world import World, build_world, vllm_environment

from . import settings
from .kv_transfer_mirror import DeferredFrees
from .mirror import MirrorIsWrong, StateWasChangedByHand
from .scheduler import AssignsToTheScheduler, MirroredAsyncScheduler, MirroredScheduler

pytestmark = pytest.mark.release

since_0_33 = pytest.mark.skipif(
    not releases.is_since("0.33.0"), reason="vLLM 0.32.0 does otherwise"
)


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


def build_request(
    world: World,
    request_id: str,
    *,
    max_tokens: int = 4,
    images: Sequence[MultiModalFeatureSpec] = (),
    block_hasher: Any = None,
) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=list(range(10)),
        sampling_params=SamplingParams(max_tokens=max_tokens),
        pooling_params=None,
        mm_features=list(images),
        block_hasher=block_hasher or stock_block_hasher(world),
    )


def step(scheduler: Any) -> None:
    output = scheduler.schedule()
    request_ids = list(output.num_scheduled_tokens)
    sampled = [[] if scheduler.requests[it].is_prefill_chunk else [7] for it in request_ids]
    rows = {request_id: row for row, request_id in enumerate(request_ids)}
    scheduler.update_from_output(output, ModelRunnerOutput(request_ids, rows, sampled))


def assert_shows_native_state(scheduler: Any) -> None:
    shown = by_key(stock_snapshot(scheduler))
    own = by_key(scheduler.snapshot())
    del own["waiting_for"]  # vLLM's notes no reasons
    assert first_difference(shown, own, "state") is None


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
    with pytest.raises(AssignsToTheScheduler, match="ec_connector"):
        mirrored.ec_connector = mock.Mock()
    with pytest.raises(AttributeError, match="_free_request"):
        mirrored._free_request  # noqa: B018


def test_settings_that_are_assigned_are_configured(mirrored: Any) -> None:
    mirrored.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    core = mirrored._core
    mirrored.pp_size = 2
    mirrored.use_pp = True
    assert mirrored._core is not core
    parallel_config = mirrored.vllm_config.parallel_config
    mirror = mirrored._mirror
    with settings.assigned(mirrored.vllm_config, mirror.settings, mirror.stock):
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


@pytest.fixture
def world() -> Iterator[World]:
    """Return a world with one KV cache group."""
    configuration = dataclasses.replace(draw_configuration("async-full", 0), log_stats=True)
    with vllm_environment(configuration):
        yield build_world(configuration)


@pytest.fixture
def idle(world: World) -> Any:
    """Return a scheduler without requests."""
    return world.build_scheduler(MirroredAsyncScheduler, FakeStructuredOutputManager())


def report(scheduler_output: Any, **transfers: Any) -> ModelRunnerOutput:
    request_ids = list(scheduler_output.num_scheduled_tokens)
    rows = {request_id: row for row, request_id in enumerate(request_ids)}
    transferred = KVConnectorOutput(**transfers) if transfers else None
    sampled = [[7] for _ in request_ids]
    return ModelRunnerOutput(request_ids, rows, sampled, kv_connector_output=transferred)


def test_deferred_frees_are_switched_on_and_shown(world: World, idle: Any) -> None:
    assert not idle.defer_block_free
    idle.defer_block_free = True
    assert idle.defer_block_free
    pool = idle.kv_cache_manager.block_pool
    num_free = pool.get_num_free_blocks()
    request = build_request(world, "a")
    idle.add_request(request)
    first, second = idle.schedule(), idle.schedule()
    assert request.last_sched_seq == idle.sched_step_seq == 2
    assert not idle.deferred_frees
    held = [it.block_id for it in pool.blocks if it.ref_cnt > 0 and not it.is_null]
    idle.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    ((fence, blocks),) = idle.deferred_frees
    assert fence == 2
    assert sorted(it.block_id for it in blocks) == held
    idle.update_from_output(first, report(first))
    assert len(idle.deferred_frees) == 1
    idle.update_from_output(second, report(second))
    assert idle.processed_step_seq == 2
    assert not idle.deferred_frees
    assert pool.get_num_free_blocks() == num_free


def test_frees_that_are_not_deferred_show_nothing(world: World, idle: Any) -> None:
    idle.add_request(build_request(world, "a"))
    idle.schedule()
    idle.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert not idle.deferred_frees
    assert idle.sched_step_seq == 0


def state_of_blocks(ref_counts: dict[int, int], **tables: list[int]) -> dict[str, Any]:
    requests = {name: {"block_ids": [table]} for name, table in tables.items()}
    return {"requests": requests, "ref_counts": ref_counts}


def test_blocks_that_are_free_too_early_or_too_late_are_noticed() -> None:
    frees = DeferredFrees()
    frees.num_scheduled_steps = 1
    running = state_of_blocks({1: 2, 2: 1, 3: 1}, a=[0, 1, 2], b=[1, 3])
    waiting = state_of_blocks({1: 2, 2: 1, 3: 1}, b=[1, 3])
    frees.note(running, waiting)
    assert list(frees.entries) == [(1, [1, 2])]
    assert frees.is_right
    frees.note(waiting, state_of_blocks({1: 1, 3: 1}, b=[1, 3]))
    assert not frees.is_right
    frees.num_processed_steps = 1
    frees.note(waiting, waiting)
    assert not frees.entries
    assert not frees.is_right


def test_connector_that_is_assigned_is_asked(world: World, idle: Any) -> None:
    connector = mock.Mock()
    connector.get_num_new_matched_tokens.return_value = (4, True)
    connector.get_external_cache_hit_sources.return_value = None
    connector.get_kv_connector_stats.return_value = None
    connector.take_events.return_value = ()
    idle.connector = connector
    assert idle.connector is connector
    assert not idle.defer_block_free
    assert not idle.requires_kv_delivery
    request = build_request(world, "a")
    idle.add_request(request)
    output = idle.schedule()
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    assert list(idle.kv_holding_waiting) == [request]
    assert not idle.finished_recving_kv_req_ids
    idle.update_from_output(output, report(output, finished_recving={"a"}))
    assert idle.finished_recving_kv_req_ids == {"a"}
    assert idle.schedule().num_scheduled_tokens == {"a": 6}
    assert not idle.finished_recving_kv_req_ids
    with pytest.raises(AssignsToTheScheduler, match="connector"):
        idle.connector = None


def test_loads_cannot_be_ended_by_hand(idle: Any) -> None:
    idle.finished_recving_kv_req_ids.add("a")
    with pytest.raises(StateWasChangedByHand, match="finished_recving_kv_req_ids"):
        idle.schedule()


def test_loads_that_nobody_reported_are_noticed(idle: Any) -> None:
    idle._mirror.stock.finished_recving_kv_req_ids.add("a")
    with pytest.raises(MirrorIsWrong, match="loads"):
        idle.finished_recving_kv_req_ids  # noqa: B018


def image(identifier: str, offset: int) -> MultiModalFeatureSpec:
    position = PlaceholderRange(offset=offset, length=6)
    return MultiModalFeatureSpec(None, "image", identifier, position)


def test_encoder_that_is_assigned_limits_steps(world: World, idle: Any) -> None:
    idle.max_num_encoder_input_tokens = 6
    idle.encoder_cache_manager = EncoderCacheManager(cache_size=8)
    assert idle.max_num_encoder_input_tokens == 6
    assert idle.encoder_cache_manager.cache_size == 8
    for request_id, offset in (("a", 0), ("b", 3)):
        idle.add_request(build_request(world, request_id, images=[image(request_id, offset)]))
    assert idle.schedule().num_scheduled_tokens == {"a": 10, "b": 3}
    assert idle.encoder_cache_manager.num_free_slots == 2


@since_0_33
def test_requests_that_are_passed_over_are_deferred(world: World, idle: Any) -> None:
    idle.max_num_encoder_input_tokens = 5
    request = build_request(world, "a", images=[image("a", 0)])
    idle.add_request(request)
    assert not idle.deferred_waiting
    assert not idle.schedule().num_scheduled_tokens
    assert idle.deferred_waiting == {request}
    idle.schedule()


def test_other_numbers_of_deferred_requests_are_noticed(idle: Any) -> None:
    with pytest.raises(MirrorIsWrong, match="0 requests seem to be deferred, not 1"):
        idle._mirror.show_deferred(SchedulerStats(num_skipped_waiting_reqs=1))


def test_drafts_that_can_be_skipped_are_configured(idle: Any) -> None:
    idle.can_skip_drafts = True
    idle.num_prefill_lookahead = 3
    config, mirror = idle.vllm_config, idle._mirror
    with settings.assigned(config, mirror.settings, mirror.stock):
        assert releases.behaviors(config)["can_skip_drafts"]
        assert config.num_prefill_lookahead_tokens == 3
    assert not releases.behaviors(config)["can_skip_drafts"]
    assert config.num_prefill_lookahead_tokens == 0


@since_0_33
def test_blocks_are_hashed_as_the_hashes_of_requests_are(world: World, idle: Any) -> None:
    assert idle.num_hash_lookahead_tokens == 0
    hasher = get_request_block_hasher(world.hash_block_size, sha256, 1)
    idle.add_request(build_request(world, "a", block_hasher=hasher))
    assert idle.num_hash_lookahead_tokens == 1
    with settings.assigned(idle.vllm_config, idle._mirror.settings, idle._mirror.stock):
        assert releases.num_hash_lookahead_tokens(idle.vllm_config) == 1
    with pytest.raises(AssignsToTheScheduler, match="num_hash_lookahead_tokens"):
        idle.add_request(build_request(world, "b"))


def test_placeholders_of_a_finished_request_are_resolved(world: World, idle: Any) -> None:
    request = build_request(world, "a", max_tokens=1)
    idle.add_request(request)
    output = idle.schedule()
    assert request.num_output_placeholders == 1
    idle.update_from_output(output, report(output))
    assert request.is_finished()
    assert request.num_output_placeholders == 0


def test_assignments_that_change_nothing_are_none(idle: Any) -> None:
    idle.is_encoder_decoder = False
    with pytest.raises(AssignsToTheScheduler, match="is_encoder_decoder"):
        idle.is_encoder_decoder = True


@since_0_33
def test_steps_with_and_without_prompts_are_counted() -> None:
    configuration = draw_configuration("async-full", 0)
    configuration = dataclasses.replace(configuration, prefill_schedule_interval=4)
    with vllm_environment(configuration):
        world = build_world(configuration)
        scheduler = world.build_scheduler(MirroredScheduler, FakeStructuredOutputManager())
        assert scheduler.local_prefill_interval == 4
        scheduler.schedule()
        assert (scheduler.current_step, scheduler.num_executed_steps) == (1, 0)
        assert scheduler.last_prefill_step == -4
        scheduler.add_request(build_request(world, "a"))
        step(scheduler)
        step(scheduler)
    assert (scheduler.current_step, scheduler.num_executed_steps) == (3, 2)
    assert scheduler.last_prefill_step == 1


def test_other_numbers_of_requests_that_hold_blocks_are_noticed(idle: Any) -> None:
    snapshot = idle.snapshot() | {"num_kv_holding": 1}
    with pytest.raises(MirrorIsWrong, match="1 waiting requests hold blocks, not 0"):
        idle._mirror.write({}, snapshot, drops_stale_output=False)
