"""Gives a scheduler what the recorded one was given.

The first decision that differs ends the replay of a scheduler, since what follows was recorded for
another state.
"""

import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from sparksched.compat.pacing import StepKnobs, schedule_with
from sparksched.engine.scheduler import NativeScheduler
from sparksched.record.build import Grammars, RequestBuilder, build_scheduler
from sparksched.record.decisions import Mismatch, first_mismatch
from sparksched.record.events import (
    UNKNOWN,
    Arrive,
    Drafts,
    Event,
    Finish,
    Pause,
    Ready,
    Reset,
    Settings,
    Step,
    TraceError,
    Update,
)
from sparksched.record.keys import StandIns
from sparksched.record.load import Load


@dataclass
class Outcome:
    """What came of the replay of one scheduler."""

    scheduler: str
    num_steps: int = 0
    """Steps whose decisions are the recorded ones."""
    mismatch: Mismatch | None = None
    schedule_us: list[float] = field(default_factory=list)
    update_us: list[float] = field(default_factory=list)


class Replay:
    """One scheduler on its way through a trace."""

    def __init__(self, name: str, settings: Settings, load: Load) -> None:
        self.outcome = Outcome(name)
        self._load = load
        self._scheduler: Any = build_scheduler(name, settings)
        self._grammars: Grammars = self._scheduler.structured_output_manager
        self._builder = RequestBuilder(settings, load)
        self._num_arrivals = 0
        self._ids: list[str] = []
        self._number_of: dict[str, int] = {}
        self._live: dict[int, _Live] = {}
        self._numbers: list[int] = []
        self._in_flight: dict[int, tuple[SchedulerOutput, list[int]]] = {}

    @property
    def is_over(self) -> bool:
        """Whether what it decides is of no interest any more."""
        return self.outcome.mismatch is not None

    def play(self, event: Event) -> None:
        """Do what was done then; compare, if it is a step. An error is a mismatch, too."""
        call = type(event).__name__.lower()
        try:
            getattr(self, f"_{call}", lambda _: None)(event)
        except TraceError:
            raise
        except Exception as error:
            # Of a scheduler, and of any kind: it may be what the trace was recorded for.
            step = self.outcome.num_steps
            self.outcome.mismatch = Mismatch(step, f"error ({call})", "none", repr(error))

    def shutdown(self) -> None:
        """Give back what the scheduler holds."""
        self._scheduler.shutdown()

    # ---- requests ----

    def _arrive(self, event: Arrive) -> None:
        number, self._num_arrivals = self._num_arrivals, self._num_arrivals + 1
        request = self._builder.build(number)
        self._live[number] = _Live(request, event.num_prompt_tokens, self._load.tokens(number))
        self._ids.append(event.request_id)
        self._number_of[event.request_id] = number
        self._scheduler.add_request(request)

    def _ready(self, event: Ready) -> None:
        self._live[event.number].compile(event.is_compiled)

    def _finish(self, event: Finish) -> None:
        # One by one: a set of them might have another order here.
        everybody = [None] if event.numbers is None else map(self._ids.__getitem__, event.numbers)
        for request_id in everybody:
            self._scheduler.finish_requests(request_id, RequestStatus[event.status])

    def _reset(self, event: Reset) -> None:
        # As then: the engine tells who asked for it, and goes on.
        with contextlib.suppress(RuntimeError):
            self._scheduler.reset_prefix_cache(event.reset_running_requests)

    def _pause(self, event: Pause) -> None:
        self._scheduler.set_pause_state(PauseState(event.state))

    # ---- steps ----

    def _step(self, event: Step) -> None:
        start = time.perf_counter()
        output = self._decide(event)
        self.outcome.schedule_us.append((time.perf_counter() - start) * 1e6)
        if event.numbers is not None:
            self._numbers = event.numbers
        self.outcome.mismatch = first_mismatch(event, self._numbers, self._ids, output)
        if self.outcome.mismatch is None:
            self.outcome.num_steps += 1
            self._in_flight[event.sequence] = (output, self._numbers)

    def _decide(self, event: Step) -> SchedulerOutput:
        if event.knobs.max_num_scheduled_tokens is None:
            return self._scheduler.schedule(event.knobs.throttle_prefills)
        knobs = StepKnobs(**msgspec.structs.asdict(event.knobs))
        if isinstance(self._scheduler, NativeScheduler):
            return self._scheduler.schedule(knobs.throttle_prefills, knobs.for_ours())
        return schedule_with(self._scheduler, knobs)

    def _update(self, event: Update) -> None:
        in_flight = self._in_flight.pop(event.sequence, None)
        if in_flight is None:
            return
        output, numbers = in_flight
        self._apply_changes(event, output)
        self._grammars.rejected = {self._ids[number] for number in event.rejected}
        runner_output = self._runner_output(event, output, numbers)
        start = time.perf_counter()
        outputs = self._scheduler.update_from_output(output, runner_output)
        self.outcome.update_us.append((time.perf_counter() - start) * 1e6)
        for client_outputs in outputs.values():
            for it in client_outputs.outputs:
                live = self._live[self._number_of[it.request_id]]
                live.num_output_tokens += len(it.new_token_ids)

    def _apply_changes(self, event: Update, output: SchedulerOutput) -> None:
        """Change a step as the model runner, which had it in its hands, did then."""
        ids = list(output.num_scheduled_tokens)
        if event.num_tokens is not None:
            output.num_scheduled_tokens.update(zip(ids, event.num_tokens, strict=True))
        if event.num_drafts is not None:
            drafts = output.scheduled_spec_decode_tokens
            for request_id, count in zip(ids, event.num_drafts, strict=True):
                if not count:
                    drafts.pop(request_id, None)
                elif request_id in drafts:
                    drafts[request_id] = drafts[request_id][:count]

    def _runner_output(
        self, event: Update, output: SchedulerOutput, numbers: list[int]
    ) -> ModelRunnerOutput:
        ids = list(output.num_scheduled_tokens)
        counts = [1] * len(ids) if event.num_sampled is None else event.num_sampled
        rows = [
            self._live[number].next_tokens(count)
            for number, count in zip(numbers, counts, strict=False)
        ]
        pooled = None
        if event.pooled is not None:
            pooled = [torch.zeros(1) if is_there else None for is_there in event.pooled]
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: row for row, request_id in enumerate(ids)},
            sampled_token_ids=rows,
            pooler_output=pooled,
        )

    def _drafts(self, event: Drafts) -> None:
        rows = [
            [0] * (count - num_padding) + [-1] * num_padding
            for count, num_padding in zip(event.num_drafts, event.num_padding, strict=True)
        ]
        ids = [
            "a request that is not there" if number == UNKNOWN else self._ids[number]
            for number in event.numbers
        ]
        self._grammars.num_valid = {self._ids[it]: count for it, count in event.num_valid}
        drafts = DraftTokenIds(ids, rows)
        if event.sequence is None:
            self._scheduler.update_draft_token_ids(drafts)
        elif event.sequence in self._in_flight:
            self._scheduler.update_draft_token_ids_in_output(
                drafts, self._in_flight[event.sequence][0]
            )


class _Live:
    """A request, with what the model and the compiler of grammars have to say of it."""

    def __init__(self, request: Request, num_prompt_tokens: int, stand_ins: StandIns) -> None:
        self.num_output_tokens = 0
        self._num_prompt_tokens = num_prompt_tokens
        self._stand_ins = stand_ins
        self._grammar: Future[object] | None = None
        if request.structured_output_request is not None:
            self._grammar = Future()
            request.structured_output_request.grammar = self._grammar

    def compile(self, succeeds: bool) -> None:
        """Have the grammar ready, or failed."""
        if self._grammar is None or self._grammar.done():
            return
        if succeeds:
            self._grammar.set_result(object())
        else:
            self._grammar.set_exception(ValueError("the grammar does not compile"))

    def next_tokens(self, count: int) -> list[int]:
        """Return what stands for the next tokens that are sampled."""
        begin = self._num_prompt_tokens + self.num_output_tokens
        return self._stand_ins.between(begin, begin + count)


def replay(load: Load, schedulers: Sequence[str]) -> list[Outcome]:
    """Replay on each scheduler, side by side: both meet the same state of the machine."""
    replays = [Replay(name, load.trace.settings, load) for name in schedulers]
    for event in load.trace.events():
        for it in replays:
            if not it.is_over:
                it.play(event)
    for it in replays:
        it.shutdown()
    return [it.outcome for it in replays]
