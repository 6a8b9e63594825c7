"""What happens to the schedulers: a seeded stream of arrivals, aborts, resets and pauses.

Events are drawn while the scenario runs, because the interesting ones aim at what is in flight,
preempted or blocked just then. They depend on the seed and on the reference scheduler alone, so a
seed gives the same trace whatever the candidate does.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from sparksched.compat import releases
from sparksched.compat.pacing import StepKnobs
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from .configuration import Configuration
from .events import (
    Arrive,
    Event,
    Finish,
    GrammarPlan,
    LoseInFlightSteps,
    RequestPlan,
    ResetPrefixCache,
    SchedulerView,
    SetPauseState,
    TakeStats,
)

EOS_TOKEN_ID = 2


class TraceGenerator:
    """Draws the events of one scenario."""

    def __init__(self, configuration: Configuration, seed: int) -> None:
        self._configuration = configuration
        self._rng = rng = random.Random(f"trace/{configuration.name}/{seed}")
        self._knob_rng = random.Random(f"knobs/{configuration.name}/{seed}")
        self._order_rng = random.Random(f"order/{configuration.name}/{seed}")
        self._num_arrivals = 0
        self._clock = 0.0
        self._paused_until: int | None = None
        busiest_rate = max(2.0, configuration.max_num_seqs / 8)
        self._arrival_rate = rng.choice([0.15, 0.4, 0.9, busiest_rate])
        self._most_live_requests = rng.choice([3, 8, 24, 2 * configuration.max_num_seqs])
        self._abort_rate = rng.choice([0.0, 0.02, 0.1])
        self._disturbance_rate = rng.choice([0.0, 0.02, 0.06, 0.25])
        self._structured_output_share = rng.choice([0.0, 0.1, 0.5])
        self._num_clients = rng.choice([1, 1, 3])
        self._num_priorities = rng.choice([1, 2, 5])
        self._largest_output = rng.choice([4, 20, 60, 200])
        self._allows_id_reuse = rng.random() < 0.2
        self.vocabulary_size = rng.choice([4, 12, 50, 50, 200_000])
        self._documents = [
            tuple(rng.randrange(self.vocabulary_size) for _ in range(configuration.max_model_len))
            for _ in range(rng.choice([1, 2, 4]))
        ]
        self._recent_prompts: list[tuple[int, ...]] = []
        self._reused_ids: set[str] = set()

    def events_before_step(self, view: SchedulerView) -> list[Event]:
        """Draw what the engine's input queue holds when the next step begins."""
        events: list[Event] = []
        events.extend(self._arrivals(view))
        if self._rng.random() < self._abort_rate:
            events.append(self._finish(view))
        if self._rng.random() < self._disturbance_rate:
            events.extend(self._disturbance(view))
        if self._paused_until is not None and view.step_number >= self._paused_until:
            self._paused_until = None
            events.append(SetPauseState(PauseState.UNPAUSED))
        if self._rng.random() < 0.02:
            events.append(TakeStats())
        return events

    def aborts_during_step(self, view: SchedulerView) -> Finish | None:
        """Draw the aborts that arrive while the model runs."""
        if self._rng.random() >= self._abort_rate:
            return None
        finish = self._finish(view)
        # The engine gathers them into one list.
        if finish.request_ids is None:
            return None
        if isinstance(finish.request_ids, str):
            return Finish((finish.request_ids,), RequestStatus.FINISHED_ABORTED)
        return Finish(finish.request_ids, RequestStatus.FINISHED_ABORTED)

    def steps_without_requests(self) -> bool:
        """Draw whether the loop calls `schedule()` although the scheduler reports no requests."""
        return self._rng.random() < (0.05 if self._paused_until is None else 0.4)

    def throttles_prefills(self) -> bool:
        """Draw whether the next step defers prefills, as data-parallel balancing would."""
        return self._configuration.throttles_prefills and self._rng.random() < 0.6

    def knobs(self, throttle: bool, scheduler: Any) -> StepKnobs:
        """Draw what a step is decided with: what vLLM's scheduler has, or less."""
        budget = scheduler.max_num_scheduled_tokens
        threshold = scheduler.scheduler_config.long_prefill_token_threshold
        # A draft is verified as a whole: vLLM fails an assertion where the threshold is below that.
        least = 1 + scheduler.num_spec_tokens
        if self._knob_rng.random() < 0.5:
            budget = self._knob_rng.randint(1, budget)
        if self._knob_rng.random() < 0.7:
            larger = least + self._knob_rng.randrange(40)
            threshold = self._knob_rng.choice([0, least, least + 3, larger])
        holds_back = self._knob_rng.random() < 0.2
        if scheduler.lora_config and not releases.is_since("0.33.0"):
            # vLLM counts the adapters of the running requests that a step computes. Beside one that
            # gets no tokens it lets in another adapter, and fails an assertion in the first step
            # with all of them. Users reach that where prefills are throttled, the encoder's budget
            # is used up, or a threshold is below a block of states.
            return StepKnobs(
                budget, scheduler.scheduler_config.long_prefill_token_threshold, throttle
            )
        return StepKnobs(budget, threshold, throttle or holds_back, self._order(scheduler))

    def _order(self, scheduler: Any) -> tuple[str, ...]:
        """Draw some of the requests, in whatever order."""
        if self._order_rng.random() < 0.5:
            return ()
        requests = [it.request_id for it in (*scheduler.running, *scheduler.waiting)]
        return tuple(self._order_rng.sample(requests, self._order_rng.randint(0, len(requests))))

    def runner_order(self, request_ids: Sequence[str]) -> list[str]:
        """Draw the order in which the model runner holds the scheduled requests."""
        order = list(request_ids)
        if self._rng.random() < 0.5:
            self._rng.shuffle(order)
        return order

    def chance(self, probability: float) -> bool:
        return self._rng.random() < probability

    def _arrivals(self, view: SchedulerView) -> list[Event]:
        num_arrivals = int(self._arrival_rate + self._rng.random())
        if self._rng.random() < 0.03:
            num_arrivals += self._rng.randint(2, 8)
        room = self._most_live_requests - len(view.live_request_ids())
        return [Arrive(self._request(view)) for _ in range(min(num_arrivals, room))]

    def _request(self, view: SchedulerView) -> RequestPlan:
        rng = self._rng
        request_id = self._request_id(view)
        prompt = self._prompt()
        # Arrival times tie often: queue order then falls to the request id.
        self._clock += rng.choice([0.0, 0.0, 1.0])
        grammar = self._grammar() if rng.random() < self._structured_output_share else None
        headers = (("traceparent", request_id),) if rng.random() < 0.2 else None
        return RequestPlan(
            request_id=request_id,
            prompt_token_ids=prompt,
            client_index=rng.randrange(self._num_clients),
            arrival_time=self._clock,
            priority=rng.randrange(self._num_priorities) - 1,
            cache_salt=rng.choice(["salt", "pepper"]) if rng.random() < 0.1 else None,
            trace_headers=headers,
            sampling=tuple(self._sampling(grammar is not None).items()),
            eos_token_id=EOS_TOKEN_ID if rng.random() < 0.6 else None,
            repetition=rng.choice([(1, 0, 2), (3, 2, 2), (4, 1, 3)])
            if rng.random() < 0.25
            else None,
            grammar=grammar,
            aborted_on_arrival=rng.random() < 0.02,
        )

    def _request_id(self, view: SchedulerView) -> str:
        rng = self._rng
        reusable = set(view.finished_request_ids()).difference(
            view.live_request_ids(), view.in_flight_request_ids(), self._reused_ids
        )
        if self._allows_id_reuse and reusable and rng.random() < 0.1:
            reused_id = rng.choice(sorted(reusable))
            self._reused_ids.add(reused_id)
            return reused_id
        self._num_arrivals += 1
        # Ids whose order differs from that of arrival, for ties that go by id.
        tail = rng.choice(["", "", "", "-\N{GREEK SMALL LETTER OMEGA}"])
        return f"{rng.randrange(1000):03d}-{self._num_arrivals}{tail}"

    def _prompt(self) -> tuple[int, ...]:
        rng = self._rng
        if self._recent_prompts and rng.random() < 0.25:
            return rng.choice(self._recent_prompts)
        block_size = self._configuration.block_size
        longest = self._configuration.max_model_len - 1
        num_shared = rng.randint(0, longest // block_size) * block_size
        num_own = rng.choice([0, 1, 2, block_size, rng.randint(0, longest)])
        num_tokens = num_shared + num_own + rng.choice([-1, 0, 0, 1])
        num_tokens = min(max(num_tokens, 1), longest)
        if rng.random() < 0.5:
            num_tokens = min(num_tokens, rng.randint(1, 3 * block_size))
        shared = rng.choice(self._documents)[: min(num_shared, num_tokens)]
        own = [rng.randrange(self.vocabulary_size) for _ in range(num_tokens - len(shared))]
        prompt = (*shared, *own)
        self._recent_prompts = [*self._recent_prompts[-3:], prompt]
        return prompt

    def _sampling(self, structured: bool) -> dict[str, Any]:
        rng = self._rng
        max_tokens = rng.randint(1, self._largest_output)
        sampling: dict[str, Any] = {"max_tokens": max_tokens, "detokenize": False}
        if rng.random() < 0.3:
            sampling["min_tokens"] = rng.randint(0, max_tokens)
        if rng.random() < 0.3:
            sampling["stop_token_ids"] = [
                rng.randrange(min(self.vocabulary_size, 50)) for _ in range(rng.randint(1, 3))
            ]
        if rng.random() < 0.15:
            sampling["logprobs"] = rng.randint(0, 2)
        if rng.random() < 0.1 and not structured:
            sampling["prompt_logprobs"] = rng.randint(0, 2)
        if rng.random() < 0.1:
            sampling["skip_reading_prefix_cache"] = rng.random() < 0.7
        return sampling

    def _grammar(self) -> GrammarPlan:
        rng = self._rng
        return GrammarPlan(
            ready_after_steps=rng.choice([0, 0, 1, 2, 5]),
            fails_to_compile=rng.random() < 0.12,
            rejects_output_token=rng.randint(0, 6) if rng.random() < 0.15 else None,
        )

    def _finish(self, view: SchedulerView) -> Finish:
        rng = self._rng
        status = (
            RequestStatus.FINISHED_ABORTED
            if rng.random() < 0.8
            else rng.choice([RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_ERROR])
        )
        if rng.random() < 0.02:
            return Finish(None, status)
        targets = self._abort_targets(view)
        if len(targets) == 1 and rng.random() < 0.5:
            return Finish(targets[0], status)
        return Finish(tuple(targets), status)

    def _abort_targets(self, view: SchedulerView) -> list[str]:
        rng = self._rng
        sources = [
            view.in_flight_request_ids(),
            view.request_ids_with_status(RequestStatus.RUNNING),
            view.request_ids_with_status(RequestStatus.WAITING),
            view.request_ids_with_status(RequestStatus.PREEMPTED),
            view.request_ids_with_status(RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR),
            view.finished_request_ids(),
            ["no-such-request"],
        ]
        targets = []
        for _ in range(rng.choice([1, 1, 2, 4])):
            source = rng.choice([source for source in sources if source])
            targets.append(rng.choice(source))
        if rng.random() < 0.1:
            targets.append(targets[0])
        return targets

    def _disturbance(self, view: SchedulerView) -> list[Event]:
        rng = self._rng
        kind = rng.choice(
            [
                *("reset", "reset running", "reset running", "pause new", "pause all") * 2,
                # These leave no request alive, so they are rarer.
                *("abort", "fault"),
            ]
        )
        reset_connector = rng.random() < 0.3
        if kind == "reset":
            return [ResetPrefixCache(False, reset_connector)]
        if kind == "reset running":
            return [ResetPrefixCache(True, reset_connector)]
        if kind == "fault":
            return [LoseInFlightSteps()]
        self._paused_until = view.step_number + rng.choice([1, 3, 10])
        if kind == "pause new":
            return [SetPauseState(PauseState.PAUSED_NEW)]
        if kind == "pause all":
            return [SetPauseState(PauseState.PAUSED_ALL)]
        return [
            Finish(None, RequestStatus.FINISHED_ABORTED),
            SetPauseState(PauseState.PAUSED_NEW),
            ResetPrefixCache(True, True),
        ]
