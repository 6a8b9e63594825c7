"""Drives vLLM's scheduler and a candidate in lockstep through the engine's loop.

The loop is EngineCore's: `step` for synchronous scheduling, `step_with_batch_queue` where the
engine runs ahead of the model. Each side owns its requests, its grammars and its model runner
outputs; every result of one side is compared with the other's before anything else happens.
"""

from __future__ import annotations

import copy
import functools
import pickle
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
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
from vllm.v1.engine import EngineCoreOutputs
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
from testkit.worlds.feature import Features, Step
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

Reached = Counter[str]
"""How often a field of vLLM's structures was not empty, and a request in some status."""

_MAX_CLIENTS = 16
_CAN_BE_EMPTY = (bool, int, float, str, list, tuple, dict, set)

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
        reached: Reached,
        broadcast: bool,
        encoded: bool,
        with_knobs: bool,
        ordered: bool,
    ) -> None:
        self.step_number = 0
        self.operations: deque[str] = deque(maxlen=25)
        self._configuration = configuration
        self._reached = reached
        self.broadcast = broadcast
        self.encoded = encoded
        self.with_knobs = with_knobs
        self.ordered = ordered
        self._clock = FakeClock()
        self._trace = TraceGenerator(configuration, seed)
        self._model = FakeModel(seed, self._trace)
        self._features = Features(configuration, seed)
        self.sides = (
            _build_side(0, configuration, stock_scheduler_class(configuration), self._features),
            _build_side(1, configuration, candidate(configuration), self._features),
        )
        if encoded:
            for client in range(_MAX_CLIENTS):
                self.sides[1].scheduler.core.encode_outputs_for(client)
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
        outputs = self._both("schedule()", self._deciding(knobs))
        self._features.after_schedule(self.step_number, outputs)
        requests = self._reference.requests
        runner_output = self._model.run(self.step_number, outputs[0], requests)
        step = Step(self.step_number, outputs[0], requests)
        runner_output = self._features.complete_output(step, runner_output)
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
        self._both(
            "get_grammar_bitmask()",
            lambda side: side.scheduler.get_grammar_bitmask(step.scheduler_outputs[side.index]),
        )
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

    def _update_from_output(self, step: ScheduledStep) -> None:
        # What the scheduler returned must not have changed since, but for the one list that is
        # documented to be the request's own.
        self._expect_equal(
            "SchedulerOutput before update_from_output()",
            step.scheduler_outputs,
            ignored_fields=("prefill_token_ids",),
        )
        requests = dict(self._reference.requests)
        self._features.before_update(step.runner_outputs, requests)
        outputs: list[dict[int, Any]] = []

        def update(side: Side) -> dict[int, Any]:
            outputs.append(
                side.scheduler.update_from_output(
                    step.scheduler_outputs[side.index], step.runner_outputs[side.index]
                )
            )
            return self._as_told(outputs[-1])

        self._both("update_from_output()", update)
        note(self._reached, [step.scheduler_outputs[0], outputs[0]])
        self._finished_request_ids.extend(
            output.request_id
            for client_outputs in outputs[0].values()
            for output in client_outputs.outputs
            if output.finish_reason is not None
        )
        self._compare_observations()
        self._expect_equal("ModelRunnerOutput after update_from_output()", step.runner_outputs)
        # The engine's output thread may read them while the next step is under way.
        self._expect_equal(
            "outputs of the step before", [self._as_told(it) for it in self._previous_outputs]
        )
        self._previous_outputs = outputs
        for scheduler_output in step.scheduler_outputs:
            _use_up(scheduler_output)

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
                self._finish(request_ids, status)
            case ResetPrefixCache(reset_running, reset_connector):
                self._reset_prefix_cache(reset_running, reset_connector)
            case SetPauseState(state):
                self._both(f"set_pause_state({state.name})", lambda side: _pause(side, state))
            case LoseInFlightSteps():
                self._finish(None, RequestStatus.FINISHED_ABORTED)
                self._queue.clear()
            case TakeStats():
                self._both("make_stats()", lambda side: side.scheduler.make_stats())
            case Call(operation, call):
                self._both(operation, lambda side: call(side.scheduler))

    def _arrive(self, plan: RequestPlan) -> None:
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
        self._both(
            f"reset_prefix_cache({reset_running}, {reset_connector})",
            lambda side: _reset(side, reset_running, reset_connector),
        )

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
        told = [self._features.told(side) for side in (0, 1)]
        self._expect_equal(f"what {operation} told others", told)
        note(self._reached, told[0])
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
        note(self._reached, [request.status for request in self._reference.requests.values()])

    def _compare_broadcast_sizes(self) -> None:
        stock, ours = (side.num_broadcast_bytes for side in self.sides)
        if ours > _MOST_TIMES_STOCK * stock:
            raise SchedulersDiffer(str(Difference("bytes broadcast to workers", stock, ours)))


@functools.cache
def fields_of(cls: type[Any]) -> list[str]:
    """Return the names of the fields of one of vLLM's structures, if it is one."""
    return list(getattr(cls, "__struct_fields__", getattr(cls, "__dataclass_fields__", ())))


def note(reached: Reached, value: Any) -> None:
    """Count the fields that are not empty, the members of enumerations, and calls of connectors."""
    kind = type(value)
    if isinstance(value, Enum):
        reached[f"{kind.__name__}.{value.name}"] += 1
    elif kind is tuple and value and isinstance(value[0], str):
        reached[f"call {value[0]}"] += 1
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            if type(item) not in (int, str, bytes):
                note(reached, item)
    for name in fields_of(kind):
        field = getattr(value, name)
        # Arrays can't be asked.
        if field is not None and (type(field) not in _CAN_BE_EMPTY or field):
            reached[f"{kind.__name__}.{name}"] += 1
            note(reached, field)


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
    reached: Reached | None = None,
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
            Reached() if reached is None else reached,
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
