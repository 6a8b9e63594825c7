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

import torch
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from sparksched.compat.pacing import schedule_with
from sparksched.engine.scheduler import NativeScheduler
from sparksched.record.build import Grammars, build_request, build_scheduler
from sparksched.record.decisions import Mismatch, first_mismatch
from sparksched.record.events import (
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
from sparksched.record.keys import STOP, StandIns
from sparksched.record.load import Load
from sparksched.verify.copies import block_hasher_of_vllm


class Live:
    """A request, with what the model and the compiler of grammars have to say of it."""

    def __init__(self, number: int, request: Request, tokens: StandIns) -> None:
        self.number = number
        self.num_prompt_tokens = int(request.num_prompt_tokens)
        self.num_output_tokens = 0
        self._tokens = tokens
        self._grammar: Future[object] = Future()
        if request.structured_output_request is not None:
            request.structured_output_request.grammar = self._grammar

    @property
    def num_tokens(self) -> int:
        """Of prompt and output."""
        return self.num_prompt_tokens + self.num_output_tokens

    def compile(self, succeeds: bool) -> None:
        """Have the grammar ready, or failed."""
        if self._grammar.done():
            return
        if succeeds:
            self._grammar.set_result(object())
        else:
            self._grammar.set_exception(ValueError("the grammar does not compile"))

    def sampled(self, count: int, stop: int | None) -> list[int]:
        """Return what stands for the next tokens, that which ends the request among them."""
        tokens = self._tokens.between(self.num_tokens, self.num_tokens + count)
        if stop is not None:
            tokens[stop : stop + 1] = [STOP]
        return tokens


class Player:
    """Gives a scheduler requests of a trace, and outputs of its steps."""

    def __init__(self, name: str, settings: Settings, load: Load) -> None:
        self.scheduler: Any = build_scheduler(name, settings)
        self.grammars: Grammars = self.scheduler.structured_output_manager
        self.live: dict[str, Live] = {}
        """The latest request of each id."""
        self.update_us: list[float] = []
        self.load = load
        self._hasher = block_hasher_of_vllm(self.scheduler.vllm_config, settings.hash_block_size)

    def add(self, number: int, arrival: Arrive) -> None:
        """Add the request of that number, which arrives like this."""
        tokens = self.load.tokens(number)
        prompt = tokens.between(0, arrival.num_prompt_tokens)
        request = build_request(arrival, prompt, self._hasher)
        self.live[arrival.request_id] = Live(number, request, tokens)
        self.scheduler.add_request(request)

    def update(self, output: SchedulerOutput, update: Update) -> Sequence[EngineCoreOutputs]:
        """Give a step its output; return what the clients get."""
        ids = list(output.num_scheduled_tokens)
        counts = [1] * len(ids) if update.num_sampled is None else update.num_sampled
        rows = [
            self.live[request_id].sampled(count, update.stops.get(row))
            for row, (request_id, count) in enumerate(zip(ids, counts, strict=False))
        ]
        pooled = None
        if update.pooled is not None:
            pooled = [torch.zeros(1) if is_there else None for is_there in update.pooled]
        runner_output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: row for row, request_id in enumerate(ids)},
            sampled_token_ids=rows,
            pooler_output=pooled,
        )
        start = time.perf_counter()
        outputs = self.scheduler.update_from_output(output, runner_output)
        self.update_us.append((time.perf_counter() - start) * 1e6)
        return list(outputs.values())

    def count(self, outputs: EngineCoreOutputs) -> None:
        """Take note of the tokens that requests got."""
        for it in outputs.outputs:
            self.live[it.request_id].num_output_tokens += len(it.new_token_ids)


@dataclass
class Outcome:
    """What came of the replay of one scheduler."""

    scheduler: str
    num_steps: int = 0
    """Steps whose decisions are the recorded ones."""
    mismatch: Mismatch | None = None
    schedule_us: list[float] = field(default_factory=list)
    update_us: list[float] = field(default_factory=list)


class Replay(Player):
    """One scheduler on its way through a trace."""

    def __init__(self, name: str, load: Load) -> None:
        super().__init__(name, load.trace.settings, load)
        self.outcome = Outcome(name, update_us=self.update_us)
        self._num_arrivals = 0
        self._ids: list[str] = []
        self._in_flight: dict[int, SchedulerOutput] = {}

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

    # ---- requests ----

    def _arrive(self, event: Arrive) -> None:
        self.add(self._num_arrivals, event)
        self._num_arrivals += 1

    def _ready(self, event: Ready) -> None:
        self.live[event.request_id].compile(event.is_compiled)

    def _finish(self, event: Finish) -> None:
        # One by one: a set of them might have another order here.
        for request_id in [None] if event.ids is None else event.ids:
            self.scheduler.finish_requests(request_id, RequestStatus[event.status])

    def _reset(self, event: Reset) -> None:
        # As then: the engine tells who asked for it, and goes on.
        with contextlib.suppress(RuntimeError):
            self.scheduler.reset_prefix_cache(event.reset_running_requests)

    def _pause(self, event: Pause) -> None:
        self.scheduler.set_pause_state(PauseState(event.state))

    # ---- steps ----

    def _step(self, event: Step) -> None:
        start = time.perf_counter()
        output = self._decide(event)
        self.outcome.schedule_us.append((time.perf_counter() - start) * 1e6)
        self.outcome.mismatch = first_mismatch(event, output, self._ids)
        if self.outcome.mismatch is None:
            self._ids = list(output.num_scheduled_tokens)
            self.outcome.num_steps += 1
            self._in_flight[event.sequence] = output

    def _decide(self, event: Step) -> SchedulerOutput:
        knobs = event.knobs
        if knobs is None:
            return self.scheduler.schedule(event.throttle_prefills)
        if isinstance(self.scheduler, NativeScheduler):
            return self.scheduler.schedule(knobs.throttle_prefills, knobs.for_ours())
        return schedule_with(self.scheduler, knobs)

    def _update(self, event: Update) -> None:
        output = self._in_flight.pop(event.sequence, None)
        if output is None:
            return
        _apply_changes(event, output)
        self.grammars.rejected = event.rejected
        for outputs in self.update(output, event):
            self.count(outputs)

    def _drafts(self, event: Drafts) -> None:
        rows = [
            [0] * (count - num_padding) + [-1] * num_padding
            for count, num_padding in zip(event.num_drafts, event.num_padding, strict=True)
        ]
        self.grammars.num_valid = event.num_valid
        drafts = DraftTokenIds(event.ids, rows)
        if event.sequence is None:
            self.scheduler.update_draft_token_ids(drafts)
        elif output := self._in_flight.get(event.sequence):
            self.scheduler.update_draft_token_ids_in_output(drafts, output)


def _apply_changes(event: Update, output: SchedulerOutput) -> None:
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


def replay(load: Load, schedulers: Sequence[str]) -> list[Outcome]:
    """Replay on each scheduler, side by side: both meet the same state of the machine."""
    replays = [Replay(name, load) for name in schedulers]
    for event in load.trace.events():
        for it in replays:
            if it.outcome.mismatch is None:
                it.play(event)
    for it in replays:
        it.scheduler.shutdown()
    return [it.outcome for it in replays]
