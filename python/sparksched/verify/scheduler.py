"""`VerifyingScheduler`: ours and vLLM's in lockstep, until they differ.

Each call of the engine goes to ours, then to vLLM's, which has requests, steps and answers of
grammars of its own. The engine gets what ours returns.
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from vllm.config import VllmConfig
from vllm.distributed.kv_events import EventBatch
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from sparksched import environment
from sparksched.engine.scheduler import NativeScheduler
from sparksched.verify import report
from sparksched.verify.compare import Difference, first_difference
from sparksched.verify.copies import copy_of_runner_output
from sparksched.verify.events import NotedEvents
from sparksched.verify.grammars import AskedManager
from sparksched.verify.outputs import IGNORED_FIELDS, difference_of_outputs
from sparksched.verify.shadow import CopyError, Shadow

Result = TypeVar("Result")


@dataclass(frozen=True)
class Outcome(Generic[Result]):
    """What came of a call: a value, unless there is an error."""

    value: Result | None
    error: Exception | None = None

    def get(self) -> Result:
        """Return the value, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]


def outcome_of(call: Callable[[], Result]) -> Outcome[Result]:
    """Call, and keep what came of it."""
    try:
        return Outcome(call())
    except Exception as error:
        return Outcome(None, error)


_Comparison = Callable[[Any, Any, str], Difference | None]


def _difference_of_results(reference: Any, candidate: Any, path: str) -> Difference | None:
    return first_difference(reference, candidate, path, IGNORED_FIELDS)


def _difference_of_ended(
    reference: list[Request], candidate: list[Request], path: str
) -> Difference | None:
    theirs, ours = (
        [(it.request_id, it.client_index) for it in its] for its in (reference, candidate)
    )
    return first_difference(theirs, ours, path)


def _asking_both(method: str, compare: _Comparison = _difference_of_results) -> Any:
    """Return a method that gives both schedulers the same arguments, which neither changes."""

    def ask(self: "VerifyingScheduler", *arguments: Any, **settings: Any) -> Any:
        ours = getattr(super(VerifyingScheduler, self), method)
        return self._both(
            f"{method}()",
            lambda: ours(*arguments, **settings),
            lambda shadow: getattr(shadow.scheduler, method)(*arguments, **settings),
            compare,
        )

    return ask


class VerifyingScheduler(NativeScheduler):
    """Schedules as `NativeScheduler`, and has vLLM's own scheduler check each step.

    After the first difference, and after an error of verification itself, ours goes on alone, or
    the engine stops: as `SPARKSCHED_VERIFY` says.

    Raises:
        VerificationError: from the call in which they differ, or that can't be verified, if the
            engine is to stop.

    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        structured_output_manager: StructuredOutputManager,
        *others: Any,
        **settings: Any,
    ) -> None:
        grammars = AskedManager(structured_output_manager)
        super().__init__(vllm_config, kv_cache_config, grammars, *others, **settings)
        self._events = NotedEvents(self._kv_event_publisher)
        self._verification = environment.verification() or "stop"
        self._num_steps = 0
        shadow = Shadow(vllm_config, kv_cache_config, grammars, *others, **settings)
        self._shadow: Shadow | None = shadow
        """vLLM's side; None once ours goes on alone."""
        report.announce(shadow.scheduler, self._verification)

    # ---- the two calls of each step ----

    def schedule(
        self, throttle_prefills: bool = False, knobs: tuple[int, int, tuple[str, ...]] | None = None
    ) -> SchedulerOutput:
        self._num_steps += 1
        ours = super().schedule
        return self._both(
            "schedule()",
            lambda: ours(throttle_prefills, knobs),
            lambda shadow: shadow.schedule(throttle_prefills, self.knobs),
            agreed=self._agreed_on_step,
        )

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        # Schedulers cut it.
        twin = self._copied(lambda _: copy_of_runner_output(model_runner_output))
        ours = super().update_from_output
        return self._both(
            "update_from_output()",
            lambda: ours(scheduler_output, model_runner_output),
            lambda shadow: shadow.scheduler.update_from_output(
                shadow.own(scheduler_output), twin.get()
            ),
            compare=difference_of_outputs,
        )

    # ---- requests ----

    def add_request(self, request: Request) -> None:
        # Before ours has changed anything of it.
        twin = self._copied(lambda shadow: shadow.copy_of_request(request))
        ours = super().add_request
        hashes = list(request.block_hashes)

        def add_ours() -> list[Any]:
            ours(request)
            return hashes

        def add_theirs(shadow: Shadow) -> list[Any]:
            own = twin.get()
            own_hashes = list(own.block_hashes)
            # Ours may have ordered it.
            own.priority = request.priority
            shadow.scheduler.add_request(own)
            return own_hashes

        self._both(f"block hashes of request {request.request_id!r}", add_ours, add_theirs)

    # Both go through the same set of ids: its order counts.
    finish_requests = _asking_both("finish_requests", _difference_of_ended)
    reset_prefix_cache = _asking_both("reset_prefix_cache")
    set_pause_state = _asking_both("set_pause_state")

    # ---- questions ----

    get_num_unfinished_requests = _asking_both("get_num_unfinished_requests")
    has_unfinished_requests = _asking_both("has_unfinished_requests")
    has_finished_requests = _asking_both("has_finished_requests")
    has_requests = _asking_both("has_requests")
    get_request_counts = _asking_both("get_request_counts")
    get_kv_cache_usage = _asking_both("get_kv_cache_usage")
    reset_encoder_cache = _asking_both("reset_encoder_cache")
    make_stats = _asking_both("make_stats")

    # ---- structured output and drafts ----

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        ours = super().get_grammar_bitmask
        return self._both(
            "get_grammar_bitmask()",
            lambda: ours(scheduler_output),
            lambda shadow: shadow.scheduler.get_grammar_bitmask(shadow.own(scheduler_output)),
        )

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        twin = self._copied(lambda _: copy.deepcopy(draft_token_ids))
        ours = super().update_draft_token_ids
        self._both(
            "update_draft_token_ids()",
            lambda: ours(draft_token_ids),
            lambda shadow: shadow.scheduler.update_draft_token_ids(twin.get()),
        )

    def update_draft_token_ids_in_output(
        self, draft_token_ids: DraftTokenIds, scheduler_output: SchedulerOutput
    ) -> None:
        twin = self._copied(lambda _: copy.deepcopy(draft_token_ids))
        ours = super().update_draft_token_ids_in_output
        before = copy.copy(scheduler_output.scheduled_spec_decode_tokens)

        def update_ours() -> dict[str, Any]:
            ours(draft_token_ids, scheduler_output)
            return _drafts_of(scheduler_output)

        def update_theirs(shadow: Shadow) -> dict[str, Any]:
            own = shadow.own(scheduler_output)
            own.scheduled_spec_decode_tokens = dict(before)
            shadow.scheduler.update_draft_token_ids_in_output(twin.get(), own)
            return _drafts_of(own)

        self._both("update_draft_token_ids_in_output()", update_ours, update_theirs)

    # ---- the end ----

    def shutdown(self) -> None:
        """Stop publishing KV cache events; say what was verified."""
        try:
            if self._shadow is not None:
                report.summarise(self._num_steps)
        finally:
            super().shutdown()

    # ---- both, and what becomes of a difference ----

    def _both(
        self,
        call: str,
        ours: Callable[[], Result],
        theirs: Callable[[Shadow], Result],
        compare: _Comparison = _difference_of_results,
        agreed: Callable[[Shadow, Result, Result], None] | None = None,
    ) -> Result:
        """Call both schedulers, as long as they agree; return what the engine gets."""
        shadow = self._shadow
        if shadow is None:
            return ours()
        candidate, reference = outcome_of(ours), outcome_of(lambda: theirs(shadow))
        events = shadow.events.take(), self._events.take()

        def difference() -> str | None:
            found = self._difference(shadow, call, (reference, candidate), events, compare)
            if found is None and agreed is not None and candidate.error is None:
                agreed(shadow, candidate.get(), reference.get())
            return None if found is None else report.describe(found, self._num_steps - 1)

        self._settle(outcome_of(difference))
        return candidate.get()

    def _agreed_on_step(
        self, shadow: Shadow, ours: SchedulerOutput, theirs: SchedulerOutput
    ) -> None:
        shadow.pair(ours, theirs)
        report.note_progress(self._num_steps)

    def _difference(
        self,
        shadow: Shadow,
        call: str,
        outcomes: tuple[Outcome[Any], Outcome[Any]],
        events: tuple[list[EventBatch], list[EventBatch]],
        compare: _Comparison,
    ) -> Difference | None:
        """Return in what the sides differ; of each pair vLLM's comes first."""
        reference, candidate = outcomes
        if isinstance(reference.error, CopyError):
            raise reference.error
        unexpected = shadow.grammars.take_unexpected()
        if type(reference.error) is not type(candidate.error):
            return Difference(f"error of {call}", reference.error, candidate.error)
        if reference.error is None:
            difference = compare(reference.value, candidate.value, call)
            if difference is not None:
                return difference
        if unexpected is not None:
            return first_difference(*unexpected, f"question to a grammar in {call}")
        return first_difference(*events, f"KV cache events of {call}", IGNORED_FIELDS)

    def _copied(self, copy_for: Callable[[Shadow], Result]) -> Outcome[Result]:
        """Copy for vLLM's side, as long as there is one; a copy that fails ends verification."""
        if self._shadow is None:
            return Outcome(None)
        copied = outcome_of(functools.partial(copy_for, self._shadow))
        if copied.error is not None:
            self._settle(Outcome(None, copied.error))
        return copied

    def _settle(self, found: Outcome[str | None]) -> None:
        """Let ours go on alone if there is a difference, or if nobody can say."""
        if found.error is None and found.value is None:
            return
        self._shadow = None
        self._events.forget()
        self.structured_output_manager.forget_answers()
        report.report(found.error or str(found.value), self._verification)


def _drafts_of(output: SchedulerOutput) -> dict[str, Any]:
    return {
        "scheduled_spec_decode_tokens": output.scheduled_spec_decode_tokens,
        "num_invalid_spec_tokens": output.num_invalid_spec_tokens,
    }
