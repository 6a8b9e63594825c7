"""What other settings would have done with the same load.

Requests arrive when they did, and generate as many tokens as they did. How long a step takes is
fitted to the recorded ones, so waiting times follow from what the scheduler decides. Resets, pauses
and the time that grammars take to compile are left out.
"""

from array import array
from collections import deque
from dataclasses import dataclass, field

import msgspec
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import RequestStatus

from sparksched.compat.pacing import unpaceable
from sparksched.environment import DEFAULT_MAX_SLOWDOWN, DEFAULT_MAX_STALL_MS, Pacing
from sparksched.record.build import STOCK
from sparksched.record.events import Settings, TraceError, Update
from sparksched.record.load import Load, is_chunk
from sparksched.record.replay import Player
from sparksched.record.step_time import step_time

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
        config = settings.config
        max_num_active = config.max_num_active_seqs
        max_num_scheduled = config.max_num_scheduled_tokens
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
        return msgspec.structs.replace(settings, config=changed, num_blocks=num_blocks)

    @property
    def pacing(self) -> Pacing | None:
        """How prompts are paced, as with the variables of these names."""
        if self.max_stall_ms is None and self.max_slowdown is None:
            return None
        max_stall_ms = self.max_stall_ms or DEFAULT_MAX_STALL_MS
        return Pacing(max_stall_ms / 1e3, self.max_slowdown or DEFAULT_MAX_SLOWDOWN, None)


@dataclass
class Timeline:
    """How a load was served."""

    seconds: float = 0.0
    first_token_s: dict[int, float] = field(default_factory=dict)
    """From arrival to first token, by number of the request."""
    gaps_s: "array[float]" = field(default_factory=lambda: array("d"))
    """Between two outputs of a request."""
    num_steps: int = 0
    num_output_tokens: int = 0
    num_finished: int = 0
    num_stuck: int = 0
    """Requests that could never run: they don't fit."""
    num_preemptions: int = 0
    most_running: int = 0
    most_waiting: int = 0
    most_kv_cache: float = 0.0
    """0 to 1."""
    queried_tokens: int = 0
    """Prompt tokens that were looked up in the prefix cache."""
    hit_tokens: int = 0
    """Those that were found."""
    steps_over_stall: int = 0
    """Paced steps with prompts that took longer than the stall."""


@dataclass
class _InFlight:
    """A step whose output is not there."""

    output: SchedulerOutput
    end: float
    """When it will be there."""
    num_drafts: dict[str, int]
    """Of the requests that it brings a token."""
    expected: dict[str, int]
    """Tokens that it will bring them, if all drafts are accepted and they aren't preempted."""


class Simulation(Player):
    """One scheduler, a load, and a clock that goes by steps."""

    def __init__(
        self, scheduler: str, load: Load, settings: Settings, pacing: Pacing | None = None
    ) -> None:
        self.timeline = Timeline()
        super().__init__(scheduler, settings, load)
        self._step_time = step_time(load)
        self._is_paced = pacing is not None
        if pacing is not None:
            if scheduler == STOCK:
                raise TraceError("only sparksched paces prompts: --scheduler sparksched")
            self._pace(pacing)
        self._now = 0.0
        self._device_free_at = 0.0
        """When the last step in flight ends."""
        self._num_idle = 0
        numbers = [number for number, it in enumerate(load.requests) if not it.is_warm_up]
        self._arrivals = deque(numbers)
        # Those that had been given something end with as many tokens.
        in_vain = [(load.requests[it], it) for it in numbers if not load.requests[it].num_outputs]
        self._aborts = deque(sorted((it.aborted, n) for it, n in in_vain if it.aborted is not None))
        self._last_at: dict[str, float] = {}
        """When a request was given something."""
        self._owed_drafts = 0.0
        """Drafts that are still to be accepted, so that the recorded share of them is."""
        self._in_flight: deque[_InFlight] = deque()
        self._is_async = settings.config.async_scheduling
        self._depth = settings.config.pipeline_parallel_size + self._is_async
        speculative = settings.speculative_config
        self._num_drafts = speculative.num_speculative_tokens if speculative else 0

    def _pace(self, pacing: Pacing) -> None:
        problem = unpaceable(self.scheduler.vllm_config)
        if problem is not None:
            raise TraceError(f"long prompts can't be paced: {problem.feature}: {problem.reason}")
        self.scheduler.pace(pacing)
        # An engine's warm-up finds that out.
        for size in self.scheduler.pacing()["sizes"]:
            extra_s = self._step_time(1, size - 1) - self._step_time(1, 0)
            self.scheduler.core.learn_pacing_size(size - 1, extra_s)

    def run(self) -> Timeline:
        """Serve all requests; return how it went."""
        while self._arrivals or self._in_flight or self.scheduler.has_requests():
            self._let_arrive()
            self._tell_time()
            output = self.scheduler.schedule()
            num_tokens = output.total_num_scheduled_tokens
            for request_id in output.preempted_req_ids or ():
                self.timeline.num_preemptions += 1
                for step in self._in_flight:
                    step.expected.pop(request_id, None)
            self._launch(output)
            if len(self._in_flight) >= self._depth or not num_tokens:
                self._take_output()
                # Without tokens it is there at once.
                while self._in_flight and not self._in_flight[0].output.num_scheduled_tokens:
                    self._take_output()
            self._num_idle = 0 if num_tokens or self._in_flight else self._num_idle + 1
            if self._num_idle and not self._advance():
                break
        self.timeline.num_stuck = sum(self.scheduler.get_request_counts())
        if self._is_paced:
            over = (it for name, it in self.scheduler.pacing().items() if "num_over" in name)
            self.timeline.steps_over_stall = sum(over)
        self.scheduler.shutdown()
        return self.timeline

    def _advance(self) -> bool:
        """Go to when something happens, if nothing is to be done; return False if nothing does."""
        if self._arrivals:
            self._now = max(self._now, self.load.requests[self._arrivals[0]].arrival.time)
            return True
        if self._aborts:
            self._now = max(self._now, self._aborts[0][0])
            return True
        # Pacing may be in the way for a few steps.
        is_patient = self._is_paced and self._num_idle < _PATIENCE
        return is_patient or bool(self.scheduler.has_finished_requests())

    def _tell_time(self) -> None:
        if self._is_paced:
            self.scheduler.core.set_pacing_time(self._now)

    def _let_arrive(self) -> None:
        if not (self._in_flight or self.scheduler.has_requests()):
            self._advance()
        requests = self.load.requests
        while self._arrivals and requests[self._arrivals[0]].arrival.time <= self._now:
            number = self._arrivals.popleft()
            arrival, num_outputs = requests[number].arrival, requests[number].num_outputs
            changed = {"max_tokens": max(num_outputs, 1), "has_grammar": False}
            self.add(number, msgspec.structs.replace(arrival, **changed))
        while self._aborts and self._aborts[0][0] <= self._now:
            request_id = requests[self._aborts.popleft()[1]].arrival.request_id
            self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def _launch(self, output: SchedulerOutput) -> None:
        """Have the device take a step behind those that it has."""
        computed = {it.req_id: it.num_computed_tokens for it in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        drafts: dict[str, int] = {}
        num_prompt_tokens = 0
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            num_drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
            num_prompt_tokens += num_tokens if is_chunk(num_tokens, num_drafts) else 0
            expected = sum(step.expected.get(request_id, 0) for step in self._in_flight)
            known = self.live[request_id].num_tokens + expected
            if computed[request_id] + num_tokens - num_drafts >= known:
                drafts[request_id] = num_drafts
        num_tokens = output.total_num_scheduled_tokens
        if num_tokens:
            seconds = self._step_time(num_tokens - num_prompt_tokens, num_prompt_tokens)
            self._device_free_at = max(self._device_free_at, self._now) + seconds
        expected_tokens = {request_id: 1 + count for request_id, count in drafts.items()}
        self._in_flight.append(_InFlight(output, self._device_free_at, drafts, expected_tokens))

    def _take_output(self) -> None:
        step = self._in_flight.popleft()
        self._now = max(self._now, step.end)
        self._tell_time()
        ids = list(step.output.num_scheduled_tokens)
        counts = [self._num_sampled(step.num_drafts.get(request_id)) for request_id in ids]
        update = Update(0, self._now, num_sampled=counts)
        if any(self.load.requests[self.live[it].number].arrival.is_pooling for it in ids):
            update.num_sampled, update.pooled = [], list(map(bool, counts))
        for outputs in self.update(step.output, update):
            self._note(outputs)
            self.count(outputs)
        timeline = self.timeline
        running, waiting = self.scheduler.get_request_counts()
        timeline.num_steps += 1
        timeline.seconds = self._now
        timeline.most_running = max(timeline.most_running, running)
        timeline.most_waiting = max(timeline.most_waiting, waiting)
        usage = self.scheduler.get_kv_cache_usage()
        timeline.most_kv_cache = max(timeline.most_kv_cache, usage)
        if self._num_drafts and not self._is_async:
            drafts = DraftTokenIds(ids, [[0] * self._num_drafts for _ in ids])
            self.scheduler.update_draft_token_ids(drafts)

    def _num_sampled(self, num_drafts: int | None) -> int:
        """Return how many tokens a request gets that had so many drafts; None for no token."""
        if num_drafts is None:
            return 0
        self._owed_drafts += self.load.accepted_per_row * (num_drafts > 0)
        num_accepted = min(int(self._owed_drafts), num_drafts)
        self._owed_drafts -= num_accepted
        return 1 + num_accepted

    def _note(self, outputs: EngineCoreOutputs) -> None:
        timeline = self.timeline
        for it in outputs.outputs:
            live = self.live[it.request_id]
            if not live.num_output_tokens:
                arrival = self.load.requests[live.number].arrival
                timeline.first_token_s[live.number] = self._now - arrival.time
            elif it.new_token_ids:
                timeline.gaps_s.append(self._now - self._last_at[it.request_id])
            self._last_at[it.request_id] = self._now
            timeline.num_output_tokens += len(it.new_token_ids)
            timeline.num_finished += it.finish_reason is not None
        if outputs.scheduler_stats is not None:
            timeline.queried_tokens += outputs.scheduler_stats.prefix_cache_stats.queries
            timeline.hit_tokens += outputs.scheduler_stats.prefix_cache_stats.hits


def what_if(scheduler: str, load: Load, change: Change) -> tuple[Timeline, Timeline]:
    """Serve a trace's load with the recorded settings, and with some of them changed.

    Raises:
        TraceError: if no scheduler can be built of them, or prompts can't be paced.

    """
    settings = load.trace.settings
    before = Simulation(scheduler, load, settings).run()
    return before, Simulation(scheduler, load, change.apply(settings), change.pacing).run()
