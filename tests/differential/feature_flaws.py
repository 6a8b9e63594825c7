"""Errors in features to plant into vLLM's schedulers, of kinds that implementations make."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from unittest import mock

from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from testkit.worlds.world import SchedulerClass

Flaw = Callable[[SchedulerClass], SchedulerClass]


# KV cache events.


def evicts_without_an_event(base: SchedulerClass) -> SchedulerClass:
    """Publish nothing about blocks that leave the cache."""

    class Flawed(base):  # type: ignore[misc]
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            self.kv_cache_manager.block_pool._emit_block_removed_events = lambda hashes: None

    return Flawed


def resets_without_an_event(base: SchedulerClass) -> SchedulerClass:
    """Publish nothing about a reset of the prefix cache."""

    class Flawed(base):  # type: ignore[misc]
        def reset_prefix_cache(self, *arguments: bool) -> bool:
            events = self.kv_cache_manager.block_pool.kv_event_queue
            num_events = len(events)
            succeeded = super().reset_prefix_cache(*arguments)
            del events[num_events:]
            return bool(succeeded)

    return Flawed


def _with_changed_events(
    base: SchedulerClass, change: Callable[[list[Any]], list[Any]]
) -> SchedulerClass:
    class Flawed(base):  # type: ignore[misc]
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            take_events = self.kv_cache_manager.take_events
            self.kv_cache_manager.take_events = lambda: change(take_events())

    return Flawed


def publishes_no_empty_events(base: SchedulerClass) -> SchedulerClass:
    """Leave out what vLLM publishes about tokens none of whose blocks is kept."""
    return _with_changed_events(
        base,
        lambda events: [
            event for event in events if not isinstance(event, BlockStored) or event.block_hashes
        ],
    )


def publishes_in_the_order_of_groups(base: SchedulerClass) -> SchedulerClass:
    """Sort events of a step by KV cache group."""
    return _with_changed_events(
        base, lambda events: sorted(events, key=lambda it: getattr(it, "group_idx", -1))
    )


def names_no_session(base: SchedulerClass) -> SchedulerClass:
    """Forget which session has stored a block."""

    def forget(events: list[Any]) -> list[Any]:
        for event in events:
            if isinstance(event, BlockStored):
                event.session_id = None
        return events

    return _with_changed_events(base, forget)


def reports_no_hits(base: SchedulerClass) -> SchedulerClass:
    """Ignore that a request wants its prefix hits to be published."""

    class Flawed(base):  # type: ignore[misc]
        def add_request(self, request: Request) -> None:
            request.kv_cache_report_mode = "incremental"
            super().add_request(request)

    return Flawed


def reports_admitted_hits_only(base: SchedulerClass) -> SchedulerClass:
    """Publish a prefix hit once, not at each attempt to admit its request."""

    class Flawed(base):  # type: ignore[misc]
        def _get_local_prefix_cache_hit(self, request: Request, *limit: Any) -> Any:
            hit = super()._get_local_prefix_cache_hit(request, *limit)
            request.kv_cache_report_mode = "incremental"
            return hit

    return Flawed


def changes_published_events(base: SchedulerClass) -> SchedulerClass:
    """Use the list of events again that a publisher may not have encoded yet."""

    class Flawed(base):  # type: ignore[misc]
        published: list[Any] | None = None

        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            publish = self.kv_event_publisher.publish

            def publish_and_clear(batch: Any) -> None:
                if self.published:
                    self.published.clear()
                self.published = batch.events
                publish(batch)

            self.kv_event_publisher.publish = publish_and_clear

    return Flawed


# KV cache metrics.


def keeps_metrics_across_a_reset(base: SchedulerClass) -> SchedulerClass:
    """Report blocks that a reset of the prefix cache has made meaningless."""

    class Flawed(base):  # type: ignore[misc]
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            self.kv_metrics_collector.reset = lambda: None

    return Flawed


def draws_at_each_access(base: SchedulerClass) -> SchedulerClass:
    """Draw a random number also when a block is used again."""

    class Flawed(base):  # type: ignore[misc]
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            collector = self.kv_metrics_collector
            on_block_accessed = collector.on_block_accessed

            def access(block: Any) -> None:
                collector.should_sample_block()
                on_block_accessed(block)

            collector.on_block_accessed = access

    return Flawed


def counts_allocation_as_access(base: SchedulerClass) -> SchedulerClass:
    """Take the first access of a block for its second."""

    class Flawed(base):  # type: ignore[misc]
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            collector = self.kv_metrics_collector
            on_block_allocated = collector.on_block_allocated

            def allocate(block: Any) -> None:
                on_block_allocated(block)
                collector.on_block_accessed(block)

            collector.on_block_allocated = allocate

    return Flawed


# Pooling models.


def reserves_a_slot_for_a_token(base: SchedulerClass) -> SchedulerClass:
    """Keep room for a sampled token, as if the model were generative."""

    class Flawed(base):  # type: ignore[misc]
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            self.num_sampled_tokens_per_step = 1

    return Flawed


def reads_the_cache_for_every_pooler(base: SchedulerClass) -> SchedulerClass:
    """Look up prefixes of requests whose pooler needs every token."""

    class Flawed(base):  # type: ignore[misc]
        def add_request(self, request: Request) -> None:
            request.skip_reading_prefix_cache = False
            super().add_request(request)

    return Flawed


def forgets_pooling_output_of_the_preempted(base: SchedulerClass) -> SchedulerClass:
    """Let a request that was preempted meanwhile compute its embedding again."""

    class Flawed(base):  # type: ignore[misc]
        def update_from_output(self, scheduler_output: Any, runner_output: Any) -> Any:
            for request_id in scheduler_output.num_scheduled_tokens:
                request = self.requests.get(request_id)
                if request is not None and request.status == RequestStatus.PREEMPTED:
                    runner_output = copy.copy(runner_output)
                    runner_output.pooler_output = None
            return super().update_from_output(scheduler_output, runner_output)

    return Flawed


# Multimodal requests.


def frees_inputs_when_scheduled(base: SchedulerClass) -> SchedulerClass:
    """Give back encoder inputs before the step that reads them is over."""

    class Flawed(base):  # type: ignore[misc]
        def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
            super()._update_after_schedule(scheduler_output)
            for request_id in scheduler_output.num_scheduled_tokens:
                request = self.requests[request_id]
                if request.has_encoder_inputs:
                    self._free_encoder_inputs(request)

    return Flawed


def evicts_the_newest_input(base: SchedulerClass) -> SchedulerClass:
    """Evict from the wrong end of the encoder cache."""

    class Newest(OrderedDict[str, int]):
        def popitem(self, last: bool = True) -> tuple[str, int]:
            return super().popitem(last=not last)

    class Flawed(base):  # type: ignore[misc]
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            self.encoder_cache_manager.freeable = Newest()

    return Flawed


def frees_inputs_in_order(base: SchedulerClass) -> SchedulerClass:
    """Give back a request's inputs by number, not in the order of vLLM's set."""

    class Flawed(base):  # type: ignore[misc]
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            get_cached = self.encoder_cache_manager.get_cached_input_ids
            self.encoder_cache_manager.get_cached_input_ids = lambda it: sorted(get_cached(it))

    return Flawed


def gives_back_inputs_of_the_held_up(base: SchedulerClass) -> SchedulerClass:
    """Let a waiting request that an input holds up keep none of those it found in the cache."""

    class Flawed(base):  # type: ignore[misc]
        def _try_schedule_encoder_inputs(
            self, request: Request, *arguments: Any, **named: Any
        ) -> Any:
            result = super()._try_schedule_encoder_inputs(request, *arguments, **named)
            if result[1] == 0 and request.status != RequestStatus.RUNNING:
                self.encoder_cache_manager.free(request)
            return result

    return Flawed


def keeps_inputs_without_blocks(base: SchedulerClass) -> SchedulerClass:
    """Let a waiting request for which there are no blocks keep its encoder inputs."""

    class Flawed(base):  # type: ignore[misc]
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            free = self.encoder_cache_manager.free

            def free_unless_waiting(request: Request) -> None:
                if request.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
                    free(request)

            self.encoder_cache_manager.free = free_unless_waiting

    return Flawed


def counts_placeholders_for_embeddings(base: SchedulerClass) -> SchedulerClass:
    """Compare the encoder's budget with placeholders of which only some are embedded."""

    class Flawed(base):  # type: ignore[misc]
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            can_allocate = self.encoder_cache_manager.can_allocate

            def can(request: Request, input_id: int, budget: int, num_scheduled: int) -> bool:
                if request.mm_features[input_id].mm_position.length > budget:
                    return False
                return bool(can_allocate(request, input_id, budget, num_scheduled))

            self.encoder_cache_manager.can_allocate = can

    return Flawed


def gives_back_repeated_inputs_at_once(base: SchedulerClass) -> SchedulerClass:
    """Drop a request's reference to an input that it needs once more."""

    class Flawed(base):  # type: ignore[misc]
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            manager = self.encoder_cache_manager
            free_encoder_input = manager.free_encoder_input

            def free(request: Request, input_id: int) -> None:
                held = manager.request_cached_ids.pop(request.request_id, set())
                free_encoder_input(request, input_id)
                if held - {input_id}:
                    manager.request_cached_ids[request.request_id] = held - {input_id}

            manager.free_encoder_input = free

    return Flawed


def evicts_what_it_allocates_again(base: SchedulerClass) -> SchedulerClass:
    """Tell the workers to drop an input that the same step has brought back."""

    class Flawed(base):  # type: ignore[misc]
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            manager = self.encoder_cache_manager

            def take_freed() -> list[str]:
                freed, manager.freed = manager.freed, []
                return list(freed)

            manager.get_freed_mm_hashes = take_freed

    return Flawed


def ignores_resets_of_the_encoder_cache(base: SchedulerClass) -> SchedulerClass:
    """Keep what the encoder computed with other weights."""

    class Flawed(base):  # type: ignore[misc]
        def reset_encoder_cache(self) -> None:
            return None

    return Flawed


def lets_mismatched_inputs_wait(base: SchedulerClass) -> SchedulerClass:
    """Don't fail a request whose image has another size than the cached one of that name."""

    class Flawed(base):  # type: ignore[misc]
        def update_from_output(self, *arguments: Any) -> Any:
            self.encoder_cache_mismatch_reqs.clear()
            return super().update_from_output(*arguments)

    return Flawed


# KV connectors.


def _without_report(base: SchedulerClass, **changes: Any) -> SchedulerClass:
    """Leave out a part of what workers report."""

    class Flawed(base):  # type: ignore[misc]
        def _update_from_kv_xfer_finished(self, report: KVConnectorOutput) -> None:
            super()._update_from_kv_xfer_finished(dataclasses.replace(report, **changes))

    return Flawed


def ignores_ends_of_sends(base: SchedulerClass) -> SchedulerClass:
    """Keep the blocks that a connector has sent."""
    return _without_report(base, finished_sending=None)


def ignores_ends_of_loads(base: SchedulerClass) -> SchedulerClass:
    """Let requests wait for blocks that have arrived."""
    return _without_report(base, finished_recving=None)


def tells_the_connector_last(base: SchedulerClass) -> SchedulerClass:
    """Free blocks before the connector learns that it has sent them."""

    class Flawed(base):  # type: ignore[misc]
        def _update_from_kv_xfer_finished(self, report: KVConnectorOutput) -> None:
            update = self.connector.update_connector_output
            self.connector.update_connector_output = lambda _: None
            super()._update_from_kv_xfer_finished(report)
            self.connector.update_connector_output = update
            self.connector.get_kv_connector_stats()
            update(report)

    return Flawed


def frees_what_is_being_sent(base: SchedulerClass) -> SchedulerClass:
    """Ignore that a connector wants to keep a request's blocks."""

    class Flawed(base):  # type: ignore[misc]
        def _connector_finished(self, request: Request) -> tuple[bool, Any]:
            return False, super()._connector_finished(request)[1]

    return Flawed


def frees_at_once(base: SchedulerClass) -> SchedulerClass:
    """Free blocks that a step in flight may still write to."""

    class Flawed(base):  # type: ignore[misc]
        def _request_blocks_can_be_freed(self, request: Request) -> bool:
            return True

    return Flawed


def caches_blocks_before_they_arrive(base: SchedulerClass) -> SchedulerClass:
    """Share blocks that are still being loaded."""

    class Flawed(base):  # type: ignore[misc]
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            allocate = self.kv_cache_manager.allocate_slots

            def allocate_slots(*arguments: Any, **named: Any) -> Any:
                return allocate(*arguments, **(named | {"delay_cache_blocks": False}))

            self.kv_cache_manager.allocate_slots = allocate_slots

    return Flawed


def reserves_nothing_for_prefills(base: SchedulerClass) -> SchedulerClass:
    """Let loads take the blocks that started prefills rely on."""

    class Flawed(base):  # type: ignore[misc]
        def _inflight_prefill_reserved_blocks(self) -> int:
            return 0

    return Flawed


def shows_requests_as_they_arrived(base: SchedulerClass) -> SchedulerClass:
    """Give connectors requests whose counters are out of date."""

    class Flawed(base):  # type: ignore[misc]
        def _build_kv_connector_meta(self, connector: Any, scheduler_output: Any) -> Any:
            computed = {it: it.num_computed_tokens for it in self.requests.values()}
            for request in computed:
                request.num_computed_tokens = 0
            metadata = super()._build_kv_connector_meta(connector, scheduler_output)
            for request, num_computed_tokens in computed.items():
                request.num_computed_tokens = num_computed_tokens
            return metadata

    return Flawed


def keeps_what_failed_to_load(base: SchedulerClass) -> SchedulerClass:
    """Leave blocks in the prefix cache that hold nothing."""

    class Flawed(base):  # type: ignore[misc]
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            self.kv_cache_manager.evict_blocks = lambda block_ids: None

    return Flawed


def recomputes_only_bad_blocks(base: SchedulerClass) -> SchedulerClass:
    """Go on behind a bad block with what came after it."""

    class Flawed(base):  # type: ignore[misc]
        def _handle_invalid_blocks(self, block_ids: set[int], *arguments: Any) -> Any:
            return super()._handle_invalid_blocks({max(block_ids)}, *arguments)

    return Flawed


def ignores_failed_receives(base: SchedulerClass) -> SchedulerClass:
    """Take a load that failed for one that succeeded."""

    class Flawed(base):  # type: ignore[misc]
        def _handle_failed_recving(self, request_ids: set[str]) -> set[str]:
            return set()

    return Flawed


def delivers_output_without_its_blocks(base: SchedulerClass) -> SchedulerClass:
    """Let a preempted request end whose blocks were to be handed over."""

    class Flawed(base):  # type: ignore[misc]
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            self.requires_kv_delivery = False

    return Flawed


def resets_no_connector(base: SchedulerClass) -> SchedulerClass:
    """Leave the connector out of a reset."""

    class Flawed(base):  # type: ignore[misc]
        def reset_connector_cache(self) -> bool:
            return True

    return Flawed


def counts_no_stages(base: SchedulerClass) -> SchedulerClass:
    """Forget in the statistics how far loads have come."""

    class Flawed(base):  # type: ignore[misc]
        def _set_kv_fetch_stage(self, request: Request, stage: str | None) -> None:
            return None

    return Flawed


def publishes_the_connector_first(base: SchedulerClass) -> SchedulerClass:
    """Put a connector's events before those of the scheduler's own cache."""

    class Flawed(base):  # type: ignore[misc]
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            publish = self.kv_event_publisher.publish

            def publish_sorted(batch: Any) -> None:
                batch.events.sort(key=lambda it: getattr(it, "medium", "GPU"))
                publish(batch)

            self.kv_event_publisher.publish = publish_sorted

    return Flawed


# EC connectors.


def encodes_what_is_found_elsewhere(base: SchedulerClass) -> SchedulerClass:
    """Take the encoder's budget for inputs that it doesn't compute."""

    class Flawed(base):  # type: ignore[misc]
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            self.ec_connector.has_cache_item = lambda identifier: False

    return Flawed


def waits_for_no_input(base: SchedulerClass) -> SchedulerClass:
    """Admit requests whose encoder inputs are still in transit."""

    class Flawed(base):  # type: ignore[misc]
        def _ec_transfer_pending(self, request: Request, num_computed_tokens: int) -> bool:
            super()._ec_transfer_pending(request, num_computed_tokens)
            return False

    return Flawed


def forgets_to_fail_requests(base: SchedulerClass) -> SchedulerClass:
    """Let requests wait for ever for inputs that a connector has given up."""

    class Flawed(base):  # type: ignore[misc]
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            take = self.ec_connector.take_unavailable_requests
            self.ec_connector.take_unavailable_requests = lambda: take() and set()

    return Flawed


def keeps_freed_inputs_to_itself(base: SchedulerClass) -> SchedulerClass:
    """Don't tell a connector that an input is not needed any more."""

    class Flawed(base):  # type: ignore[misc]
        def _free_encoder_input(self, request: Request, input_id: int) -> None:
            self.encoder_cache_manager.free_encoder_input(request, input_id)

    return Flawed


def frees_what_an_ec_connector_keeps(base: SchedulerClass) -> SchedulerClass:
    """Ignore that a connector isn't through with a request."""

    class Flawed(base):  # type: ignore[misc]
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            finish = self.ec_connector.request_finished
            self.ec_connector.request_finished = lambda request: (False, finish(request)[1])

    return Flawed


# Auxiliary output.


def forgets_that_requests_are_preempted(base: SchedulerClass) -> SchedulerClass:
    """Have a worker go on with a request that begins anew."""

    class Flawed(base):  # type: ignore[misc]
        def _preempt_request(self, *arguments: Any, **named: Any) -> None:
            connector, self.aux_output_connector = self.aux_output_connector, None
            super()._preempt_request(*arguments, **named)
            self.aux_output_connector = connector

    return Flawed


def keeps_experts_across_a_reset(base: SchedulerClass) -> SchedulerClass:
    """Hand out what was collected with the weights of before."""

    class Flawed(base):  # type: ignore[misc]
        def reset_prefix_cache(self, *arguments: Any) -> bool:
            with mock.patch.object(self.aux_output_connector, "reset"):
                return bool(super().reset_prefix_cache(*arguments))

    return Flawed


def plans_experts_behind_the_step(base: SchedulerClass) -> SchedulerClass:
    """Show the connector requests whose tokens of the step count as computed."""

    class Flawed(base):  # type: ignore[misc]
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            self._plan = self.aux_output_connector.build_connector_meta
            self.aux_output_connector.build_connector_meta = lambda *_: None

        def _update_after_schedule(self, output: SchedulerOutput) -> None:
            super()._update_after_schedule(output)
            output.aux_output_connector_metadata = self._plan(output, self.requests)

    return Flawed


def picks_experts_before_the_stop(base: SchedulerClass) -> SchedulerClass:
    """Hand out the experts of tokens that a stop has cut off, too."""

    class Flawed(base):  # type: ignore[misc]
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            connector = self.aux_output_connector
            take_output = connector.take_output

            def take_all(request: Request, collected: Any) -> Any:
                take_output(request, collected)
                return collected[request.request_id].rows

            connector.take_output = take_all

    return Flawed


FEATURE_FLAWS: list[tuple[Flaw, str]] = [
    (evicts_without_an_event, "sync-kv-events"),
    (resets_without_an_event, "async-kv-events"),
    (publishes_no_empty_events, "sync-kv-events"),
    (publishes_in_the_order_of_groups, "kv-events-hybrid"),
    (names_no_session, "async-kv-events"),
    (reports_no_hits, "kv-events-hybrid"),
    (reports_admitted_hits_only, "kv-events-preempting"),
    (changes_published_events, "sync-kv-events"),
    (keeps_metrics_across_a_reset, "kv-cache-metrics"),
    (draws_at_each_access, "kv-cache-metrics"),
    (counts_allocation_as_access, "kv-cache-metrics"),
    (reserves_a_slot_for_a_token, "sync-pooling"),
    (reads_the_cache_for_every_pooler, "async-pooling"),
    (forgets_pooling_output_of_the_preempted, "pooling-preempting"),
    (frees_inputs_when_scheduled, "async-multimodal"),
    (evicts_the_newest_input, "async-multimodal"),
    (frees_inputs_in_order, "sync-multimodal"),
    (gives_back_inputs_of_the_held_up, "multimodal-speculating"),
    (keeps_inputs_without_blocks, "multimodal-preempting"),
    (counts_placeholders_for_embeddings, "sync-multimodal"),
    (gives_back_repeated_inputs_at_once, "async-multimodal"),
    (evicts_what_it_allocates_again, "multimodal-preempting"),
    (ignores_resets_of_the_encoder_cache, "multimodal-kv-events"),
    (lets_mismatched_inputs_wait, "multimodal-kv-events"),
    (ignores_ends_of_sends, "sync-connector"),
    (ignores_ends_of_loads, "async-connector"),
    (tells_the_connector_last, "sync-connector"),
    (frees_what_is_being_sent, "async-connector"),
    (frees_at_once, "async-connector"),
    (caches_blocks_before_they_arrive, "sync-connector"),
    (reserves_nothing_for_prefills, "connector-preempting"),
    (shows_requests_as_they_arrived, "async-connector"),
    (keeps_what_failed_to_load, "connector-failures"),
    (recomputes_only_bad_blocks, "connector-failures"),
    (ignores_failed_receives, "connector-failures-hybrid"),
    (delivers_output_without_its_blocks, "connector-preempting"),
    (resets_no_connector, "sync-connector"),
    (counts_no_stages, "async-connector"),
    (publishes_the_connector_first, "connector-kv-events"),
    (encodes_what_is_found_elsewhere, "ec-connector-preempting"),
    (waits_for_no_input, "ec-connector"),
    (forgets_to_fail_requests, "ec-connector"),
    (keeps_freed_inputs_to_itself, "ec-connector"),
    (frees_what_an_ec_connector_keeps, "ec-connector-v2"),
    (forgets_that_requests_are_preempted, "experts-preempting"),
    (keeps_experts_across_a_reset, "sync-experts"),
    (plans_experts_behind_the_step, "async-experts"),
    (picks_experts_before_the_stop, "experts-speculating"),
]
