"""Errors to plant: in speculation, adapters, sessions and engines of several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from testkit.worlds.world import SchedulerClass

Flaw = Callable[[SchedulerClass], SchedulerClass]


def _once_built(base: SchedulerClass, change: Callable[[Any], None]) -> SchedulerClass:
    """Return schedulers that are changed as soon as they have been constructed."""

    class Flawed(base):  # type: ignore[misc]
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            change(self)

    return Flawed


# Speculative decoding.


def keeps_rejected_drafts(base: SchedulerClass) -> SchedulerClass:
    """Count draft tokens as computed although the model rejected them."""

    class Flawed(base):  # type: ignore[misc]
        def update_from_output(self, output: SchedulerOutput, results: ModelRunnerOutput) -> Any:
            num_rejected = {}
            for request_id, drafts in output.scheduled_spec_decode_tokens.items():
                sampled = results.sampled_token_ids[results.req_id_to_index[request_id]]
                if sampled and self.requests.get(request_id) in self.running:
                    num_rejected[request_id] = len(drafts) + 1 - len(sampled)
            outputs = super().update_from_output(output, results)
            for request in self.running:
                request.num_computed_tokens += num_rejected.get(request.request_id, 0)
            return outputs

    return Flawed


def rolls_back_stale_rejections(base: SchedulerClass) -> SchedulerClass:
    """Roll back what was rejected before a preemption, although that has reset the counters."""

    class Flawed(base):  # type: ignore[misc]
        def update_from_output(self, output: SchedulerOutput, results: ModelRunnerOutput) -> Any:
            stale = {
                request_id: len(drafts)
                for request_id, drafts in output.scheduled_spec_decode_tokens.items()
                if (request := self.requests.get(request_id))
                and request.num_stale_output_tokens > 0
            }
            outputs = super().update_from_output(output, results)
            for request_id, num_drafts in stale.items():
                request = self.requests.get(request_id)
                if request is not None and request.num_computed_tokens > num_drafts:
                    request.num_computed_tokens -= num_drafts
            return outputs

    return Flawed


def trusts_its_memory_of_drafts(base: SchedulerClass) -> SchedulerClass:
    """Roll back by the drafts that were scheduled, not by those of the output that comes back."""

    class Flawed(base):  # type: ignore[misc]
        def schedule(self, *arguments: Any) -> SchedulerOutput:
            output = super().schedule(*arguments)
            output.remembered_drafts = dict(output.scheduled_spec_decode_tokens)
            return output

        def update_from_output(self, output: SchedulerOutput, results: ModelRunnerOutput) -> Any:
            output.scheduled_spec_decode_tokens = dict(output.remembered_drafts)
            return super().update_from_output(output, results)

    return Flawed


def forgets_the_lookahead(base: SchedulerClass) -> SchedulerClass:
    """Reserve no slots for what the drafter writes."""

    def change(scheduler: Any) -> None:
        scheduler.num_lookahead_tokens = 0

    return _once_built(base, change)


def keeps_the_eagle_block(base: SchedulerClass) -> SchedulerClass:
    """Take the last block of a prefix hit too, whose drafter's part is volatile."""

    def change(scheduler: Any) -> None:
        coordinator = scheduler.kv_cache_manager.coordinator
        coordinator.eagle_group_ids = set()
        if hasattr(coordinator, "attention_groups"):
            coordinator.attention_groups = [
                group._replace(use_eagle=False) for group in coordinator.attention_groups
            ]

    return _once_built(base, change)


def drops_the_eagle_block_of_every_group(base: SchedulerClass) -> SchedulerClass:
    """Ignore which group is the drafter's."""

    def change(scheduler: Any) -> None:
        coordinator = scheduler.kv_cache_manager.coordinator
        if coordinator.eagle_group_ids:
            coordinator.attention_groups = [
                group._replace(use_eagle=True) for group in coordinator.attention_groups
            ]

    return _once_built(base, change)


def caches_windows_without_the_eagle_block(base: SchedulerClass) -> SchedulerClass:
    """Cache the blocks of a window that a hit needs, but not the one that the drafter drops."""

    def change(scheduler: Any) -> None:
        for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
            manager.use_eagle = False

    return _once_built(base, change)


def retains_no_tokens_for_modules(base: SchedulerClass) -> SchedulerClass:
    """Let a window end where it does without several modules that predict tokens."""

    def change(scheduler: Any) -> None:
        for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
            manager.extra_retained_tokens = 0

    return _once_built(base, change)


def ends_chunks_within_the_lookahead(base: SchedulerClass) -> SchedulerClass:
    """End a chunk of the prompt so close to its end that some module lacks its input."""

    class Flawed(base):  # type: ignore[misc]
        def _reserve_prefill_lookahead(self, _request: Request, _done: int, num_new: int) -> int:
            return num_new

    return Flawed


def drafts_in_no_budget(base: SchedulerClass) -> SchedulerClass:
    """Take nothing of the input budget for the drafter's own slots."""

    def change(scheduler: Any) -> None:
        speculative_config = scheduler.vllm_config.speculative_config
        speculative_config.method, speculative_config.parallel_drafting = "eagle", False

    return _once_built(base, change)


def pads_no_decodes(base: SchedulerClass) -> SchedulerClass:
    """Schedule a request whose one token is left as a decode without draft tokens."""

    def change(scheduler: Any) -> None:
        # Where the number of draft tokens depends on the batch, nothing is padded.
        if scheduler.dynamic_sd_lookup is None:
            most_requests = scheduler.max_num_running_reqs
            scheduler.dynamic_sd_lookup = [scheduler.num_spec_tokens] * (most_requests + 1)

    return _once_built(base, change)


def looks_up_the_next_batch_size(base: SchedulerClass) -> SchedulerClass:
    """Be off by one in the schedule of dynamic speculation."""

    def change(scheduler: Any) -> None:
        lookup = scheduler.dynamic_sd_lookup
        scheduler.dynamic_sd_lookup = lookup and [*lookup[1:], lookup[-1]]

    return _once_built(base, change)


def drafts_for_prefill_chunks(base: SchedulerClass) -> SchedulerClass:
    """Take draft tokens that were proposed in the middle of a prompt."""

    class Flawed(base):  # type: ignore[misc]
        def update_draft_token_ids(self, proposed: DraftTokenIds) -> None:
            requests = [self.requests.get(request_id) for request_id in proposed.req_ids]
            for request, drafts in zip(requests, proposed.draft_token_ids, strict=True):
                if request is not None:
                    request.spec_token_ids = drafts

    return Flawed


def believes_every_draft(base: SchedulerClass) -> SchedulerClass:
    """Show draft tokens to the grammar, and schedule those that it refuses too."""

    def change(scheduler: Any) -> None:
        manager = scheduler.structured_output_manager
        validate_tokens = manager.validate_tokens

        def believe(request: Request, drafts: list[int]) -> list[int]:
            validate_tokens(request, drafts)
            return drafts

        manager.validate_tokens = believe

    return _once_built(base, change)


def counts_refused_drafts(base: SchedulerClass) -> SchedulerClass:
    """Count the draft tokens that a grammar refused among those that the model verified."""

    class Flawed(base):  # type: ignore[misc]
        def make_spec_decoding_stats(self, *arguments: Any, **named: Any) -> Any:
            return super().make_spec_decoding_stats(
                *arguments, **named | {"num_invalid_spec_tokens": None}
            )

    return Flawed


def summarizes_detailed_metrics(base: SchedulerClass) -> SchedulerClass:
    """Leave the single steps out of a request's metrics."""

    def change(scheduler: Any) -> None:
        if scheduler.spec_decode_metrics_level == "detailed":
            scheduler.spec_decode_metrics_level = "summary"

    return _once_built(base, change)


def resumes_with_old_drafts(base: SchedulerClass) -> SchedulerClass:
    """Keep the draft tokens of a preempted request."""

    class Flawed(base):  # type: ignore[misc]
        def _preempt_request(self, request: Request, *arguments: Any, **named: Any) -> None:
            drafts = request.spec_token_ids
            super()._preempt_request(request, *arguments, **named)
            request.spec_token_ids = drafts

    return Flawed


# LoRA.


def packs_any_number_of_adapters(base: SchedulerClass) -> SchedulerClass:
    """Ignore how many adapters fit into a batch."""

    def change(scheduler: Any) -> None:
        scheduler.lora_config.max_loras += 1

    return _once_built(base, change)


def stops_at_a_full_set_of_adapters(base: SchedulerClass) -> SchedulerClass:
    """Let a request whose adapter doesn't fit block those behind it."""

    class Flawed(base):  # type: ignore[misc]
        def _handle_blocked_waiting_request(self, request: Request) -> bool:
            adapters = {it.lora_request.lora_int_id for it in self.running if it.lora_request}
            if request.lora_request and len(adapters) == self.lora_config.max_loras:
                self.is_blocked |= request.lora_request.lora_int_id not in adapters
            return super()._handle_blocked_waiting_request(request) and not self.is_blocked

        def schedule(self, *arguments: Any) -> SchedulerOutput:
            self.is_blocked = False
            return super().schedule(*arguments)

    return Flawed


def hashes_adapters_by_name(base: SchedulerClass) -> SchedulerClass:
    """Share cached blocks between adapters that have only their names in common."""

    class Flawed(base):  # type: ignore[misc]
        def add_request(self, request: Request) -> None:
            adapter = request.lora_request
            if adapter is not None:
                request.lora_request = LoRARequest(adapter.lora_name, 1, "somewhere")
                request.block_hashes = []
                request.update_block_hashes()
                request.lora_request = adapter
            super().add_request(request)

    return Flawed


# Streaming input.


def keeps_the_last_token_of_a_turn(base: SchedulerClass) -> SchedulerClass:
    """Put the next chunk behind the token that was sampled but not computed."""

    class Flawed(base):  # type: ignore[misc]
        def _update_request_as_session(self, session: Request, update: Any) -> None:
            num_computed_tokens = session.num_computed_tokens
            session.num_computed_tokens = max(num_computed_tokens, session.num_tokens)
            super()._update_request_as_session(session, update)
            session.num_computed_tokens = num_computed_tokens

    return Flawed


def keeps_hashes_of_discarded_tokens(base: SchedulerClass) -> SchedulerClass:
    """Hash only what has no hash yet when a session goes on."""

    class Flawed(base):  # type: ignore[misc]
        def _update_request_as_session(self, session: Request, update: Any) -> None:
            block_hashes = list(session.block_hashes)
            super()._update_request_as_session(session, update)
            session.block_hashes[: len(block_hashes)] = block_hashes

    return Flawed


def forgets_the_slots_of_idle_sessions(base: SchedulerClass) -> SchedulerClass:
    """Admit as many requests as if idle sessions had no place in the model runner."""

    class Flawed(base):  # type: ignore[misc]
        num_waiting_for_streaming_input: int

        def schedule(self, *arguments: Any) -> SchedulerOutput:
            num_idle = self.num_waiting_for_streaming_input
            self.num_waiting_for_streaming_input = 0
            try:
                return super().schedule(*arguments)
            finally:
                self.num_waiting_for_streaming_input = num_idle

    return Flawed


def queues_sessions_behind_others(base: SchedulerClass) -> SchedulerClass:
    """Keep sessions that hold blocks in the queue of those that don't."""

    class Flawed(base):  # type: ignore[misc]
        @staticmethod
        def _holds_kv_blocks(_request: Request) -> bool:
            return False

    return Flawed


def delivers_output_of_a_finished_turn(base: SchedulerClass) -> SchedulerClass:
    """Deliver what was in flight when a turn ended."""

    class Flawed(base):  # type: ignore[misc]
        def _handle_stopped_request(self, request: Request) -> bool:
            is_finished = super()._handle_stopped_request(request)
            request.drop_stale_output = False
            return bool(is_finished)

    return Flawed


def ends_sessions_at_once(base: SchedulerClass) -> SchedulerClass:
    """Abort a session when its client has no more input, although a turn is under way."""

    class Flawed(base):  # type: ignore[misc]
        def add_request(self, request: Request) -> None:
            if request.request_id in self.requests and not request.resumable:
                self.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
            else:
                super().add_request(request)

    return Flawed


def goes_on_by_arrival(base: SchedulerClass) -> SchedulerClass:
    """Leave a session its first arrival time."""

    class Flawed(base):  # type: ignore[misc]
        def _update_request_as_session(self, session: Request, update: Any) -> None:
            update.arrival_time = session.arrival_time
            super()._update_request_as_session(session, update)

    return Flawed


def clears_drafts_of_idle_sessions(base: SchedulerClass) -> SchedulerClass:
    """Take no draft tokens for a session whose turn has just ended."""

    class Flawed(base):  # type: ignore[misc]
        def update_draft_token_ids(self, proposed: DraftTokenIds) -> None:
            super().update_draft_token_ids(proposed)
            for request in self.requests.values():
                if request.status != RequestStatus.RUNNING:
                    request.spec_token_ids = []

    return Flawed


# Engines of several ranks.


def decodes_without_a_cadence(base: SchedulerClass) -> SchedulerClass:
    """Schedule the decodes of a request as soon as the step before is under way."""

    def change(scheduler: Any) -> None:
        scheduler.decode_stagger = 1

    return _once_built(base, change)


def tells_the_first_stage_nothing(base: SchedulerClass) -> SchedulerClass:
    """Send no sampled tokens, as for an engine of one stage."""

    def change(scheduler: Any) -> None:
        scheduler.use_pp = False

    return _once_built(base, change)


def sends_the_latest_token_only(base: SchedulerClass) -> SchedulerClass:
    """Send the first stage one token of each request, although it may lack several."""

    class Flawed(base):  # type: ignore[misc]
        def _make_cached_request_data(self, *arguments: Any) -> Any:
            data = super()._make_cached_request_data(*arguments)
            data.new_token_ids = [token_ids[-1:] for token_ids in data.new_token_ids]
            return data

    return Flawed


def admits_prefills_in_every_step(base: SchedulerClass) -> SchedulerClass:
    """Ignore that the engine puts off prefills."""

    class Flawed(base):  # type: ignore[misc]
        def schedule(self, _throttle_prefills: bool = False) -> SchedulerOutput:
            return super().schedule(False)

    return Flawed


def puts_off_prefills_although_saturated(base: SchedulerClass) -> SchedulerClass:
    """Forget that the last prefills left requests waiting."""

    class Flawed(base):  # type: ignore[misc]
        def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
            self.prefill_capacity_bound = False
            return super().schedule(throttle_prefills)

    return Flawed


# Chunked local attention.


def _chunked_managers(scheduler: Any) -> list[Any]:
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return [manager for manager in managers if hasattr(manager, "attention_chunk_size")]


def keeps_blocks_of_the_chunk_before(base: SchedulerClass) -> SchedulerClass:
    """Free a chunk's blocks with the second token of the next one."""

    def change(scheduler: Any) -> None:
        for manager in _chunked_managers(scheduler):
            count = manager.get_num_skipped_tokens
            manager.get_num_skipped_tokens = lambda computed, count=count: count(
                max(computed - 1, 0)
            )

    return _once_built(base, change)


def slides_chunks_as_windows(base: SchedulerClass) -> SchedulerClass:
    """Free what is further behind than a chunk is long."""

    def change(scheduler: Any) -> None:
        for manager in _chunked_managers(scheduler):
            size = manager.attention_chunk_size
            manager.get_num_skipped_tokens = lambda computed, size=size: max(computed - size + 1, 0)

    return _once_built(base, change)


def hits_only_what_is_cached(base: SchedulerClass) -> SchedulerClass:
    """Look for cached blocks of chunks that no token will see."""

    class Flawed(base):  # type: ignore[misc]
        def _get_local_prefix_cache_hit(self, request: Request, *limit: Any) -> Any:
            blocks, *rest = super()._get_local_prefix_cache_hit(request, *limit)
            if not any(not block.is_null for group in blocks.blocks for block in group):
                return self.kv_cache_manager.empty_kv_cache_blocks, 0, 0, False
            return blocks, *rest

    return Flawed


SERVING_FLAWS: list[tuple[Flaw, str]] = [
    (keeps_rejected_drafts, "sync-speculating"),
    (keeps_rejected_drafts, "async-speculating"),
    (rolls_back_stale_rejections, "speculating-preempting"),
    (trusts_its_memory_of_drafts, "async-speculating"),
    (forgets_the_lookahead, "sync-eagle"),
    (keeps_the_eagle_block, "sync-eagle"),
    (keeps_the_eagle_block, "eagle-without-lookahead"),
    (drops_the_eagle_block_of_every_group, "eagle-without-lookahead"),
    (caches_windows_without_the_eagle_block, "eagle-without-lookahead"),
    (retains_no_tokens_for_modules, "multi-module-mtp"),
    (ends_chunks_within_the_lookahead, "multi-module-mtp"),
    (drafts_in_no_budget, "speculating-by-draft-model"),
    (pads_no_decodes, "speculating-preempting"),
    (looks_up_the_next_batch_size, "dynamic-speculation"),
    (drafts_for_prefill_chunks, "sync-speculating"),
    (believes_every_draft, "speculating-structured"),
    (counts_refused_drafts, "speculating-structured"),
    (summarizes_detailed_metrics, "async-eagle"),
    (resumes_with_old_drafts, "speculating-preempting"),
    (packs_any_number_of_adapters, "sync-lora"),
    (stops_at_a_full_set_of_adapters, "async-lora"),
    (hashes_adapters_by_name, "sync-lora"),
    (keeps_the_last_token_of_a_turn, "sync-sessions"),
    (keeps_hashes_of_discarded_tokens, "async-sessions"),
    (forgets_the_slots_of_idle_sessions, "sync-sessions"),
    (queues_sessions_behind_others, "sync-sessions"),
    (delivers_output_of_a_finished_turn, "async-sessions"),
    (ends_sessions_at_once, "sync-sessions"),
    (goes_on_by_arrival, "sessions-by-priority"),
    (clears_drafts_of_idle_sessions, "sessions-speculating"),
    (decodes_without_a_cadence, "async-pipeline-v2"),
    (tells_the_first_stage_nothing, "sync-pipeline"),
    (sends_the_latest_token_only, "sync-pipeline"),
    (admits_prefills_in_every_step, "data-parallel"),
    (puts_off_prefills_although_saturated, "data-parallel"),
    (keeps_blocks_of_the_chunk_before, "sync-chunked-local"),
    (slides_chunks_as_windows, "async-chunked-local"),
    (hits_only_what_is_cached, "chunked-local-alone"),
]
