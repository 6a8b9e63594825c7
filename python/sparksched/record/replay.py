"""Gives a scheduler what the recorded one was given.

The first decision that differs ends the replay of a scheduler, since what follows was recorded for
another state.
"""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import RequestStatus

from sparksched.compat.pacing import StepKnobs, schedule_with
from sparksched.engine.scheduler import NativeScheduler
from sparksched.record.decisions import Mismatch, first_mismatch
from sparksched.record.events import (
    Arrive,
    Drafts,
    Event,
    Finish,
    Pause,
    Ready,
    Reset,
    Step,
    TraceError,
    Update,
)
from sparksched.record.load import Load
from sparksched.record.player import Player


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

    def __init__(self, name: str, load: Load) -> None:
        self._player = Player(name, load.trace.settings, load)
        self.scheduler = self._player.scheduler
        self.outcome = Outcome(name, update_us=self._player.update_us)
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
        self._player.add(self._num_arrivals, event)
        self._num_arrivals += 1

    def _ready(self, event: Ready) -> None:
        self._player.live[event.request_id].compile(event.is_compiled)

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
        if event.knobs.max_num_scheduled_tokens is None:
            return self.scheduler.schedule(event.knobs.throttle_prefills)
        knobs = StepKnobs(**msgspec.structs.asdict(event.knobs))
        if isinstance(self.scheduler, NativeScheduler):
            return self.scheduler.schedule(knobs.throttle_prefills, knobs.for_ours())
        return schedule_with(self.scheduler, knobs)

    def _update(self, event: Update) -> None:
        output = self._in_flight.pop(event.sequence, None)
        if output is None:
            return
        _apply_changes(event, output)
        self._player.grammars.rejected = event.rejected
        for outputs in self._player.update(output, event):
            self._player.count(outputs)

    def _drafts(self, event: Drafts) -> None:
        rows = [
            [0] * (count - num_padding) + [-1] * num_padding
            for count, num_padding in zip(event.num_drafts, event.num_padding, strict=True)
        ]
        self._player.grammars.num_valid = event.num_valid
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
