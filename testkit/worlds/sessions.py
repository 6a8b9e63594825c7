"""Streaming input: requests that pause when they stop, and go on with the next chunk of input."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparksched.compat import releases
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from .configuration import Configuration
from .events import Continue, Event, Finish, RequestPlan, SchedulerView
from .feature import Feature, FeatureSettings
from .speculation import SpeculationSettings

_LONGEST_TURN = 10
# Steps without news after which a client gives up.
_PATIENCE = 40


@dataclass(frozen=True)
class SessionSettings(FeatureSettings):
    """How many requests are sessions, and how eager their clients."""

    share: float
    chunk_rate: float

    @classmethod
    def draw(
        cls, rng: random.Random, _configuration: Configuration, _scenario: Mapping[str, Any]
    ) -> SessionSettings:
        return cls(share=rng.choice([0.3, 0.8]), chunk_rate=rng.choice([0.1, 0.4]))

    def adjust(self, configuration: Configuration) -> Configuration:
        # What such a runner leaves computed too many would be more than the session has tokens.
        features = tuple(
            dataclasses.replace(settings, shortens_drafts=False)
            if isinstance(settings, SpeculationSettings)
            else settings
            for settings in configuration.features
        )
        return dataclasses.replace(configuration, features=features)

    def start(self, configuration: Configuration, seed: int) -> Feature:
        return Sessions(configuration, seed, self)


@dataclass
class _Session:
    """What a client knows of its session."""

    plan: RequestPlan
    num_reserved_tokens: int
    """Tokens that the session may come to, if each turn is as long as it can be."""
    latest_step: int = 0
    is_closed: bool = False


class Sessions(Feature):
    """The clients of sessions."""

    def __init__(self, configuration: Configuration, seed: int, settings: SessionSettings) -> None:
        super().__init__(configuration, seed)
        self._settings = settings
        is_speculating = any(isinstance(it, SpeculationSettings) for it in configuration.features)
        self._shortest_chunk = 1
        if is_speculating:
            # After a chunk of one token drafts are verified in the very next step, and vLLM counts
            # them in the metrics that it has handed out with the turn before.
            self._shortest_chunk = 2
        if is_speculating and not releases.is_since("0.33.0"):
            # With synchronous speculation a stop in the middle of accepted draft tokens leaves more
            # tokens computed than there are; vLLM ends in an assertion unless a chunk makes up for
            # it.
            self._shortest_chunk = 6
        self._sessions: dict[str, _Session] = {}

    def plan_request(self, plan: RequestPlan) -> RequestPlan:
        self._sessions.pop(plan.request_id, None)
        is_session = self.rng.random() < self._settings.share
        if not is_session or plan.items or plan.pooling is not None:
            return plan
        longest_prompt = self.configuration.max_model_len // 4
        plan = dataclasses.replace(
            plan,
            prompt_token_ids=plan.prompt_token_ids[:longest_prompt],
            sampling=self._turn(plan.sampling),
            resumable=True,
        )
        num_tokens = len(plan.prompt_token_ids) + _LONGEST_TURN
        self._sessions[plan.request_id] = _Session(plan, num_tokens)
        return plan

    def _turn(self, sampling: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
        """Draw the length of a turn."""
        settings = dict(sampling)
        settings["max_tokens"] = self.rng.choice([1, 2, 5, _LONGEST_TURN])
        if "min_tokens" in settings:
            settings["min_tokens"] = min(settings["min_tokens"], settings["max_tokens"])
        if self.rng.random() < 0.1:
            settings["logprobs"] = self.rng.randint(0, 2)
        return tuple(settings.items())

    def events_before_step(self, view: SchedulerView) -> Sequence[Event]:
        live_ids = set(view.live_request_ids())
        self._sessions = {
            request_id: session
            for request_id, session in self._sessions.items()
            if request_id in live_ids
        }
        statuses = {
            request_id: status
            for status in RequestStatus
            for request_id in view.request_ids_with_status(status)
        }
        events: list[Event] = []
        for request_id, session in self._sessions.items():
            session.latest_step = session.latest_step or view.step_number
            events += self._events_of(session, statuses[request_id], view.step_number)
        return events

    def _events_of(self, session: _Session, status: RequestStatus, step_number: int) -> list[Event]:
        is_idle = status == RequestStatus.WAITING_FOR_STREAMING_REQ
        if step_number - session.latest_step > _PATIENCE or (is_idle and self.rng.random() < 0.02):
            session.latest_step = step_number
            return [Finish((session.plan.request_id,), RequestStatus.FINISHED_ABORTED)]
        rate = self._settings.chunk_rate * (1.0 if is_idle else 0.2)
        if session.is_closed or self.rng.random() >= rate:
            return []
        session.latest_step = step_number
        events = [self._next_input(session)]
        if not session.is_closed and self.rng.random() < 0.2:
            events.append(self._next_input(session))
        return events

    def _next_input(self, session: _Session) -> Event:
        """Draw the next chunk of a session, or its end."""
        rng = self.rng
        plan = dataclasses.replace(
            session.plan, arrival_time=session.plan.arrival_time + rng.choice([0.0, 0.5, 1.5])
        )
        longest_chunk = min(
            self.configuration.max_model_len - 1 - session.num_reserved_tokens - _LONGEST_TURN,
            3 * self.configuration.block_size,
        )
        if longest_chunk < self._shortest_chunk or rng.random() < 0.15:
            session.is_closed = True
            return Continue(dataclasses.replace(plan, prompt_token_ids=(0,), resumable=False))
        num_tokens = rng.randint(self._shortest_chunk, longest_chunk)
        session.plan = dataclasses.replace(
            plan,
            prompt_token_ids=tuple(rng.randrange(50) for _ in range(num_tokens)),
            sampling=self._turn(plan.sampling),
            grammar=None,
            aborted_on_arrival=False,
        )
        session.num_reserved_tokens += num_tokens + _LONGEST_TURN
        return Continue(session.plan)

    def before_update(
        self, outputs: Sequence[ModelRunnerOutput], requests: Mapping[str, Request]
    ) -> None:
        """Take the tokens of sessions away that have been preempted since they were scheduled.

        vLLM 0.32.0 loses a session that stops in this state; sparksched keeps it, see
        `test_session_that_stops_while_preempted` in tests/unit.
        """
        if releases.is_since("0.33.0"):
            return
        for request_id, request in requests.items():
            is_session = request.streaming_queue is not None
            if not (is_session and request.status == RequestStatus.PREEMPTED):
                continue
            for output in outputs:
                row = output.req_id_to_index.get(request_id)
                if row is not None and output.sampled_token_ids:
                    output.sampled_token_ids[row] = []
                    output.prompt_logprobs_dict.pop(request_id, None)
