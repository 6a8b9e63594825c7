"""What can happen to a scheduler, as plain data: requests, and what a trace does with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus


@dataclass(frozen=True)
class ItemPlan:
    """One image of a prompt."""

    identifier: str
    offset: int
    length: int
    is_embed: tuple[bool, ...] | None
    """Which of the placeholders stand for embeddings; None if all do."""
    data: str
    """What comes with it: its tensors, their address in shared memory, or nothing."""

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True)
class GrammarPlan:
    """How the grammar of one structured output request will behave."""

    ready_after_steps: int
    """Steps from arrival until the compilation ends; 0 means that it arrives compiled."""
    fails_to_compile: bool
    rejects_output_token: int | None
    """Position among the output tokens of the first one to be rejected."""
    rejects_draft_tokens: int | None = None
    """Draft tokens that are multiples of this are rejected."""


@dataclass(frozen=True)
class RequestPlan:
    """A request as plain data, from which each side builds its own `Request`."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    client_index: int
    arrival_time: float
    priority: int
    cache_salt: str | None
    trace_headers: tuple[tuple[str, str], ...] | None
    sampling: tuple[tuple[str, Any], ...]
    """Arguments of `SamplingParams`."""
    eos_token_id: int | None
    repetition: tuple[int, int, int] | None
    """Greatest and smallest pattern size, and the repetitions that stop the request."""
    grammar: GrammarPlan | None
    aborted_on_arrival: bool
    session_id: str | None = None
    pooling: tuple[tuple[str, Any], ...] | None = None
    """Arguments of `PoolingParams`, which stand in for `sampling` then."""
    items: tuple[ItemPlan, ...] = ()
    """Images in the prompt."""
    resumable: bool = False
    """Whether more input may follow, to be added to what the request has come to by then."""


@dataclass(frozen=True)
class Arrive:
    plan: RequestPlan


@dataclass(frozen=True)
class Continue:
    """The next input of a session, or its end if it isn't resumable."""

    plan: RequestPlan


@dataclass(frozen=True)
class Finish:
    """A call of `finish_requests`, with the argument exactly as the engine would pass it."""

    request_ids: str | tuple[str, ...] | None
    status: RequestStatus


@dataclass(frozen=True)
class ResetPrefixCache:
    reset_running_requests: bool
    reset_connector: bool


@dataclass(frozen=True)
class SetPauseState:
    state: PauseState


@dataclass(frozen=True)
class LoseInFlightSteps:
    """Fault recovery: every request is aborted and no output in flight ever arrives."""


@dataclass(frozen=True)
class TakeStats:
    """A call of `make_stats` outside `update_from_output`, as the engine's error report does."""


@dataclass(frozen=True)
class Call:
    """An event that is no more than a call of the scheduler; what it returns is compared."""

    operation: str
    call: Callable[[Any], Any]


Event = (
    Arrive
    | Continue
    | Finish
    | ResetPrefixCache
    | SetPauseState
    | LoseInFlightSteps
    | TakeStats
    | Call
)


class SchedulerView(Protocol):
    """What the generator may know of the scenario's state."""

    step_number: int

    def live_request_ids(self) -> list[str]: ...
    def in_flight_request_ids(self) -> list[str]: ...
    def request_ids_with_status(self, status: RequestStatus) -> list[str]: ...
    def finished_request_ids(self) -> list[str]: ...
