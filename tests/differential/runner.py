"""Drives vLLM's scheduler and a candidate in lockstep through the engine's loop.

The loop is EngineCore's: `step` for synchronous scheduling, `step_with_batch_queue` where the
engine runs ahead of the model. Each side owns its requests, its grammars and its model runner
outputs; every result of one side is compared with the other's before anything else happens.
"""

from __future__ import annotations

import copy
import pickle
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

from sparksched._core import StepOutputs
from sparksched.compat import releases
from sparksched.compat.pacing import StepKnobs, schedule_with
from sparksched.engine.scheduler import NativeScheduler
from sparksched.verify.compare import Difference, first_difference
from vllm.sampling_params import (
    RepetitionDetectionParams,
    SamplingParams,
    StructuredOutputsParams,
)
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.serial_utils import MsgpackEncoder

from testkit.worlds.candidates import (
    BlockHasher,
    CandidateChooser,
    candidate_block_hasher,
    stock_block_hasher,
    stock_scheduler_class,
)
from testkit.worlds.configuration import Configuration
from testkit.worlds.draw import draw_configuration
from testkit.worlds.events import (
    Arrive,
    Call,
    Continue,
    Event,
    Finish,
    LoseInFlightSteps,
    RequestPlan,
    ResetPrefixCache,
    SetPauseState,
    TakeStats,
)
from testkit.worlds.feature import Features
from testkit.worlds.kv_transfer import copy_output
from testkit.worlds.model import (
    FakeClock,
    FakeModel,
    FakeStructuredOutputManager,
    GrammarCompilation,
)
from testkit.worlds.speculation import reject_invalid_drafts
from testkit.worlds.trace import TraceGenerator
from testkit.worlds.world import SchedulerClass, World, build_world, vllm_environment

from .state import snapshot

Coverage = Counter[str]

_MAX_CLIENTS = 16

_MOST_TIMES_STOCK = 1.05
"""How much larger what workers get may be. Pickle writes an object once that it meets twice, and
which ones these are may differ with drafts: by a few bytes, up or down."""


class SchedulersDiffer(AssertionError):
    """The candidate decided something else than vLLM; the message says where."""


class ReferenceFailedError(Exception):
    """vLLM itself failed, in the named call: nothing can be compared."""


class Side:
    """One scheduler with everything that belongs to it."""

    def __init__(
        self,
        index: int,
        world: World,
        scheduler_class: SchedulerClass,
        hasher: BlockHasher | None,
        features: Features,
    ) -> None:
        self.index = index
        self.num_broadcast_bytes = 0
        self._features = features
        self.structured_output_manager = FakeStructuredOutputManager()
        with features.while_building(index):
            self.scheduler: Any = world.build_scheduler(
                scheduler_class, self.structured_output_manager
            )
        assert type(self.scheduler) is scheduler_class, (
            f"asked for {scheduler_class}, got {type(self.scheduler)}: a fallback proves nothing"
        )
        self._hasher = hasher
        self._compilations: list[GrammarCompilation] = []

    def build_request(self, plan: RequestPlan) -> Request:
        """Build this side's own request, as the engine core does from a client's message."""
        arguments = {
            "sampling_params": _build_sampling_params(plan),
            "pooling_params": None,
            "prompt_token_ids": list(plan.prompt_token_ids),
        } | self._features.request_arguments(plan)
        request = Request(
            request_id=plan.request_id,
            client_index=plan.client_index,
            arrival_time=plan.arrival_time,
            cache_salt=plan.cache_salt,
            priority=plan.priority,
            trace_headers=dict(plan.trace_headers) if plan.trace_headers else None,
            block_hasher=self._hasher,
            resumable=plan.resumable,
            **arguments,
        )
        if plan.grammar is not None:
            self._compilations.append(GrammarCompilation(request, plan.grammar))
        return request

    def schedule(self, knobs: StepKnobs | bool, broadcast: bool) -> SchedulerOutput:
        """Schedule a step; return it, or what workers in other processes get of it.

        `knobs` are chosen for this step, or only whether prefills are throttled.
        """
        if isinstance(knobs, bool):
            output = self.scheduler.schedule(knobs)
        elif isinstance(self.scheduler, NativeScheduler):
            output = self.scheduler.schedule(knobs.throttle_prefills, knobs.for_ours())
        else:
            output = schedule_with(self.scheduler, knobs)
        if not broadcast:
            return output
        message = pickle.dumps(output, pickle.HIGHEST_PROTOCOL)
        self.num_broadcast_bytes += len(message)
        return pickle.loads(message)

    def advance_compilations(self) -> None:
        """Let grammar compilation proceed by one step."""
        for compilation in self._compilations:
            compilation.advance()
        self._compilations = [
            compilation for compilation in self._compilations if not compilation.finished
        ]


def _build_side(
    index: int, configuration: Configuration, scheduler_class: SchedulerClass, features: Features
) -> Side:
    world = build_world(configuration)
    hasher = candidate_block_hasher(world, scheduler_class) if index else stock_block_hasher(world)
    return Side(index, world, scheduler_class, hasher, features)


def _build_sampling_params(plan: RequestPlan) -> SamplingParams:
    settings = copy.deepcopy(dict(plan.sampling))
    if plan.grammar is not None:
        settings["structured_outputs"] = StructuredOutputsParams(regex="[a-z]+")
    if plan.repetition is not None:
        max_pattern_size, min_pattern_size, min_count = plan.repetition
        settings["repetition_detection"] = RepetitionDetectionParams(
            max_pattern_size=max_pattern_size,
            min_pattern_size=min_pattern_size,
            min_count=min_count,
        )
    sampling_params = SamplingParams(**settings)
    # The front end fills it in from the model's generation configuration.
    sampling_params._eos_token_id = plan.eos_token_id
    return sampling_params


@dataclass
class ScheduledStep:
    """A step on its way through the model; lists hold the reference's and the candidate's copy."""

    scheduler_outputs: list[SchedulerOutput]
    runner_outputs: list[ModelRunnerOutput]

    @property
    def request_ids(self) -> list[str]:
        return list(self.scheduler_outputs[0].num_scheduled_tokens)

    @property
    def is_empty(self) -> bool:
        return self.scheduler_outputs[0].total_num_scheduled_tokens == 0


class LockstepEngine:
    """The engine's loop around two schedulers."""

    def __init__(
        self,
        configuration: Configuration,
        seed: int,
        candidate: CandidateChooser,
        coverage: Coverage,
        snapshot_interval: int,
        broadcast: bool,
        encoded: bool,
        with_knobs: bool,
        ordered: bool,
    ) -> None:
        self.step_number = 0
        self.operations: deque[str] = deque(maxlen=25)
        self._configuration = configuration
        self._coverage = coverage
        self._snapshot_interval = snapshot_interval
        self.broadcast = broadcast
        self.encoded = encoded
        self.with_knobs = with_knobs
        self.ordered = ordered
        self._clock = FakeClock()
        self._trace = TraceGenerator(configuration, seed)
        self._model = FakeModel(seed, self._trace)
        self._features = Features(configuration, seed, coverage)
        self.sides = (
            _build_side(0, configuration, stock_scheduler_class(configuration), self._features),
            _build_side(1, configuration, candidate(configuration), self._features),
        )
        if encoded:
            for client in range(_MAX_CLIENTS):
                self.sides[1].scheduler.encode_outputs_for(client)
        self._reference = self.sides[0].scheduler
        self._features.watch(self._reference)
        self._queue: deque[ScheduledStep] = deque()
        self._previous_outputs: list[dict[int, Any]] = [{}, {}]
        self._finished_request_ids: deque[str] = deque(maxlen=20)

    # What the trace generator may look at.

    def live_request_ids(self) -> list[str]:
        return list(self._reference.requests)

    def in_flight_request_ids(self) -> list[str]:
        return [request_id for step in self._queue for request_id in step.request_ids]

    def request_ids_with_status(self, status: RequestStatus) -> list[str]:
        return [
            request_id
            for request_id, request in self._reference.requests.items()
            if request.status == status
        ]

    def finished_request_ids(self) -> list[str]:
        return list(self._finished_request_ids)

    # The loop.

    def run(self, num_steps: int) -> None:
        """Run the scenario; raise `SchedulersDiffer` at the first difference."""
        with (
            mock.patch("time.monotonic", self._clock),
            self._features.while_running(self._clock),
        ):
            for _ in range(num_steps):
                self.step_number += 1
                self._run_step()
            self._compare_snapshots()
            self._compare_broadcast_sizes()
            self._both("shutdown()", lambda side: side.scheduler.shutdown())

    def _run_step(self) -> None:
        for event in self._trace.events_before_step(self):
            self._apply(event)
        for event in self._features.events_before_step(self):
            self._apply(event)
        for side in self.sides:
            side.advance_compilations()
        self._compare_counters()
        wants_step = self._reference.has_requests() or self._trace.steps_without_requests()
        if self._configuration.batch_queue_size > 1:
            executed = self._step_with_batch_queue(wants_step)
        else:
            executed = wants_step and self._step()
        if executed and not self._configuration.async_scheduling:
            self._update_draft_token_ids()
        self._compare_counters()
        if self.step_number % self._snapshot_interval == 0:
            self._compare_snapshots()

    def _step(self) -> bool:
        """Return whether the model was executed."""
        step = self._schedule()
        self._take_grammar_bitmask(step)
        self._process_aborts_during_step()
        self._update_from_output(step)
        return not step.is_empty

    def _step_with_batch_queue(self, wants_step: bool) -> bool:
        """Return whether the model was given a step to execute."""
        executed, deferred_step = False, None
        if wants_step:
            step = self._schedule()
            executed = not step.is_empty
            if step.is_empty or not self._features.samples_tokens:
                self._queue.append(step)
            elif step.scheduler_outputs[0].pending_structured_output_tokens:
                # Its grammar state depends on tokens that have not been processed yet.
                deferred_step = step
                self._coverage["sampling deferred for a grammar"] += 1
            else:
                self._take_grammar_bitmask(step)
                self._queue.append(step)
            if (
                deferred_step is None
                and len(self._queue) < self._configuration.batch_queue_size
                and (not step.is_empty or self._reference.has_requests())
            ):
                return executed
        elif not self._queue:
            return False
        self._process_aborts_during_step()
        if not self._queue:
            # Drafts that a runner has shortened stay placeholders, which vLLM's loop waits for.
            error = IndexError("sampling is deferred until a step that is not on its way")
            raise ReferenceFailedError("step_with_batch_queue()") from error
        self._update_from_output(self._queue.popleft())
        if deferred_step is not None:
            self._update_draft_token_ids_of(deferred_step)
            self._take_grammar_bitmask(deferred_step)
            self._queue.append(deferred_step)
        return executed

    def _schedule(self) -> ScheduledStep:
        throttle = self._trace.throttles_prefills()
        throttle |= self._features.throttles_prefills(self.step_number)
        knobs: StepKnobs | bool = throttle
        if self.with_knobs:
            knobs = self._trace.knobs(throttle, self._reference)
            self._coverage["steps with knobs of their own"] += 1
        running_before = list(self._reference.running)
        self._features.before_schedule(self._reference.requests)
        outputs = self._both("schedule()", self._deciding(knobs))
        self._features.after_schedule(self.step_number, outputs)
        requests = self._reference.requests
        runner_output = self._model.run(self.step_number, outputs[0], requests)
        runner_output = self._features.complete_output(
            self.step_number, outputs[0], requests, runner_output
        )
        self._cover_schedule(outputs[0], running_before)
        self._features.cover_schedule(outputs[0], requests)
        for output in outputs:
            _consume_block_ids(output)
        return ScheduledStep(outputs, [runner_output, copy_output(runner_output)])

    def _deciding(self, knobs: StepKnobs | bool) -> Callable[[Side], SchedulerOutput]:
        """Return what has each side schedule a step."""
        reference, candidate = self.sides
        pacing = getattr(candidate.scheduler, "pacing", None)
        if self.with_knobs or pacing is None or pacing() is None:
            return lambda side: side.schedule(knobs, self.broadcast)
        # It chooses for itself: it goes first, and vLLM's scheduler gets what it has chosen.
        decided: list[SchedulerOutput] = []

        def decide(side: Side) -> SchedulerOutput:
            if not decided:
                decided.append(candidate.schedule(knobs, self.broadcast))
                # Now it is the other one's turn: what was prepared is used up.
                self._features.before_call(1)
            chosen = candidate.scheduler.knobs
            return reference.schedule(chosen, self.broadcast) if side is reference else decided[0]

        return decide

    def _take_grammar_bitmask(self, step: ScheduledStep) -> None:
        bitmasks = self._both(
            "get_grammar_bitmask()",
            lambda side: side.scheduler.get_grammar_bitmask(step.scheduler_outputs[side.index]),
        )
        self._coverage["grammar bitmasks"] += bitmasks[0] is not None
        # The engine samples now.
        self._features.after_sampling(
            self.step_number, step.scheduler_outputs[0], step.runner_outputs[0].req_ids
        )

    def _update_draft_token_ids(self) -> None:
        proposed = self._features.take_draft_token_ids()
        if proposed is None:
            return
        self._both(
            "update_draft_token_ids()",
            lambda side: side.scheduler.update_draft_token_ids(copy.deepcopy(proposed)),
        )
        self._compare_observations()
        self._features.cover_proposal(self._reference.requests)

    def _update_draft_token_ids_of(self, step: ScheduledStep) -> None:
        """Put what the drafter has proposed by now into a step that waits for a grammar."""
        proposed = self._features.take_draft_token_ids()
        if proposed is None:
            return
        self._both(
            "update_draft_token_ids_in_output()",
            lambda side: side.scheduler.update_draft_token_ids_in_output(
                copy.deepcopy(proposed), step.scheduler_outputs[side.index]
            ),
        )
        self._compare_observations()
        reject_invalid_drafts(step.scheduler_outputs[0], step.runner_outputs)

    def _process_aborts_during_step(self) -> None:
        aborts = self._trace.aborts_during_step(self)
        if aborts is not None:
            self._apply(aborts)
            self._coverage["aborts while the model runs"] += 1

    def _update_from_output(self, step: ScheduledStep) -> None:
        # What the scheduler returned must not have changed since, but for the one list that is
        # documented to be the request's own.
        self._expect_equal(
            "SchedulerOutput before update_from_output()",
            step.scheduler_outputs,
            ignored_fields=("prefill_token_ids",),
        )
        self._cover_stale_outputs(step)
        requests = dict(self._reference.requests)
        self._features.before_update(step.runner_outputs, requests)
        self._features.cover_update(step.scheduler_outputs[0], step.runner_outputs[0], requests)
        outputs: list[dict[int, Any]] = []

        def update(side: Side) -> dict[int, Any]:
            outputs.append(
                side.scheduler.update_from_output(
                    step.scheduler_outputs[side.index], step.runner_outputs[side.index]
                )
            )
            return self._as_told(outputs[-1])

        self._both("update_from_output()", update)
        self._compare_observations()
        self._expect_equal("ModelRunnerOutput after update_from_output()", step.runner_outputs)
        # The engine's output thread may read them while the next step is under way.
        self._expect_equal(
            "outputs of the step before", [self._as_told(it) for it in self._previous_outputs]
        )
        self._previous_outputs = outputs
        for scheduler_output in step.scheduler_outputs:
            _use_up(scheduler_output)
        self._cover_outputs(outputs[0], requests)
        self._features.cover_outputs(outputs[0], requests)

    def _as_told(self, outputs: dict[int, Any]) -> dict[int, Any]:
        """Return outputs in the form that is compared: themselves, or the messages of them."""
        if not self.encoded:
            return outputs
        for client_outputs in outputs.values():
            client_outputs.weight_version = "default"  # as the engine does
        return {client: _frames(client_outputs) for client, client_outputs in outputs.items()}

    # Events.

    def _apply(self, event: Event) -> None:
        if not self._features.allows(event):
            return
        match event:
            case Arrive(plan):
                self._arrive(self._features.plan_request(plan))
            case Continue(plan):
                self._arrive(plan)
            case Finish(request_ids, status):
                self._cover_finish(event)
                self._finish(request_ids, status)
            case ResetPrefixCache(reset_running, reset_connector):
                self._reset_prefix_cache(reset_running, reset_connector)
            case SetPauseState(state):
                self._both(f"set_pause_state({state.name})", lambda side: _pause(side, state))
            case LoseInFlightSteps():
                self._coverage["steps whose output was lost"] += len(self._queue)
                self._finish(None, RequestStatus.FINISHED_ABORTED)
                self._queue.clear()
            case TakeStats():
                self._both("make_stats()", lambda side: side.scheduler.make_stats())
            case Call(operation, call):
                self._both(operation, lambda side: call(side.scheduler))

    def _arrive(self, plan: RequestPlan) -> None:
        self._coverage["request ids used again"] += plan.request_id in self._finished_request_ids
        theirs, ours = requests = [side.build_request(plan) for side in self.sides]
        self._expect_equal("block hashes", [request.block_hashes for request in requests])

        def add(side: Side) -> None:
            if self.ordered and side.index == 0:
                # An order decides it: the same goes to vLLM's side.
                self.sides[1].scheduler.add_request(ours)
                theirs.priority = ours.priority
            if not self.ordered or side.index == 0:
                side.scheduler.add_request(requests[side.index])

        self._both(f"add_request({plan.request_id})", add)
        if plan.aborted_on_arrival:
            self._finish((plan.request_id,), RequestStatus.FINISHED_ABORTED)

    def _finish(self, request_ids: str | tuple[str, ...] | None, status: RequestStatus) -> None:
        def finish(side: Side) -> list[tuple[str, int]]:
            ids = list(request_ids) if isinstance(request_ids, tuple) else request_ids
            finished = side.scheduler.finish_requests(ids, status)
            return [(request.request_id, request.client_index) for request in finished]

        finished = self._both(f"finish_requests({request_ids}, {status.name})", finish)
        self._finished_request_ids.extend(request_id for request_id, _ in finished[0])

    def _reset_prefix_cache(self, reset_running: bool, reset_connector: bool) -> None:
        num_running = len(self._reference.running)
        results = self._both(
            f"reset_prefix_cache({reset_running}, {reset_connector})",
            lambda side: _reset(side, reset_running, reset_connector),
        )
        if reset_running and num_running:
            self._coverage["resets that preempt running requests"] += 1
        outcome = {True: "succeed", False: "fail"}.get(results[0], "end in an exception")
        self._coverage[f"resets that {outcome}"] += 1

    # Comparison.

    def _both(self, operation: str, call: Callable[[Side], Any]) -> list[Any]:
        """Perform an operation on both sides at the same time of the clock; compare the results."""
        self._clock.advance()
        self.operations.append(f"step {self.step_number}: {operation}")
        self._features.before_call(0)
        try:
            reference = call(self.sides[0])
        except Exception as error:
            raise ReferenceFailedError(operation) from error
        self._features.before_call(1)
        try:
            candidate = call(self.sides[1])
        except Exception as error:
            difference = Difference(f"exception of {operation}", reference, error)
            raise SchedulersDiffer(str(difference)) from error
        results = [reference, candidate]
        self._expect_equal(operation, results)
        self._expect_equal(
            f"what {operation} told others", [self._features.told(side) for side in (0, 1)]
        )
        return results

    def _expect_equal(
        self, what: str, values: Sequence[Any], ignored_fields: tuple[str, ...] = ()
    ) -> None:
        reference, candidate = values
        difference = first_difference(reference, candidate, what, ignored_fields)
        if difference is not None:
            raise SchedulersDiffer(str(difference))

    def _compare_observations(self) -> None:
        self._expect_equal(
            "what the structured output manager was shown",
            [side.structured_output_manager.take_observations() for side in self.sides],
        )

    def _compare_counters(self) -> None:
        self._expect_equal(
            "counters",
            [
                {
                    "get_request_counts": side.scheduler.get_request_counts(),
                    "get_num_unfinished_requests": side.scheduler.get_num_unfinished_requests(),
                    "has_unfinished_requests": side.scheduler.has_unfinished_requests(),
                    "has_finished_requests": side.scheduler.has_finished_requests(),
                    "has_requests": side.scheduler.has_requests(),
                    "get_kv_cache_usage": side.scheduler.get_kv_cache_usage(),
                    "pause_state": side.scheduler.pause_state,
                }
                for side in self.sides
            ],
        )

    def _compare_snapshots(self) -> None:
        snapshots = [
            snapshot(side.scheduler) | self._features.snapshot(side.scheduler)
            for side in self.sides
        ]
        self._expect_equal("snapshot", snapshots)
        self._cover_snapshot(snapshots[0])

    def _compare_broadcast_sizes(self) -> None:
        stock, ours = (side.num_broadcast_bytes for side in self.sides)
        if ours > _MOST_TIMES_STOCK * stock:
            raise SchedulersDiffer(str(Difference("bytes broadcast to workers", stock, ours)))

    # Coverage: which situations the scenario has reached, read from the reference side.

    def _cover_schedule(self, output: SchedulerOutput, running_before: list[Request]) -> None:
        coverage, requests = self._coverage, self._reference.requests
        coverage["steps"] += 1
        coverage["empty steps"] += output.total_num_scheduled_tokens == 0
        if self._reference.pause_state != PauseState.UNPAUSED:
            coverage[f"steps while {self._reference.pause_state.name}"] += 1
        coverage["preemptions"] += len(output.preempted_req_ids)
        self._cover_preemptions(output.preempted_req_ids, running_before)
        self._cover_prefill_threshold(output)
        coverage["prefill chunks"] += sum(
            requests[request_id].is_prefill_chunk for request_id in output.num_scheduled_tokens
        )
        coverage["resumptions"] += len(output.scheduled_cached_reqs.resumed_req_ids)
        for new_request in output.scheduled_new_reqs:
            coverage["prefix cache hits"] += new_request.num_computed_tokens > 0
            coverage["resumptions"] += requests[new_request.req_id].num_preemptions > 0
        coverage["requests that wait for a grammar"] += len(
            self.request_ids_with_status(RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR)
        )

    def _cover_preemptions(
        self, preempted_ids: set[str], running_before: Sequence[Request]
    ) -> None:
        survivors = {id(request) for request in self._reference.running}
        for index, request in enumerate(running_before):
            if request.request_id not in preempted_ids:
                continue
            ahead_of_survivor = any(id(other) in survivors for other in running_before[index + 1 :])
            self._coverage["preemptions ahead of a running request"] += ahead_of_survivor
            self._coverage["preemptions between equal requests"] += ahead_of_survivor and any(
                (other.priority, other.arrival_time) == (request.priority, request.arrival_time)
                for other in running_before[index + 1 :]
            )

    def _cover_prefill_threshold(self, output: SchedulerOutput) -> None:
        threshold = self._configuration.long_prefill_token_threshold
        if not threshold:
            return
        counts = output.num_scheduled_tokens.values()
        self._coverage["prefills limited by the threshold"] += any(
            count == threshold for count in counts
        )
        self._coverage["prefills exempt from the threshold"] += any(
            count > threshold for count in counts
        )

    def _cover_stale_outputs(self, step: ScheduledStep) -> None:
        for request_id in step.request_ids:
            request = self._reference.requests.get(request_id)
            if request is None:
                self._coverage["outputs of finished requests"] += 1
            elif request.num_stale_output_tokens > 0:
                fate = "dropped" if request.drop_stale_output else "delivered"
                self._coverage[f"stale outputs {fate}"] += 1

    def _cover_finish(self, finish: Finish) -> None:
        if finish.request_ids is None:
            self._coverage["aborts of all requests"] += 1
            return
        if isinstance(finish.request_ids, str):
            self._coverage["aborts of a single string"] += 1
            request_ids: tuple[str, ...] = (finish.request_ids,)
        else:
            request_ids = finish.request_ids
            self._coverage["aborts of duplicates"] += len(set(request_ids)) < len(request_ids)
        for request_id in request_ids:
            request = self._reference.requests.get(request_id)
            status = "unknown or finished" if request is None else request.status.name
            self._coverage[f"aborts of {status}"] += 1
            in_flight = request is not None and request.num_in_flight_tokens > 0
            self._coverage["aborts of requests in flight"] += in_flight

    def _cover_outputs(
        self, outputs: dict[int, EngineCoreOutputs], requests: dict[str, Request]
    ) -> None:
        coverage = self._coverage
        coverage["outputs to several clients"] += len(outputs) > 1
        for client_outputs in outputs.values():
            coverage["finished request sets"] += bool(client_outputs.finished_requests)
            coverage["scheduler statistics"] += client_outputs.scheduler_stats is not None
            for output in client_outputs.outputs:
                coverage["outputs with logprobs"] += output.new_logprobs is not None
                coverage["outputs with prompt logprobs"] += bool(output.new_prompt_logprobs_tensors)
                coverage["outputs with NaN counts"] += output.num_nans_in_logits > 0
                coverage["outputs with trace headers"] += output.trace_headers is not None
                coverage["outputs with events"] += bool(output.events)
                if output.finish_reason is not None:
                    self._finished_request_ids.append(output.request_id)
                    request = requests[output.request_id]
                    coverage[f"stops by {self._stop_cause(output, request)}"] += 1

    def _stop_cause(self, output: EngineCoreOutput, request: Request) -> str:
        if output.pooling_output is not None:
            return "pooling output"
        if output.finish_reason == FinishReason.STOP:
            return "EOS" if output.stop_reason is None else "stop token"
        if output.finish_reason == FinishReason.ERROR:
            return "rejected token" if output.new_token_ids else "grammar that does not compile"
        if output.finish_reason == FinishReason.LENGTH:
            is_full = request.num_tokens >= self._configuration.max_model_len
            return "max_model_len" if is_full else "max_tokens"
        return str(output.finish_reason)

    def _cover_snapshot(self, state: dict[str, Any]) -> None:
        self._coverage["snapshots"] += 1
        self._coverage["cached blocks in use again"] += any(
            count > 1 for count in state["ref_counts"].values()
        )
        for request in state["requests"].values():
            for window, block_ids in zip(
                self._configuration.sliding_windows, request["block_ids"], strict=True
            ):
                # Block 0 stands for the blocks that have left the window.
                self._coverage["blocks behind a window"] += window is not None and 0 in block_ids


def _frames(outputs: EngineCoreOutputs | StepOutputs) -> list[bytes]:
    if isinstance(outputs, StepOutputs):
        frames = outputs.frames()
    else:
        frames = MsgpackEncoder().encode(outputs)
    return [bytes(frame) for frame in frames]


def _reset(side: Side, reset_running: bool, reset_connector: bool) -> bool | type[Exception]:
    try:
        return bool(side.scheduler.reset_prefix_cache(reset_running, reset_connector))
    except RuntimeError as error:
        # The engine tells the client that asked for it, and goes on.
        return type(error)


def _pause(side: Side, state: PauseState) -> PauseState:
    side.scheduler.set_pause_state(state)
    return side.scheduler.pause_state


def _consume_block_ids(output: SchedulerOutput) -> None:
    """Do as a model runner in the same process: take over the block lists that it was given."""
    for new_request in output.scheduled_new_reqs:
        for block_ids in new_request.block_ids:
            block_ids.append(-1)


def _use_up(output: SchedulerOutput) -> None:
    """Do as a model runner that changes what it was given once a step is over."""
    cached = output.scheduled_cached_reqs
    output.num_scheduled_tokens.clear()
    output.scheduled_spec_decode_tokens.clear()
    cached.req_ids.reverse()
    cached.new_block_ids.append(([-1],))
    cached.num_computed_tokens.clear()
    cached.num_output_tokens.clear()


def run_scenario(
    configuration_name: str,
    seed: int,
    num_steps: int,
    candidate: CandidateChooser,
    *,
    coverage: Coverage | None = None,
    snapshot_interval: int = 1,
    broadcast: bool = False,
    encoded: bool = False,
    with_knobs: bool = False,
    ordered: bool = False,
) -> None:
    """Run one seeded scenario; raise `SchedulersDiffer` with all that reproduces it.

    If `broadcast`, steps are pickled and unpickled, as executors do for workers in other processes.
    If `encoded`, the candidate writes its outputs as messages, and these are compared with what
    vLLM's encoder makes of the reference's, byte for byte. If `with_knobs`, each step is decided
    with a budget and a threshold of its own. If `ordered`, the candidate decides the priorities.
    """
    configuration = draw_configuration(configuration_name, seed)
    with vllm_environment(configuration):
        engine = LockstepEngine(
            configuration,
            seed,
            candidate,
            Coverage() if coverage is None else coverage,
            snapshot_interval,
            broadcast,
            encoded,
            with_knobs,
            ordered,
        )
        try:
            engine.run(num_steps)
        except SchedulersDiffer as difference:
            raise SchedulersDiffer(_report(engine, configuration, seed, difference)) from None


def _report(
    engine: LockstepEngine, configuration: Configuration, seed: int, difference: SchedulersDiffer
) -> str:
    operations = "\n".join(f"  {operation}" for operation in engine.operations)
    return (
        f"configuration {configuration.name}, seed {seed}, step {engine.step_number}:"
        f" {difference}\n"
        f"{configuration}\n"
        f"latest operations:\n{operations}\n"
        "reproduce with: PYTHONHASHSEED=0 python -m tests.differential"
        f" --vllm {releases.installed()}"
        f" --config {configuration.name} --seeds {seed}:{seed + 1} --steps {engine.step_number}"
        f"{' --broadcast' if engine.broadcast else ''}"
        f"{' --encoded' if engine.encoded else ''}"
        f"{' --knobs' if engine.with_knobs else ''}"
    )
