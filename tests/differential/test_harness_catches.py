"""The differential harness notices planted errors, and none where there is none.

The candidates here are vLLM's own schedulers with one mistake each, of the kinds that a
reimplementation makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from sparksched.verify.compare import first_difference
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.request import Request, RequestStatus

from testkit.worlds.candidates import CandidateChooser, stock_scheduler_class
from testkit.worlds.configuration import Configuration
from testkit.worlds.scenarios import NAMED_SETTINGS
from testkit.worlds.world import SchedulerClass

from .feature_flaws import FEATURE_FLAWS
from .finding import find
from .runner import Coverage, SchedulersDiffer, run_scenario
from .serving_flaws import SERVING_FLAWS
from .state_flaws import STATE_FLAWS

MOST_SEEDS = 20
NUM_STEPS = 150

Flaw = Callable[[SchedulerClass], SchedulerClass]


def frees_blocks_in_wrong_order(base: SchedulerClass) -> SchedulerClass:
    """Put a request's blocks on the free list head first instead of tail first."""

    class Flawed(base):  # type: ignore[misc, valid-type]
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            block_pool = self.kv_cache_manager.block_pool
            free_blocks = block_pool.free_blocks
            block_pool.free_blocks = lambda blocks: free_blocks(reversed(list(blocks)))

    return Flawed


def keeps_one_token_behind_the_window(base: SchedulerClass) -> SchedulerClass:
    """Let the sliding window end one token later."""

    class Flawed(base):  # type: ignore[misc, valid-type]
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            for manager in self.kv_cache_manager.coordinator.single_type_managers:
                manager.get_num_skipped_tokens = _one_less(manager.get_num_skipped_tokens)

    return Flawed


def _one_less(count: Callable[[int], int]) -> Callable[[int], int]:
    return lambda num_computed_tokens: max(count(num_computed_tokens) - 1, 0)


def loses_a_placeholder(base: SchedulerClass) -> SchedulerClass:
    """Forget one output placeholder now and then."""

    class Flawed(base):  # type: ignore[misc, valid-type]
        def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
            super()._update_after_schedule(scheduler_output)
            for request in self.running[3:4]:
                request.num_output_placeholders = max(request.num_output_placeholders - 1, 0)

    return Flawed


def misses_long_prefix_hits(base: SchedulerClass) -> SchedulerClass:
    """Find no cached blocks for prompts above a length."""

    class Flawed(base):  # type: ignore[misc, valid-type]
        def _get_local_prefix_cache_hit(self, request: Request, *limit: Any) -> Any:
            if request.num_tokens > 40:
                return self.kv_cache_manager.empty_kv_cache_blocks, 0, 0, False
            return super()._get_local_prefix_cache_hit(request, *limit)

    return Flawed


def finishes_in_sorted_order(base: SchedulerClass) -> SchedulerClass:
    """Finish aborted requests in the order of their ids instead of the set's."""

    class Flawed(base):  # type: ignore[misc, valid-type]
        def finish_requests(
            self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
        ) -> list[Request]:
            if request_ids is None or isinstance(request_ids, str):
                return super().finish_requests(request_ids, finished_status)
            finished = []
            for request_id in sorted(set(request_ids)):
                finished += super().finish_requests(request_id, finished_status)
            return finished

    return Flawed


def counts_one_waiting_request_too_many(base: SchedulerClass) -> SchedulerClass:
    """Be off by one in the statistics."""

    class Flawed(base):  # type: ignore[misc, valid-type]
        def make_stats(self, *arguments: Any, **named: Any) -> Any:
            stats = super().make_stats(*arguments, **named)
            if stats is not None and stats.num_waiting_reqs > 2:
                stats.num_waiting_reqs += 1
            return stats

    return Flawed


def reports_no_preemptions_as_none(base: SchedulerClass) -> SchedulerClass:
    """Give None where vLLM gives an empty set."""

    class Flawed(base):  # type: ignore[misc, valid-type]
        def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
            output = super().schedule(throttle_prefills)
            output.preempted_req_ids = output.preempted_req_ids or None
            return output

    return Flawed


def drops_every_stale_output(base: SchedulerClass) -> SchedulerClass:
    """Discard the output in flight of any preempted request."""

    class Flawed(base):  # type: ignore[misc, valid-type]
        def _preempt_request(
            self, request: Request, timestamp: float, drop_stale_output: bool = False
        ) -> None:
            super()._preempt_request(request, timestamp, drop_stale_output=True)

    return Flawed


def forgets_that_stale_outputs_were_dropped(base: SchedulerClass) -> SchedulerClass:
    """Deliver dropped output when its request is preempted once more before it drains."""

    class Flawed(base):  # type: ignore[misc, valid-type]
        def _preempt_request(
            self, request: Request, timestamp: float, drop_stale_output: bool = False
        ) -> None:
            request.drop_stale_output = False
            super()._preempt_request(request, timestamp, drop_stale_output)

    return Flawed


def ignores_the_cache_salt(base: SchedulerClass) -> SchedulerClass:
    """Share cached blocks between requests of different salts."""

    class Flawed(base):  # type: ignore[misc, valid-type]
        def add_request(self, request: Request) -> None:
            request.cache_salt = None
            request.block_hashes = []
            request.update_block_hashes()
            super().add_request(request)

    return Flawed


def reads_the_clock_twice(base: SchedulerClass) -> SchedulerClass:
    """Stamp events of a step with another time than the step's."""

    class Flawed(base):  # type: ignore[misc, valid-type]
        def _preempt_request(
            self, request: Request, timestamp: float, drop_stale_output: bool = False
        ) -> None:
            super()._preempt_request(request, timestamp + 1e-6, drop_stale_output)

    return Flawed


def reuses_a_returned_list(base: SchedulerClass) -> SchedulerClass:
    """Overwrite the previous step's output, which may still be in flight."""

    class Flawed(base):  # type: ignore[misc, valid-type]
        previous_ids: list[str] | None = None

        def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
            output = super().schedule(throttle_prefills)
            if self.previous_ids is not None:
                self.previous_ids[:] = output.scheduled_cached_reqs.req_ids
            self.previous_ids = output.scheduled_cached_reqs.req_ids
            return output

    return Flawed


def recycles_outputs(base: SchedulerClass) -> SchedulerClass:
    """Clear the previous step's outputs, which may not have been sent yet."""

    class Flawed(base):  # type: ignore[misc, valid-type]
        previous_outputs: dict[int, Any] | None = None

        def update_from_output(self, *arguments: Any) -> dict[int, Any]:
            outputs = super().update_from_output(*arguments)
            if self.previous_outputs:
                self.previous_outputs.clear()
            self.previous_outputs = outputs
            return outputs

    return Flawed


def appends_tokens_after_the_grammar(base: SchedulerClass) -> SchedulerClass:
    """Show the structured output manager a request that lacks its newest token."""

    class Flawed(base):  # type: ignore[misc, valid-type]
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            manager = self.structured_output_manager
            accept_tokens = manager.accept_tokens

            def accept_before_append(request: Request, new_token_ids: list[int]) -> bool:
                hidden = request._all_token_ids.pop()
                try:
                    return accept_tokens(request, new_token_ids)
                finally:
                    request._all_token_ids.append(hidden)

            manager.accept_tokens = accept_before_append

    return Flawed


def keeps_one_block_more_free(base: SchedulerClass) -> SchedulerClass:
    """Round the watermark up instead of down."""

    class Flawed(base):  # type: ignore[misc, valid-type]
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            self.kv_cache_manager.watermark_blocks += 1

    return Flawed


def breaks_priority_ties_by_age(base: SchedulerClass) -> SchedulerClass:
    """Order equal priorities and arrival times by insertion instead of by request id."""

    class Flawed(base):  # type: ignore[misc, valid-type]
        num_added = 0

        def add_request(self, request: Request) -> None:
            self.num_added += 1
            request.arrival_time += self.num_added * 1e-6
            super().add_request(request)

    return Flawed


def requeues_skipped_requests_in_reverse(base: SchedulerClass) -> SchedulerClass:
    """Put back the requests that a step skipped in the order in which they were met."""

    class Flawed(base):  # type: ignore[misc, valid-type]
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            prepend = self.waiting.prepend_requests
            self.waiting.prepend_requests = lambda requests: prepend(reversed(list(requests)))

    return Flawed


def remembers_the_last_step_across_a_reset(base: SchedulerClass) -> SchedulerClass:
    """Omit the tokens of requests that a reset has flushed from the model runner's batch."""

    class Flawed(base):  # type: ignore[misc, valid-type]
        def reset_prefix_cache(self, *arguments: bool) -> bool:
            scheduled_ids = set(self.prev_step_scheduled_req_ids)
            succeeded = super().reset_prefix_cache(*arguments)
            self.prev_step_scheduled_req_ids = scheduled_ids
            return succeeded

    return Flawed


def retains_every_checkpoint(base: SchedulerClass) -> SchedulerClass:
    """Ignore the retention interval of the prefix cache."""

    class Flawed(base):  # type: ignore[misc, valid-type]
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            self.kv_cache_manager.coordinator.retention_interval = None

    return Flawed


def stops_one_token_past_the_context(base: SchedulerClass) -> SchedulerClass:
    """Let requests grow one token longer than the model's length."""

    class Flawed(base):  # type: ignore[misc, valid-type]
        def _update_request_with_output(self, *arguments: Any, **named: Any) -> Any:
            self.max_model_len += 1
            try:
                return super()._update_request_with_output(*arguments, **named)
            finally:
                self.max_model_len -= 1

    return Flawed


def counts_repeated_prefills_as_new(base: SchedulerClass) -> SchedulerClass:
    """Count the cache lookups of resumed requests with those of new ones."""

    class Flawed(base):  # type: ignore[misc, valid-type]
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            manager = self.kv_cache_manager
            record = manager.record_prefix_cache_stats

            def record_as_new(request: Request, num_hits: int) -> None:
                num_preemptions, request.num_preemptions = request.num_preemptions, 0
                record(request, num_hits)
                request.num_preemptions = num_preemptions

            manager.record_prefix_cache_stats = record_as_new

    return Flawed


def sends_statistics_to_the_last_client(base: SchedulerClass) -> SchedulerClass:
    """Attach the step's statistics to the last client instead of the first."""

    class Flawed(base):  # type: ignore[misc, valid-type]
        def update_from_output(self, *arguments: Any) -> dict[int, Any]:
            outputs = super().update_from_output(*arguments)
            clients = list(outputs.values())
            if len(clients) > 1:
                clients[-1].scheduler_stats = clients[0].scheduler_stats
                clients[0].scheduler_stats = None
            return outputs

    return Flawed


FLAWS: list[tuple[Flaw, str]] = [
    (frees_blocks_in_wrong_order, "sync-full"),
    (keeps_one_token_behind_the_window, "sync-sliding"),
    (loses_a_placeholder, "async-full"),
    (misses_long_prefix_hits, "async-hybrid"),
    (finishes_in_sorted_order, "sync-full"),
    (counts_one_waiting_request_too_many, "async-full"),
    (reports_no_preemptions_as_none, "sync-full"),
    (drops_every_stale_output, "async-preempting"),
    (forgets_that_stale_outputs_were_dropped, "deep-queue"),
    (ignores_the_cache_salt, "sync-full"),
    (reads_the_clock_twice, "sync-preempting"),
    (reuses_a_returned_list, "async-full"),
    (recycles_outputs, "async-full"),
    (appends_tokens_after_the_grammar, "async-full"),
    (keeps_one_block_more_free, "sync-preempting"),
    (breaks_priority_ties_by_age, "preempting-by-priority"),
    (requeues_skipped_requests_in_reverse, "sync-full"),
    (remembers_the_last_step_across_a_reset, "sync-full"),
    (retains_every_checkpoint, "async-hybrid"),
    (stops_one_token_past_the_context, "sync-full"),
    (counts_repeated_prefills_as_new, "sync-preempting"),
    (sends_statistics_to_the_last_client, "async-full"),
    *FEATURE_FLAWS,
    *SERVING_FLAWS,
    *STATE_FLAWS,
]


def _with_flaw(flaw: Flaw) -> CandidateChooser:
    def choose(configuration: Configuration) -> SchedulerClass:
        return flaw(stock_scheduler_class(configuration))

    return choose


@pytest.mark.parametrize(("flaw", "name"), FLAWS, ids=lambda value: getattr(value, "__name__", ""))
def test_planted_error_is_found(flaw: Flaw, name: str) -> None:
    def shows(seed: int) -> bool:
        try:
            run_scenario(name, seed, NUM_STEPS, _with_flaw(flaw))
        except SchedulersDiffer:
            return True
        return False

    find(flaw.__name__, name, MOST_SEEDS, shows)


@pytest.mark.full
@pytest.mark.parametrize("name", NAMED_SETTINGS)
def test_stock_equals_stock(name: str) -> None:
    run_scenario(name, 0, NUM_STEPS, stock_scheduler_class)


def test_trace_depends_on_nothing_but_the_seed() -> None:
    coverages = [Coverage(), Coverage(), Coverage()]
    for seed, coverage in zip((3, 3, 4), coverages, strict=True):
        run_scenario("async-hybrid", seed, NUM_STEPS, stock_scheduler_class, coverage=coverage)
    assert coverages[0] == coverages[1]
    assert coverages[0] != coverages[2]


def test_report_says_how_to_reproduce() -> None:
    with pytest.raises(SchedulersDiffer) as failure:
        run_scenario("sync-full", 0, NUM_STEPS, _with_flaw(reports_no_preemptions_as_none))
    message = str(failure.value)
    assert "type of schedule().preempted_req_ids" in message
    assert "reference: set() (set)" in message
    assert "candidate: None (NoneType)" in message
    assert "--config sync-full --seeds 0:1 --steps" in message


@pytest.mark.parametrize(
    ("reference", "candidate"),
    [
        (set(), None),
        ([1], (1,)),
        ([1], [True]),
        ([1], [1.0]),
        ([1, 2], [1]),
        ([[1]], [[np.int64(1)]]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"a": 1}, {"a": 2}),
        ({"a"}, {"a", "b"}),
        (float("nan"), 0.0),
        (np.zeros(2, np.int32), np.zeros(2, np.int64)),
        (np.zeros((1, 2)), np.zeros((2, 1))),
        (torch.zeros(2), torch.ones(2)),
        (EngineCoreOutput("a", [1]), EngineCoreOutput("a", [2])),
        (RequestStatus.RUNNING, RequestStatus.WAITING),
        (RequestStatus.RUNNING, int(RequestStatus.RUNNING)),
    ],
)
def test_comparison_tells_apart(reference: object, candidate: object) -> None:
    assert first_difference(reference, candidate, "value") is not None
    assert first_difference([{"key": reference}], [{"key": candidate}], "value") is not None


@pytest.mark.parametrize(
    "value", [None, [], [1, 2], {"a": {"b"}}, float("nan"), np.ones(2), torch.ones(2), (1, "a")]
)
def test_comparison_accepts_equals(value: object) -> None:
    assert first_difference([value], [value], "value") is None


def test_comparison_names_the_place() -> None:
    reference = {"requests": [EngineCoreOutput("a", [1, 2])]}
    candidate = {"requests": [EngineCoreOutput("a", [1, 3])]}
    difference = first_difference(reference, candidate, "step")
    assert difference is not None
    assert difference.path == "step['requests'][0].new_token_ids[1]"
    assert (difference.reference, difference.candidate) == (2, 3)
