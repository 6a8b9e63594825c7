"""What other settings would have done with the same load.

Requests arrive when they did, and generate as many tokens as they did. How long a step takes is
fitted to the recorded ones, so waiting times follow from what the scheduler decides. Resets, pauses
and the time that grammars take to compile are left out.
"""

from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from sparksched.compat.pacing import unpaceable
from sparksched.environment import DEFAULT_MAX_SLOWDOWN, DEFAULT_MAX_STALL_MS, Pacing
from sparksched.record.build import STOCK, RequestBuilder, build_scheduler
from sparksched.record.events import Settings, TraceError
from sparksched.record.keys import StandIns
from sparksched.record.load import Load, is_chunk
from sparksched.record.step_time import step_time

_OVER_STALL = ("for ordinary", "for long", "unexpected")

_PATIENCE = 1000
"""Steps without tokens in a row, after which nothing is expected any more."""


@dataclass(frozen=True)
class Change:
    """Settings in the place of the recorded ones; None leaves one as it was."""

    max_num_seqs: int | None = None
    num_gpu_blocks: int | None = None
    max_num_batched_tokens: int | None = None
    scheduling_policy: str | None = None
    max_stall_ms: float | None = None
    max_slowdown: float | None = None
    """Prompts are paced if it or the one before is there."""

    def apply(self, settings: Settings) -> Settings:
        """Return the settings with this change, and what hangs from it."""
        config = settings.scheduler_config
        max_num_active, max_num_scheduled = (
            config.max_num_active_seqs,
            config.max_num_scheduled_tokens,
        )
        if self.max_num_seqs is not None and max_num_active is not None:
            max_num_active = min(max_num_active, self.max_num_seqs)
        if self.max_num_batched_tokens is not None and max_num_scheduled is not None:
            # vLLM keeps some of them for drafts.
            kept = config.max_num_batched_tokens - max_num_scheduled
            max_num_scheduled = max(self.max_num_batched_tokens - kept, 1)
        changed = msgspec.structs.replace(
            config,
            max_num_seqs=self.max_num_seqs or config.max_num_seqs,
            max_num_active_seqs=max_num_active,
            max_num_batched_tokens=self.max_num_batched_tokens or config.max_num_batched_tokens,
            max_num_scheduled_tokens=max_num_scheduled,
            policy=self.scheduling_policy or config.policy,
        )
        num_blocks = self.num_gpu_blocks or settings.num_blocks
        return msgspec.structs.replace(settings, scheduler_config=changed, num_blocks=num_blocks)

    @property
    def pacing(self) -> Pacing | None:
        """How prompts are paced, as with the variables of these names."""
        if self.max_stall_ms is None and self.max_slowdown is None:
            return None
        max_stall_ms = self.max_stall_ms or DEFAULT_MAX_STALL_MS
        return Pacing(max_stall_ms / 1e3, self.max_slowdown or DEFAULT_MAX_SLOWDOWN, None)


@dataclass(frozen=True)
class Sample:
    """The state after a step."""

    time: float
    """Seconds since the beginning."""
    running: int
    waiting: int
    preemptions: int
    """Since the beginning."""
    queried_tokens: int
    """Prompt tokens that were looked up in the prefix cache since the beginning."""
    hit_tokens: int
    """Those that were found."""
    kv_cache_usage: float
    """0 to 1."""

    @property
    def hit_rate(self) -> float:
        """0 to 1."""
        return self.hit_tokens / max(self.queried_tokens, 1)


@dataclass
class Timeline:
    """How a load was served."""

    samples: list[Sample] = field(default_factory=list)
    first_token_s: dict[int, float] = field(default_factory=dict)
    """From arrival to first token, by number of the request."""
    gaps_s: "array[float]" = field(default_factory=lambda: array("d"))
    """Between two outputs of a request."""
    num_output_tokens: int = 0
    num_finished: int = 0
    num_stuck: int = 0
    """Requests that could never run: they don't fit."""
    steps_over_stall: dict[str, int] = field(default_factory=dict)
    """Paced steps with prompts that took longer than the stall, by whose deadline asked for it."""


class Simulation:
    """One scheduler, a load, and a clock that goes by steps."""

    def __init__(
        self, scheduler: str, load: Load, settings: Settings, pacing: Pacing | None = None
    ) -> None:
        self.timeline = Timeline()
        self._scheduler: Any = build_scheduler(scheduler, settings)
        self._is_paced = pacing is not None
        if pacing is not None:
            if scheduler == STOCK:
                raise TraceError("only sparksched paces prompts: --scheduler sparksched")
            _pace(self._scheduler, pacing)
        self._builder = RequestBuilder(settings, load)
        self._load = load
        self._step_time = step_time(load)
        if pacing is not None:
            # An engine's warm-up finds that out.
            for size in self._scheduler.pacing()["sizes"]:
                extra_s = self._step_time(1, size - 1) - self._step_time(1, 0)
                self._scheduler.core.learn_pacing_size(size, extra_s)
        self._now = 0.0
        self._device_free_at = 0.0
        """When the last step in flight ends."""
        self._num_idle = 0
        numbers = [number for number, it in enumerate(load.requests) if not it.is_warm_up]
        self._arrivals = deque(numbers)
        # Those that had been given something end with as many tokens.
        in_vain = [it for it in numbers if not load.requests[it].num_outputs]
        aborted = [(load.requests[it].aborted, it) for it in in_vain]
        self._aborts = deque(sorted((at, it) for at, it in aborted if at is not None))
        self._served: dict[str, _Served] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._is_async = settings.scheduler_config.async_scheduling
        self._depth = settings.parallel_config.pipeline_parallel_size + self._is_async
        speculative = settings.speculative_config
        self._num_drafts = speculative.num_speculative_tokens if speculative else 0
        self._num_preemptions = self._queried = self._hits = 0

    def run(self) -> Timeline:
        """Serve all requests; return how it went."""
        while self._arrivals or self._in_flight or self._scheduler.has_requests():
            self._let_arrive()
            self._tell_time()
            output = self._scheduler.schedule()
            num_tokens = output.total_num_scheduled_tokens
            for request_id in output.preempted_req_ids or ():
                self._num_preemptions += 1
                self._served[request_id].preempt()
            self._launch(output)
            if len(self._in_flight) >= self._depth or not num_tokens:
                self._take_output()
                while self._in_flight and not self._in_flight[0].num_tokens:
                    self._take_output()
            self._num_idle = 0 if num_tokens or self._in_flight else self._num_idle + 1
            if self._num_idle and not self._advance():
                break
        self.timeline.num_stuck = sum(self._scheduler.get_request_counts())
        if self._is_paced:
            report = self._scheduler.pacing()
            over = {it: f"num_over_{it.replace(' ', '_')}" for it in _OVER_STALL}
            self.timeline.steps_over_stall = {it: int(report[name]) for it, name in over.items()}
        self._scheduler.shutdown()
        return self.timeline

    def _advance(self) -> bool:
        """Go to when something happens, if nothing is to be done; return False if nothing does."""
        if self._arrivals:
            self._now = max(self._now, self._load.requests[self._arrivals[0]].arrival.time)
            return True
        if self._aborts:
            self._now = max(self._now, self._aborts[0][0])
            return True
        # Pacing may be in the way for a few steps.
        is_patient = self._is_paced and self._num_idle < _PATIENCE
        return is_patient or bool(self._scheduler.has_finished_requests())

    def _tell_time(self) -> None:
        if self._is_paced:
            self._scheduler.core.set_pacing_time(self._now)

    def _let_arrive(self) -> None:
        if not (self._in_flight or self._scheduler.has_requests()):
            self._advance()
        while self._arrivals:
            number = self._arrivals[0]
            recorded = self._load.requests[number]
            if recorded.arrival.time > self._now:
                break
            self._arrivals.popleft()
            request = self._builder.build(number, num_output_tokens=max(recorded.num_outputs, 1))
            tokens = self._load.tokens(number)
            self._served[request.request_id] = _Served(number, request.num_prompt_tokens, tokens)
            self._scheduler.add_request(request)
        while self._aborts and self._aborts[0][0] <= self._now:
            _, number = self._aborts.popleft()
            request_id = self._load.requests[number].arrival.request_id
            self._scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def _launch(self, output: SchedulerOutput) -> None:
        """Have the device take a step behind those that it has."""
        computed = {it.req_id: it.num_computed_tokens for it in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        rows = []
        num_prompt_tokens = 0
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            served = self._served[request_id]
            num_drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
            num_prompt_tokens += num_tokens if is_chunk(num_tokens, num_drafts) else 0
            samples = served.schedule(computed[request_id] + num_tokens, num_drafts)
            rows.append(_Row(served, num_drafts, samples, served.num_preemptions))
        num_tokens = output.total_num_scheduled_tokens
        if num_tokens:
            seconds = self._step_time(num_tokens - num_prompt_tokens, num_prompt_tokens)
            self._device_free_at = max(self._device_free_at, self._now) + seconds
        self._in_flight.append(_InFlight(output, rows, self._device_free_at))

    def _take_output(self) -> None:
        step = self._in_flight.popleft()
        self._now = max(self._now, step.end)
        self._tell_time()
        ids = list(step.output.num_scheduled_tokens)
        sampled = [self._sampled(row) if row.samples else [] for row in step.rows]
        arrivals = [self._load.requests[row.served.number].arrival for row in step.rows]
        is_pooling = any(arrival.is_pooling for arrival in arrivals)
        pooled = [torch.zeros(1) if row else None for row in sampled]
        runner_output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: row for row, request_id in enumerate(ids)},
            sampled_token_ids=[] if is_pooling else sampled,
            pooler_output=pooled if is_pooling else None,
        )
        for row in step.rows:
            row.served.settle(row)
        self._note(self._scheduler.update_from_output(step.output, runner_output))
        if self._num_drafts and not self._is_async:
            drafts = DraftTokenIds(ids, [[0] * self._num_drafts for _ in ids])
            self._scheduler.update_draft_token_ids(drafts)

    def _sampled(self, row: "_Row") -> list[int]:
        served = row.served
        served.accepted += self._load.accepted_per_row * (row.num_drafts > 0)
        num_accepted = min(int(served.accepted), row.num_drafts)
        served.accepted -= num_accepted
        position = served.num_prompt_tokens + served.num_output_tokens
        return served.tokens.between(position, position + 1 + num_accepted)

    def _note(self, outputs: dict[int, Any]) -> None:
        timeline = self.timeline
        for client_outputs in outputs.values():
            for it in client_outputs.outputs:
                served = self._served[it.request_id]
                if not served.num_output_tokens:
                    arrival = self._load.requests[served.number].arrival
                    timeline.first_token_s[served.number] = self._now - arrival.time
                elif it.new_token_ids:
                    timeline.gaps_s.append(self._now - served.last_at)
                served.last_at = self._now
                served.num_output_tokens += len(it.new_token_ids)
                timeline.num_output_tokens += len(it.new_token_ids)
                timeline.num_finished += it.finish_reason is not None
            stats = client_outputs.scheduler_stats
            if stats is not None:
                self._queried += stats.prefix_cache_stats.queries
                self._hits += stats.prefix_cache_stats.hits
        running, waiting = self._scheduler.get_request_counts()
        timeline.samples.append(
            Sample(
                self._now,
                running,
                waiting,
                self._num_preemptions,
                self._queried,
                self._hits,
                self._scheduler.get_kv_cache_usage(),
            )
        )


class _Served:
    """A request that is being served: when it has a token to give."""

    def __init__(self, number: int, num_prompt_tokens: int, tokens: StandIns) -> None:
        self.number = number
        self.tokens = tokens
        self.num_prompt_tokens = num_prompt_tokens
        self.num_output_tokens = 0
        self.num_preemptions = 0
        self.last_at = 0.0
        """When it was given something."""
        self.accepted = 0.0
        """Drafts that are still to be accepted, so that the recorded share of them is."""
        self._num_expected = 0
        """Tokens that steps in flight will bring, if all drafts are accepted."""

    def schedule(self, end: int, num_drafts: int) -> bool:
        """Take note of a step up to a position; return whether it brings a token."""
        known = self.num_prompt_tokens + self.num_output_tokens + self._num_expected
        if end - num_drafts < known:
            return False
        self._num_expected += 1 + num_drafts
        return True

    def preempt(self) -> None:
        self.num_preemptions += 1
        self._num_expected = 0

    def settle(self, row: "_Row") -> None:
        """Take back what was expected of a step whose output is there."""
        if row.samples and row.num_preemptions == self.num_preemptions:
            self._num_expected -= 1 + row.num_drafts


@dataclass(frozen=True)
class _Row:
    """A request in a step."""

    served: _Served
    num_drafts: int
    samples: bool
    num_preemptions: int
    """Of the request, when the step began."""


@dataclass(frozen=True)
class _InFlight:
    """A step whose output is not there."""

    output: SchedulerOutput
    rows: list[_Row]
    end: float
    """When it will be there."""

    @property
    def num_tokens(self) -> int:
        """0 for a step that is there at once."""
        return int(self.output.total_num_scheduled_tokens)


def _pace(scheduler: Any, pacing: Pacing) -> None:
    problem = unpaceable(scheduler.vllm_config)
    if problem is not None:
        raise TraceError(f"long prompts can't be paced: {problem.feature}: {problem.reason}")
    scheduler.pace(pacing)


def what_if(scheduler: str, load: Load, change: Change) -> tuple[Timeline, Timeline]:
    """Serve a trace's load with the recorded settings, and with some of them changed.

    Raises:
        TraceError: if no scheduler can be built of them, or prompts can't be paced.

    """
    settings = load.trace.settings
    before = Simulation(scheduler, load, settings).run()
    return before, Simulation(scheduler, load, change.apply(settings), change.pacing).run()
