"""A scheduler of vLLM's that schedules nothing: it shows the state of a native one.

Tests read a scheduler's state from vLLM's objects: counters of requests, queues, block tables,
reference counts. Here `SparkScheduler.snapshot()` is written into such objects after each call.
What is written is compared before the next call: a test that changes the state by hand would
otherwise seem to pass, although its change reached nobody.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import (
    KV_FETCH_COMPLETED_WAITING,
    PrefixCacheStats,
    RequestSpecDecodeMetrics,
    SchedulerStats,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from . import kv_cache_mirror
from .kv_cache_mirror import Snapshot
from .kv_transfer_mirror import DeferredFrees

_COUNTERS = (
    "num_computed_tokens",
    "num_output_placeholders",
    "num_in_flight_tokens",
    "num_stale_output_tokens",
    "num_preemptions",
    "next_decode_eligible_step",
)

_PREFIX_CACHE_COUNTERS = (
    "requests",
    "queries",
    "hits",
    "preempted_requests",
    "preempted_queries",
    "preempted_hits",
)


class StateWasChangedByHand(Exception):
    """A test has changed what only shows the native scheduler's state."""


class MirrorIsWrong(Exception):
    """The native scheduler says something else than what is shown here."""


class Mirror:
    """Keeps a scheduler of vLLM's at the state of a native one."""

    def __init__(self, stock: Any) -> None:
        self.stock = stock
        # What a test has assigned that is part of the configuration.
        self.settings: dict[str, Any] = {}
        # Called for each preemption, with the request as it was before.
        self.preemption_observer: Callable[..., None] | None = None
        self._is_preempting = False
        # Kept for schedulers that defer frees.
        self._deferred_frees: DeferredFrees | None = None
        # Written only for those that look: it takes time in proportion to the number of blocks.
        self._shows_kv_cache = False
        self._snapshot: Snapshot | None = None
        self._num_tokens: dict[str, int] = {}
        self._new_token_ids: dict[str, list[int]] = {}
        self._written = self._fingerprint()

    # ---- what no snapshot says ----

    def note_schedule(self, output: SchedulerOutput, *, throttled: bool) -> None:
        """Take notice of a step whose counters are written already."""
        stock = self.stock
        stock.finished_req_ids.clear()
        self._note_cadence(output)
        if self._deferred_frees is not None:
            self._deferred_frees.num_scheduled_steps += output.total_num_scheduled_tokens > 0
        for request_id in output.num_scheduled_tokens:
            request = stock.requests[request_id]
            request.is_prefill_chunk = request.num_computed_tokens < request.num_tokens
            if self._deferred_frees is not None:
                request.last_sched_seq = self._deferred_frees.num_scheduled_steps
        if not throttled:
            stock.prefill_capacity_bound = len(stock.waiting) > len(stock.deferred_waiting)
        self._written = self._fingerprint()

    def _note_cadence(self, output: SchedulerOutput) -> None:
        """Count a step, and whether it computes prompts, where vLLM's scheduler does."""
        stock = self.stock
        stock.current_step += 1
        if not hasattr(stock, "num_executed_steps"):
            return
        stock.num_executed_steps += output.total_num_scheduled_tokens > 0
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            request = stock.requests[request_id]
            num_missing = request.num_tokens - (request.num_computed_tokens - num_tokens)
            is_prefill = request.is_prefill_chunk or num_missing > 1
            if is_prefill and stock.local_prefill_interval > 1:
                stock.last_prefill_step = stock.num_executed_steps

    def note_report(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> None:
        """Take notice of a step that has come back; what it changed is still to be written."""
        if self._deferred_frees is not None:
            num_tokens = scheduler_output.total_num_scheduled_tokens
            self._deferred_frees.num_processed_steps += num_tokens > 0
        report = model_runner_output.kv_connector_output
        if report is not None:
            self.stock.finished_recving_kv_req_ids.update(report.finished_recving or ())

    def note_outputs(
        self, outputs: dict[int, EngineCoreOutputs], scheduler_output: SchedulerOutput
    ) -> None:
        """Remember the tokens that a step brought; its counters are still to be written.

        A request that ends keeps the counters of its last step, but for what was in flight in it.
        """
        for of_client in outputs.values():
            for output in of_client.outputs:
                self._note_output(output, scheduler_output)

    def _note_output(self, output: EngineCoreOutput, step: SchedulerOutput) -> None:
        self._check_dropped(output)
        self._new_token_ids[output.request_id] = list(output.new_token_ids)
        if output.finish_reason is not None:
            request = self.stock.requests[output.request_id]
            num_tokens = self._num_tokens[request.request_id] + len(output.new_token_ids)
            self._append_tokens(request, num_tokens)
            request.stop_reason = output.stop_reason
            num_scheduled_tokens = step.num_scheduled_tokens.get(request.request_id, 0)
            request.num_in_flight_tokens -= num_scheduled_tokens
            # One for each of its drafts, rejected or not, and one for the token behind them.
            num_resolved = 1 + len(step.scheduled_spec_decode_tokens.get(request.request_id, ()))
            num_placeholders = request.num_output_placeholders - num_resolved
            request.num_output_placeholders = max(0, num_placeholders)
            num_stale_tokens = request.num_stale_output_tokens - num_scheduled_tokens
            request.num_stale_output_tokens = max(0, num_stale_tokens)
            self.note_finished([request])

    def _check_dropped(self, output: EngineCoreOutput) -> None:
        """Raise MirrorIsWrong if what is said to be dropped is delivered."""
        request = self.stock.requests[output.request_id]
        is_dropped = request.drop_stale_output and request.num_stale_output_tokens > 0
        if is_dropped and output.new_token_ids:
            raise MirrorIsWrong(f"request {output.request_id} should get no stale tokens")

    def _append_tokens(self, request: Request, num_tokens: int) -> None:
        """Make a request so long, with the tokens that this step brought.

        Of the few requests whose tokens Python looks at, the native scheduler has appended them.
        """
        num_missing = num_tokens - request.num_tokens
        new_token_ids = self._new_token_ids.pop(request.request_id, [])
        if 0 < num_missing <= len(new_token_ids):
            request.append_output_token_ids(new_token_ids[-num_missing:])

    def note_finished(self, requests: Iterable[Request]) -> None:
        """Remember requests that ended, until the next step tells of them."""
        self.stock.finished_req_ids |= {request.request_id for request in requests}

    def _tell_of_preemptions(self, snapshot: Snapshot) -> None:
        if self.preemption_observer is None:
            return
        self._is_preempting = True
        for request_id, state in snapshot["requests"].items():
            if self._was_preempted(request_id, state):
                self.preemption_observer(self.stock.requests[request_id], 0.0)
        self._is_preempting = False

    def _was_preempted(self, request_id: str, state: dict[str, Any]) -> bool:
        """Return whether a call that led to this state has preempted a request."""
        # Not the request's own counter: connectors are shown requests that are up to date.
        before = self._snapshot["requests"].get(request_id) if self._snapshot else None
        return before is not None and before["num_preemptions"] < state["num_preemptions"]

    def note_preemption(self, _request: Request, _timestamp: float, **_options: Any) -> None:
        """Stand in for vLLM's function that preempts, for those that wrap it to observe it."""
        if not self._is_preempting:
            raise StateWasChangedByHand("_preempt_request() was called")

    def add_prefix_cache_stats(self, stats: PrefixCacheStats) -> None:
        """Add to the counters that vLLM's KV cache manager keeps from one output to the next."""
        kept = self.stock.kv_cache_manager.prefix_cache_stats
        for name in _PREFIX_CACHE_COUNTERS:
            setattr(kept, name, getattr(kept, name) + getattr(stats, name))

    # ---- the state ----

    def write(
        self, requests: dict[str, Request], snapshot: Snapshot, *, drops_stale_output: bool
    ) -> None:
        """Show this state, of these requests.

        `drops_stale_output` is said of those that were preempted since the last call: no snapshot
        says it.
        """
        stock = self.stock
        self._tell_of_preemptions(snapshot)
        stock.requests = dict(requests)
        for request_id, state in snapshot["requests"].items():
            request = requests[request_id]
            self._append_tokens(request, state["num_tokens"])
            if self._was_preempted(request_id, state):
                is_dropping = request.drop_stale_output and request.num_stale_output_tokens > 0
                request.drop_stale_output = drops_stale_output or is_dropping
            _write_request(request, state)
        stock.running = [requests[request_id] for request_id in snapshot["running"]]
        self._write_waiting([requests[request_id] for request_id in snapshot["waiting"]])
        num_holding = len(stock.kv_holding_waiting)
        if num_holding != snapshot["num_kv_holding"]:
            raise MirrorIsWrong(
                f"{snapshot['num_kv_holding']} waiting requests hold blocks, not {num_holding}"
            )
        self._write_finished_loads()
        if self._deferred_frees is not None and self._snapshot is not None:
            self._deferred_frees.note(self._snapshot, snapshot)
        if self._shows_kv_cache:
            kv_cache_mirror.write(stock.kv_cache_manager, snapshot)
        self._snapshot = snapshot
        self._num_tokens = {it.request_id: it.num_tokens for it in requests.values()}
        self._written = self._fingerprint()

    def _write_waiting(self, requests: list[Request]) -> None:
        stock = self.stock
        stock.waiting = create_request_queue(stock.policy)
        stock.kv_holding_waiting = create_request_queue(stock.policy)
        for request in requests:
            holds_blocks = stock._holds_kv_blocks(request)
            (stock.kv_holding_waiting if holds_blocks else stock.waiting).add_request(request)
        blocked = {it for it in requests if stock._is_blocked_waiting_status(it.status)}
        stock.deferred_waiting = blocked
        sessions = [it for it in blocked if it.status == RequestStatus.WAITING_FOR_STREAMING_REQ]
        stock.num_waiting_for_streaming_input = len(sessions)

    def _write_finished_loads(self) -> None:
        """Forget the loads that were reported of requests that don't wait for one any more."""
        stock = self.stock
        loading = RequestStatus.WAITING_FOR_REMOTE_KVS
        waiting = {id_ for id_, it in stock.requests.items() if it.status == loading}
        stock.finished_recving_kv_req_ids &= waiting

    def defer_frees(self, is_deferring: bool) -> None:
        """Look from now on which blocks wait for a step to come back, or don't."""
        self._deferred_frees = DeferredFrees() if is_deferring else None

    def show_deferred_frees(self) -> deque[tuple[int, list[Any]]]:
        """Return what vLLM's `deferred_frees` has."""
        if self._deferred_frees is None:
            return deque()
        if not self._deferred_frees.is_right:
            raise MirrorIsWrong("other blocks than these have no owner")
        blocks = self.stock.kv_cache_manager.block_pool.blocks
        entries = self._deferred_frees.entries
        return deque((fence, [blocks[it] for it in ids]) for fence, ids in entries)

    def num_steps(self) -> tuple[int, int]:
        """Return how many steps were scheduled, and came back: counted only for deferred frees."""
        frees = self._deferred_frees or DeferredFrees()
        return frees.num_scheduled_steps, frees.num_processed_steps

    def check_num_loaded(self, stats: SchedulerStats) -> None:
        """Raise MirrorIsWrong if the native scheduler counts fewer loads that have ended.

        It counts requests that don't wait for their load any more, too, until they run.
        """
        num_loaded = len(self.stock.finished_recving_kv_req_ids)
        num_counted = stats.num_kv_fetch_reqs_by_stage.get(KV_FETCH_COMPLETED_WAITING, 0)
        if num_counted < num_loaded:
            raise MirrorIsWrong(f"{num_loaded} loads seem to have ended, not {num_counted}")

    def show_kv_cache(self) -> Any:
        """Return vLLM's KV cache manager; from now on it is kept at the native state, too."""
        if not self._shows_kv_cache:
            self.check_untouched()
            self._shows_kv_cache = True
            if self._snapshot is not None:
                kv_cache_mirror.write(self.stock.kv_cache_manager, self._snapshot)
            self._written = self._fingerprint()
        return self.stock.kv_cache_manager

    def show_deferred(self, stats: SchedulerStats) -> None:
        """Show as many deferred requests as the native scheduler counts.

        It doesn't say which it has passed over. If they are all that wait, that is no question;
        else raise MirrorIsWrong.
        """
        stock = self.stock
        if stats.num_skipped_waiting_reqs == len(stock.waiting) + len(stock.kv_holding_waiting):
            stock.deferred_waiting = {*stock.waiting, *stock.kv_holding_waiting}
            self._written["deferred_waiting"] = set(map(id, stock.deferred_waiting))
        num_deferred = len(stock.deferred_waiting)
        if stats.num_skipped_waiting_reqs != num_deferred:
            raise MirrorIsWrong(
                f"{num_deferred} requests seem to be deferred, not {stats.num_skipped_waiting_reqs}"
            )

    def check_untouched(self) -> None:
        """Raise StateWasChangedByHand if the state is not as it was written."""
        for name, value in self._fingerprint().items():
            if value != self._written[name]:
                raise StateWasChangedByHand(name)

    def _fingerprint(self) -> dict[str, Any]:
        stock = self.stock
        fingerprint: dict[str, Any] = {
            "requests": {id(it): _request_state(it) for it in stock.requests.values()},
            "running": list(map(id, stock.running)),
            "waiting": list(map(id, stock.waiting)),
            "deferred_waiting": set(map(id, stock.deferred_waiting)),
            "kv_holding_waiting": list(map(id, stock.kv_holding_waiting)),
            "finished_req_ids": set(stock.finished_req_ids),
            "finished_recving_kv_req_ids": set(stock.finished_recving_kv_req_ids),
        }
        if self._shows_kv_cache:
            fingerprint["kv_cache_manager"] = kv_cache_mirror.fingerprint(stock.kv_cache_manager)
        return fingerprint


def _write_request(request: Request, state: dict[str, Any]) -> None:
    for name in ("num_tokens", "num_prompt_tokens"):
        if getattr(request, name) != state[name]:
            raise MirrorIsWrong(
                f"{name} of request {request.request_id} is {state[name]}, "
                f"but its inputs and outputs make {getattr(request, name)}"
            )
    request.status = RequestStatus[state["status"]]
    for name in _COUNTERS:
        setattr(request, name, state[name])
    request.spec_token_ids = list(state["spec_token_ids"])
    metrics = state["spec_decode_metrics"]
    request.spec_decode_metrics = metrics and RequestSpecDecodeMetrics(**metrics)


def _request_state(request: Request) -> tuple[Any, ...]:
    return (
        request.status,
        request.num_tokens,
        request.resumable,
        tuple(request.spec_token_ids),
        id(request.structured_output_request),
        *(getattr(request, name) for name in _COUNTERS),
    )
