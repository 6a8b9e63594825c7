"""What other settings would have done with the same load.

Requests arrive when they did, and generate as many tokens as they did. How long a step takes is
fitted to the recorded ones, so waiting times follow from what the scheduler decides. Resets, pauses
and the time that grammars take to compile are left out.
"""

from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from sparksched.compat.pacing import unpaceable
from sparksched.environment import DEFAULT_MAX_STALL_MS, DEFAULT_MAX_SLOWDOWN, Pacing
from sparksched.trace.build import SPARKSCHED, Player, RequestBuilder, build_player
from sparksched.trace.events import Settings, TraceError
from sparksched.trace.read import Opened
from sparksched.trace.workload import is_chunk, step_time

Policy = Literal["fcfs", "priority"]

_PATIENCE = 1000
"""Steps without tokens in a row, after which nothing is expected any more."""


@dataclass(frozen=True)
class Change:
    """Settings in the place of the recorded ones; None leaves one as it was."""

    max_num_seqs: int | None = None
    num_gpu_blocks: int | None = None
    max_num_batched_tokens: int | None = None
    scheduling_policy: Policy | None = None
    max_stall_ms: float | None = None
    max_slowdown: float | None = None
    """Prompts are paced if it or the one before is there."""

    def apply(self, settings: Settings) -> Settings:
        """Return the settings with this change, and what hangs from it."""
        config = dict(settings.scheduler_config)
        if self.max_num_seqs is not None:
            config["max_num_seqs"] = self.max_num_seqs
            if config["max_num_active_seqs"] is not None:
                config["max_num_active_seqs"] = min(
                    int(config["max_num_active_seqs"]), self.max_num_seqs
                )
        if self.max_num_batched_tokens is not None:
            before = int(config["max_num_batched_tokens"] or 0)
            config["max_num_batched_tokens"] = self.max_num_batched_tokens
            if config["max_num_scheduled_tokens"] is not None:
                # vLLM keeps some of them for drafts.
                kept = before - int(config["max_num_scheduled_tokens"])
                config["max_num_scheduled_tokens"] = max(self.max_num_batched_tokens - kept, 1)
        if self.scheduling_policy is not None:
            config["policy"] = self.scheduling_policy
        return msgspec.structs.replace(
            settings,
            scheduler_config=config,
            num_blocks=self.num_gpu_blocks or settings.num_blocks,
        )

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
    first_token_s: list[float] = field(default_factory=list)
    """From arrival to first token, by request."""
    gaps_s: "array[float]" = field(default_factory=lambda: array("d"))
    """Between two outputs of a request."""
    num_output_tokens: int = 0
    num_finished: int = 0
    num_stuck: int = 0
    """Requests that could never run: they don't fit."""


class Simulation:
    """One scheduler, a load, and a clock that goes by steps."""

    def __init__(
        self, scheduler: str, opened: Opened, settings: Settings, pacing: Pacing | None = None
    ) -> None:
        self.timeline = Timeline()
        player = build_player(scheduler, settings)
        self._scheduler: Any = player.scheduler
        self._is_paced = pacing is not None
        if pacing is not None:
            _pace(player, pacing)
        self._builder = RequestBuilder(settings, opened.history)
        self._history = opened.history
        workload = self._workload = opened.workload
        self._step_time = step_time(workload)
        self._now = 0.0
        self._device_free_at = 0.0
        """When the last step in flight ends."""
        self._num_idle = 0
        numbers = range(len(workload.arrivals))
        self._arrivals = deque(it for it in numbers if it not in workload.warm_ups)
        # Those that had been given something end with as many tokens.
        in_vain = [(at, it) for it, at in workload.aborts.items() if self._is_in_vain(it)]
        self._aborts = deque(sorted(in_vain))
        self._served: dict[str, _Served] = {}
        self._in_flight: deque[_InFlight] = deque()
        is_async = bool(settings.scheduler_config["async_scheduling"])
        self._depth = settings.pipeline_parallel_size + is_async
        self._num_drafts = settings.speculation.num_tokens if settings.speculation else 0
        self._is_async = is_async
        self._num_preemptions = 0
        self._queried = 0
        self._hits = 0

    def run(self) -> Timeline:
        """Serve all requests; return how it went."""
        while self._arrivals or self._in_flight or self._scheduler.has_requests():
            self._let_arrive()
            self._tell_time()
            output = self._scheduler.schedule()
            num_tokens = output.total_num_scheduled_tokens
            self._num_preemptions += len(output.preempted_req_ids or ())
            for request_id in output.preempted_req_ids or ():
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
        self._scheduler.shutdown()
        return self.timeline

    def _advance(self) -> bool:
        """Go to when something happens, if nothing is to be done; return False if nothing does."""
        if self._arrivals:
            self._now = max(self._now, self._workload.arrivals[self._arrivals[0]])
            return True
        if self._aborts:
            self._now = max(self._now, self._aborts[0][0])
            return True
        if self._scheduler.has_finished_requests():
            return True
        # Pacing may be in the way for a few steps.
        return self._is_paced and self._num_idle < _PATIENCE

    def _is_in_vain(self, number: int) -> bool:
        workload = self._workload
        return not workload.num_outputs[number] and number not in workload.warm_ups

    def _tell_time(self) -> None:
        if self._is_paced:
            self._scheduler.set_pacing_time(self._now)

    def _launch(self, output: SchedulerOutput) -> None:
        """Have the device take a step behind those that it has."""
        if output.total_num_scheduled_tokens:
            begin = max(self._device_free_at, self._now)
            self._device_free_at = begin + self._step_time(*_size_of(output))
        self._in_flight.append(_InFlight(output, self._rows(output), self._device_free_at))

    def _let_arrive(self) -> None:
        if not (self._in_flight or self._scheduler.has_requests()):
            self._advance()
        while self._arrivals and self._workload.arrivals[self._arrivals[0]] <= self._now:
            number = self._arrivals.popleft()
            num_outputs = self._workload.num_outputs[number]
            request = self._builder.build(number, num_output_tokens=max(num_outputs, 1))
            self._served[request.request_id] = _Served(number, request.num_prompt_tokens)
            self._scheduler.add_request(request)
        while self._aborts and self._aborts[0][0] <= self._now:
            _, number = self._aborts.popleft()
            request_id = self._history.arrivals[number].request_id
            self._scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def _rows(self, output: SchedulerOutput) -> list[tuple["_Served", int, bool, int]]:
        """Return of each request: what it is, its drafts, whether it samples, and its age."""
        computed = {it.req_id: it.num_computed_tokens for it in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        rows = []
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            served = self._served[request_id]
            num_drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
            end = computed[request_id] + num_tokens
            samples = served.schedule(end, num_drafts)
            rows.append((served, num_drafts, samples, served.num_preemptions))
        return rows

    def _take_output(self) -> None:
        step = self._in_flight.popleft()
        output, rows = step.output, step.rows
        self._now = max(self._now, step.end)
        self._tell_time()
        ids = list(output.num_scheduled_tokens)
        sampled = [
            self._sampled(served, num_drafts) if samples else []
            for served, num_drafts, samples, _ in rows
        ]
        is_pooling = [self._history.arrivals[served.number].is_pooling for served, *_ in rows]
        runner_output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: row for row, request_id in enumerate(ids)},
            sampled_token_ids=[] if any(is_pooling) else sampled,
            pooler_output=[torch.zeros(1) if row else None for row in sampled]
            if any(is_pooling)
            else None,
        )
        for served, num_drafts, samples, age in rows:
            served.settle(num_drafts, samples, age)
        self._note(self._scheduler.update_from_output(output, runner_output))
        if self._num_drafts and not self._is_async:
            self._draft(ids)

    def _sampled(self, served: "_Served", num_drafts: int) -> list[int]:
        served.accepted += self._workload.accepted_per_row * (num_drafts > 0)
        num_accepted = min(int(served.accepted), num_drafts)
        served.accepted -= num_accepted
        begin, count = served.num_output_tokens, 1 + num_accepted
        outputs = self._workload.outputs[served.number]
        if outputs:
            tokens = outputs[begin : begin + count]
            return tokens + [0] * (count - len(tokens))
        position = served.num_prompt_tokens + begin
        return self._history.tokens(served.number).between(position, position + count)

    def _draft(self, ids: list[str]) -> None:
        rows = [[0] * self._num_drafts for _ in ids]
        self._scheduler.update_draft_token_ids(DraftTokenIds(ids, rows))

    def _note(self, outputs: dict[int, Any]) -> None:
        for client_outputs in outputs.values():
            for it in client_outputs.outputs:
                served = self._served[it.request_id]
                if not served.num_output_tokens:
                    arrival = self._workload.arrivals[served.number]
                    self.timeline.first_token_s.append(self._now - arrival)
                elif it.new_token_ids:
                    self.timeline.gaps_s.append(self._now - served.last_at)
                served.last_at = self._now
                served.num_output_tokens += len(it.new_token_ids)
                self.timeline.num_output_tokens += len(it.new_token_ids)
                self.timeline.num_finished += it.finish_reason is not None
            stats = client_outputs.scheduler_stats
            if stats is not None:
                self._queried += stats.prefix_cache_stats.queries
                self._hits += stats.prefix_cache_stats.hits
        running, waiting = self._scheduler.get_request_counts()
        self.timeline.samples.append(
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

    def __init__(self, number: int, num_prompt_tokens: int) -> None:
        self.number = number
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

    def settle(self, num_drafts: int, samples: bool, num_preemptions: int) -> None:
        """Take back what was expected of a step whose output is there."""
        if samples and num_preemptions == self.num_preemptions:
            self._num_expected -= 1 + num_drafts


@dataclass(frozen=True)
class _InFlight:
    """A step whose output is not there."""

    output: SchedulerOutput
    rows: list[tuple[_Served, int, bool, int]]
    """Of each request: what it is, its drafts, whether it samples, and its age."""
    end: float
    """When it will be there."""

    @property
    def num_tokens(self) -> int:
        """0 for a step that is there at once."""
        return int(self.output.total_num_scheduled_tokens)


def _size_of(output: SchedulerOutput) -> tuple[int, int]:
    """Return the tokens of a step's decodes and of its prompts."""
    drafts = output.scheduled_spec_decode_tokens
    num_prompt_tokens = sum(
        num_tokens
        for request_id, num_tokens in output.num_scheduled_tokens.items()
        if is_chunk(num_tokens, len(drafts.get(request_id, ())))
    )
    return output.total_num_scheduled_tokens - num_prompt_tokens, num_prompt_tokens


def _pace(player: Player, pacing: Pacing) -> None:
    """Have a scheduler pace prompts.

    Raises:
        TraceError: if it can't.

    """
    if player.name != SPARKSCHED:
        raise TraceError("only sparksched paces prompts: --scheduler sparksched")
    problem = unpaceable(player.scheduler.vllm_config)
    if problem is not None:
        raise TraceError(f"long prompts can't be paced: {problem.feature}: {problem.reason}")
    player.scheduler.pace(pacing)


def what_if(scheduler: str, opened: Opened, change: Change) -> tuple[Timeline, Timeline]:
    """Serve a trace's load with the recorded settings, and with some of them changed.

    Raises:
        TraceError: if no scheduler can be built of them, or prompts can't be paced.

    """
    before = Simulation(scheduler, opened, opened.trace.settings).run()
    settings = change.apply(opened.trace.settings)
    return before, Simulation(scheduler, opened, settings, change.pacing).run()
