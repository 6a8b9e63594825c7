"""What other settings would have done with the same load.

Requests arrive when they did, and generate as many tokens as they did. How long a step takes is
fitted to the recorded ones, so waiting times follow from what the scheduler decides. Resets, pauses
and the time that grammars take to compile are left out.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from sparksched.trace.build import RequestBuilder, build_player
from sparksched.trace.events import Settings
from sparksched.trace.read import Opened
from sparksched.trace.workload import step_time

Policy = Literal["fcfs", "priority"]


@dataclass(frozen=True)
class Change:
    """Settings in the place of the recorded ones; None leaves one as it was."""

    max_num_seqs: int | None = None
    num_gpu_blocks: int | None = None
    max_num_batched_tokens: int | None = None
    scheduling_policy: Policy | None = None

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
    num_output_tokens: int = 0
    num_finished: int = 0
    num_stuck: int = 0
    """Requests that could never run: they don't fit."""


class Simulation:
    """One scheduler, a load, and a clock that goes by steps."""

    def __init__(self, scheduler: str, opened: Opened, settings: Settings) -> None:
        self.timeline = Timeline()
        player = build_player(scheduler, settings)
        self._scheduler: Any = player.scheduler
        self._builder = RequestBuilder(settings, opened.history)
        self._history = opened.history
        workload = self._workload = opened.workload
        self._step_time = step_time(workload)
        self._now = 0.0
        self._arrivals = deque(range(len(workload.arrivals)))
        # Those that had been given something end with as many tokens.
        in_vain = [(at, it) for it, at in workload.aborts.items() if not workload.num_outputs[it]]
        self._aborts = deque(sorted(in_vain))
        self._served: dict[str, _Served] = {}
        self._in_flight: deque[tuple[SchedulerOutput, list[tuple[_Served, int, bool, int]]]] = (
            deque()
        )
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
            output = self._scheduler.schedule()
            num_tokens = output.total_num_scheduled_tokens
            self._num_preemptions += len(output.preempted_req_ids or ())
            for request_id in output.preempted_req_ids or ():
                self._served[request_id].preempt()
            self._in_flight.append((output, self._rows(output)))
            if num_tokens:
                self._now += self._step_time(num_tokens, len(output.num_scheduled_tokens))
            if len(self._in_flight) >= self._depth or not num_tokens:
                self._take_output()
            if not (num_tokens or self._in_flight or self._advance()):
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
        return bool(self._scheduler.has_finished_requests())

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
        output, rows = self._in_flight.popleft()
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


def what_if(scheduler: str, opened: Opened, change: Change) -> tuple[Timeline, Timeline]:
    """Serve a trace's load with the recorded settings, and with some of them changed.

    Raises:
        TraceError: if no scheduler can be built of them.

    """
    before = Simulation(scheduler, opened, opened.trace.settings).run()
    return before, Simulation(scheduler, opened, change.apply(opened.trace.settings)).run()
