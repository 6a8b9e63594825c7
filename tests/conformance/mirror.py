"""A scheduler of vLLM's that schedules nothing: it shows the state of a native one.

Tests read a scheduler's state from vLLM's objects: counters of requests, queues, block tables,
reference counts. Here `SparkScheduler.snapshot()` is written into such objects after each call.
What is written is compared before the next call: a test that changes the state by hand would
otherwise seem to pass, although its change reached nobody.
"""

from collections.abc import Iterable
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats
from vllm.v1.request import Request, RequestStatus

from . import kv_cache_mirror
from .kv_cache_mirror import Snapshot

_COUNTERS = (
    "num_computed_tokens",
    "num_output_placeholders",
    "num_in_flight_tokens",
    "num_stale_output_tokens",
    "num_preemptions",
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
        # Written only for those that look: it takes time in proportion to the number of blocks.
        self._shows_kv_cache = False
        self._snapshot: Snapshot | None = None
        self._num_tokens: dict[str, int] = {}
        self._written = self._fingerprint()

    # ---- what no snapshot says ----

    def note_schedule(self, output: SchedulerOutput, *, throttled: bool) -> None:
        """Take notice of a step whose counters are written already."""
        stock = self.stock
        stock.finished_req_ids.clear()
        for request_id in output.num_scheduled_tokens:
            request = stock.requests[request_id]
            request.is_prefill_chunk = request.num_computed_tokens < request.num_tokens
        if not throttled:
            stock.prefill_capacity_bound = len(stock.waiting) > len(stock.deferred_waiting)
        self._written = self._fingerprint()

    def note_outputs(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Append the tokens that a step brought; its counters are still to be written.

        A request that ends keeps the counters of its last step.
        """
        for of_client in outputs.values():
            for output in of_client.outputs:
                self._note_output(output)

    def _note_output(self, output: EngineCoreOutput) -> None:
        request = self.stock.requests[output.request_id]
        num_tokens = self._num_tokens[request.request_id] + len(output.new_token_ids)
        # Of the few requests whose tokens Python looks at, the native scheduler has appended them.
        num_missing = num_tokens - request.num_tokens
        if num_missing > 0:
            request.append_output_token_ids(list(output.new_token_ids[-num_missing:]))
        if output.finish_reason is not None:
            request.stop_reason = output.stop_reason
            self.note_finished([request])

    def note_finished(self, requests: Iterable[Request]) -> None:
        """Remember requests that ended, until the next step tells of them."""
        self.stock.finished_req_ids |= {request.request_id for request in requests}

    def add_prefix_cache_stats(self, stats: PrefixCacheStats) -> None:
        """Add to the counters that vLLM's KV cache manager keeps from one output to the next."""
        kept = self.stock.kv_cache_manager.prefix_cache_stats
        for name in _PREFIX_CACHE_COUNTERS:
            setattr(kept, name, getattr(kept, name) + getattr(stats, name))

    # ---- the state ----

    def write(self, requests: dict[str, Request], snapshot: Snapshot) -> None:
        """Show this state, of these requests."""
        stock = self.stock
        stock.requests = dict(requests)
        for request_id, state in snapshot["requests"].items():
            _write_request(requests[request_id], state)
        stock.running = [requests[request_id] for request_id in snapshot["running"]]
        stock.waiting = create_request_queue(stock.policy)
        for request_id in snapshot["waiting"]:
            stock.waiting.add_request(requests[request_id])
        stock.deferred_waiting = {it for it in stock.waiting if _waits_for_grammar(it)}
        if self._shows_kv_cache:
            kv_cache_mirror.write(stock.kv_cache_manager, snapshot)
        self._snapshot = snapshot
        self._num_tokens = {it.request_id: it.num_tokens for it in requests.values()}
        self._written = self._fingerprint()

    def show_kv_cache(self) -> Any:
        """Return vLLM's KV cache manager; from now on it is kept at the native state, too."""
        if not self._shows_kv_cache:
            self.check_untouched()
            self._shows_kv_cache = True
            if self._snapshot is not None:
                kv_cache_mirror.write(self.stock.kv_cache_manager, self._snapshot)
            self._written = self._fingerprint()
        return self.stock.kv_cache_manager

    def check_num_deferred(self, stats: SchedulerStats) -> None:
        """Raise MirrorIsWrong if the native scheduler counts other deferred requests."""
        num_deferred = len(self.stock.deferred_waiting)
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
        }
        if self._shows_kv_cache:
            fingerprint["kv_cache_manager"] = kv_cache_mirror.fingerprint(stock.kv_cache_manager)
        return fingerprint


def _waits_for_grammar(request: Request) -> bool:
    return bool(request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR)


def _write_request(request: Request, state: dict[str, Any]) -> None:
    if request.num_tokens != state["num_tokens"]:
        raise MirrorIsWrong(
            f"request {request.request_id} has {state['num_tokens']} tokens, "
            f"but its outputs make {request.num_tokens}"
        )
    request.status = RequestStatus[state["status"]]
    for name in _COUNTERS:
        setattr(request, name, state[name])


def _request_state(request: Request) -> tuple[Any, ...]:
    return (
        request.status,
        request.num_tokens,
        request.resumable,
        tuple(request.spec_token_ids),
        *(getattr(request, name) for name in _COUNTERS),
    )
