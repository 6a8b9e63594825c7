"""Just-in-time scheduling: a step is decided only when the GPU is about to need it.

With asynchronous scheduling vLLM decides a step as soon as the one before it begins, so that a
request which comes a moment later waits for both. Here the engine's loop, with one step in flight,
receives requests until a deadline: the end of that step as it is predicted, less what the host
needs to launch the next one, less a margin. Wherever that isn't known well, it decides at once.

Read beside `step_with_batch_queue` in `vllm/v1/engine/core.py`, which stays as it is: the loop is
held back before it, and the queue of batches tells when steps are launched and end.
"""

import queue
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from vllm.logger import init_logger
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.executor.multiproc_executor import FutureWrapper, MultiprocExecutor

from sparksched.engine import launch_times
from sparksched.engine.context import context_of

if TYPE_CHECKING:
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine.core import EngineCoreProc

    from sparksched import _core

logger = init_logger("vllm.sparksched")

MARGIN_S: Final = 0.0003
"""How long before it is needed a step is to be launched."""

POLL_S: Final = 0.0005
"""How often a step in flight is looked at: futures of vLLM's executors call nobody back."""

MIN_SAMPLES: Final = 4
"""What was seen less often is not predicted."""

_NUM_STEPS: Final = 16
"""How many steps of a kind a prediction is made of."""

_NUM_LAUNCHES: Final = 64
"""How many launches the host's lead is made of."""

_BRIEF: Final = frozenset({EngineCoreRequestType.ADD, EngineCoreRequestType.ABORT})
"""Messages after which the loop goes on waiting."""

Kind: TypeAlias = tuple[bool, int]
"""Whether all requests of a step are in decode, and the class of its number of tokens."""

_DECODE: Final[Kind] = (True, 0)
"""Stands for all kinds of steps in decode."""


# ----------------------------------------------------------------------------------------
# Predictions
# ----------------------------------------------------------------------------------------


def kind_of(step: "SchedulerOutput") -> Kind | None:
    """Return with which other steps this one has its time in common; None for an empty one."""
    num_tokens = step.total_num_scheduled_tokens
    if not num_tokens:
        return None
    return num_tokens == len(step.num_scheduled_tokens), _class_of(num_tokens)


def _class_of(num_tokens: int) -> int:
    # Four for each doubling.
    shift = max(num_tokens.bit_length() - 3, 0)
    return num_tokens >> shift << shift


class StepTimes:
    """How long steps take, by kind: a low quantile of the last ones.

    So a slow step doesn't delay the next one, and a shorter time counts after three steps.
    """

    def __init__(self) -> None:
        self._recent: dict[Kind, deque[float]] = {}

    def note(self, kind: Kind, time_s: float) -> None:
        """Learn how long a step took."""
        self._recent.setdefault(kind, deque(maxlen=_NUM_STEPS)).append(time_s)

    def predict(self, kind: Kind | None) -> float | None:
        """Return in seconds how long a step will take at least; None if that isn't known."""
        recent = None if kind is None else self._recent.get(kind)
        if recent is None or len(recent) < MIN_SAMPLES:
            return None
        return sorted(recent)[len(recent) // 8]


class HostLeads:
    """How long the host takes from its deadline until a step is launched: a high quantile.

    All steps in decode have one in common, since each may be launched as one graph. Others have one
    for each kind: a long prompt, of many kernels, says nothing about a short one.
    """

    def __init__(self) -> None:
        self._recent: dict[Kind, deque[float]] = {}

    def note(self, kind: Kind, time_s: float) -> None:
        """Learn how long a launch took."""
        key = _DECODE if kind[0] else kind
        self._recent.setdefault(key, deque(maxlen=_NUM_LAUNCHES)).append(time_s)

    def predict(self, kind: Kind) -> float | None:
        """Return in seconds how long a launch will take at most; None if that isn't known.

        The next larger kind stands in for one that was seen too seldom.
        """
        if kind[0]:
            return self._quantile(_DECODE)
        larger = sorted(it for it in self._recent if not it[0] and it >= kind)
        return next((time_s for it in larger if (time_s := self._quantile(it)) is not None), None)

    def _quantile(self, key: Kind) -> float | None:
        recent = self._recent.get(key, ())
        if len(recent) < MIN_SAMPLES:
            return None
        return sorted(recent)[len(recent) * 15 // 16]


def deadline(start_s: float, step_s: float, lead_s: float) -> float:
    """Return when the step behind one that began at `start_s` has to be decided."""
    return start_s + step_s - lead_s - MARGIN_S


# ----------------------------------------------------------------------------------------
# Steps in flight
# ----------------------------------------------------------------------------------------


def end_of(future: Any, launch: Any = None, executor: Any = None) -> Callable[[], bool] | None:
    """Return what tells whether a step has ended; None if only waiting for its result does.

    `launch` is the future of its first part, `execute_model()`.
    """
    if isinstance(future, FutureWrapper):
        return _answer_of_workers(future, launch, executor)
    # Those of executors without workers wait for an event on the GPU, when asked for the result.
    output = getattr(future, "async_output", None)
    if output is not None:
        event = getattr(output, "async_copy_ready_event", None) or getattr(
            output, "copy_event", None
        )
        return None if event is None else event.query
    # Others that wait when asked have no end before. A future that is none may tell all the same.
    if isinstance(future, Future) and type(future).result is not Future.result:
        return None
    return getattr(future, "done", None)


def _answer_of_workers(
    future: FutureWrapper, launch: Any, executor: Any
) -> Callable[[], bool] | None:
    if not executor.response_mqs:
        return None  # a worker has died, and the executor is shut down
    answers = executor.response_mqs[executor.output_rank]
    if not answers._is_local_reader:
        return None  # the worker runs on another host

    def has_come() -> bool:
        # Answers come in the order of the calls. What waits for one takes those before it.
        while not future.done() and _has_answer(answers):
            if future.futures_queue[-1] not in (launch, future):
                return False
            future.futures_queue.pop()._wait_for_response()
        return bool(future.done())

    return has_come


def _has_answer(answers: "MessageQueue") -> bool:
    """Return whether a queue can be read without waiting; see its `acquire_read`."""
    if answers.shutting_down:
        return True  # reading fails at once
    with answers.buffer.get_metadata(answers.current_idx) as metadata:
        is_written, is_read = metadata[0], metadata[answers.local_reader_rank + 1]
    return bool(is_written and not is_read)


class StepInFlight:
    """Stands in for the future of a launched step, as far as the engine's loop uses it."""

    def __init__(self, batch: Any, owner: "JustInTime") -> None:
        self._future, step, launch = batch
        self._end_of = end_of(self._future, launch, owner.executor)
        self._owner = owner
        self.kind = kind_of(step)
        self.needs_loop = step.has_structured_output_requests
        """Whether the next step waits for a grammar, which waits for this one's tokens."""
        self.due_s = owner.due_s
        """From when on the host has been at work on it."""
        self.is_held = owner.is_held
        """Whether it was held back."""
        self.launch_s = owner.clock()
        """When it was launched, or handed to workers that launch it."""
        self.free_s: float | None = None
        """When the GPU had nothing else to do; None as long as the step before hasn't ended."""
        self.idle_s = self.launch_s
        """From when on, at the earliest, the GPU may have had nothing else to do."""
        self.last_running_s = self.launch_s
        """When it was last seen not to have ended."""
        self.end_s: float | None = None
        """When it was first seen to have ended."""

    @property
    def is_decode(self) -> bool:
        """Whether all its requests are in decode."""
        return self.kind is not None and self.kind[0]

    @property
    def start_s(self) -> float | None:
        """When it began on the GPU, as far as that is known; None if it hasn't."""
        return None if self.free_s is None else max(self.launch_s, self.free_s)

    @property
    def tells_its_end(self) -> bool:
        """Whether `has_ended` can know."""
        return self._end_of is not None

    def has_ended(self, now_s: float) -> bool:
        """Look whether it has ended by now."""
        if self.end_s is not None:
            return True
        if self._end_of is None or not self._end_of():
            self.last_running_s = now_s
            return False
        self.end_s = now_s
        return True

    def result(self) -> Any:
        """Wait for its result."""
        self._owner.look_at(self)
        output = None
        try:
            output = self._future.result()
            return output
        finally:
            self._owner.note_end(self, output)


class _StepsInFlight(deque[Any]):
    """An engine's queue of batches, which tells of each that is launched."""

    def __init__(self, owner: "JustInTime", maxlen: int) -> None:
        super().__init__(maxlen=maxlen)
        self._owner = owner

    def appendleft(self, batch: Any) -> None:
        """Take in a batch that was launched just now."""
        launched = StepInFlight(batch, self._owner)
        self._owner.note_launch(launched)
        super().appendleft((launched, *batch[1:]))


# ----------------------------------------------------------------------------------------
# The loop
# ----------------------------------------------------------------------------------------


def begin(engine: "EngineCoreProc") -> None:
    """Have an engine, whose loop hasn't begun, schedule just in time; or log why it won't."""
    reason = why_not(engine)
    if reason is not None:
        logger.warning("sparksched: steps are not scheduled just in time: %s", reason)
        return
    JustInTime(engine, context_of(engine).meters)
    logger.info("sparksched: steps are scheduled just in time")


def why_not(engine: "EngineCoreProc") -> str | None:
    """Return what keeps an engine from scheduling just in time, or None."""
    from vllm.v1.engine.core import DPEngineCoreProc

    scheduler = engine.scheduler
    reasons = {
        "vLLM's own scheduler runs": context_of(engine).scheduler is None,
        "scheduling is synchronous": not engine.async_scheduling or engine.batch_queue is None,
        "pipeline parallelism keeps several steps in flight": (
            engine.vllm_config.parallel_config.pipeline_parallel_size > 1
        ),
        "data-parallel engines step together": isinstance(engine, DPEngineCoreProc),
        "speculative decoding has drafts to hand over": engine.check_for_draft_tokens,
        "a KV connector has transfers to look after": scheduler.connector is not None,
        "an encoder cache connector has transfers to look after": (
            getattr(scheduler, "ec_connector", None) is not None
        ),
        "pooling models decode nothing": engine.is_pooling_model,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


class JustInTime:
    """Holds the steps of one engine back; all in the thread of the engine's loop."""

    def __init__(
        self,
        engine: "EngineCoreProc",
        meters: "_core.EngineMeters | None",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Change an engine whose loop hasn't begun."""
        self.executor = engine.model_executor
        self.clock = clock
        self.due_s = 0.0
        """From when on the host has been at work on the next step."""
        self.is_held = False
        """Whether it was held back."""
        self._engine = engine
        self._meters = meters
        self._times = StepTimes()
        self._leads = HostLeads()
        self._has_workers = isinstance(self.executor, MultiprocExecutor)
        self._step_of_vllm = engine.step_fn
        self._num_left_waiting = 0
        """Requests that the last step has found no room for."""
        self._num_joining_tokens = 0
        """Of the prompts that were received while this step is held back."""
        self._late: tuple[Any, Any] | None = None
        """A request that came too late for this step, and is received after it."""
        self._has_warned = False
        engine.batch_queue = self._in_flight = _StepsInFlight(self, engine.batch_queue_size)
        engine.step_fn = self.step

    def step(self) -> Any:
        """Receive until the next step is due, and make it."""
        self._hold_back()
        made = self._step_of_vllm()
        if self._late is not None:
            late, self._late = self._late, None
            self._handle(*late)
        return made

    def _hold_back(self) -> None:
        self._num_joining_tokens = 0
        start_s = now_s = self.clock()
        until_s = self._until()
        self.is_held = until_s is not None and until_s > start_s
        if until_s is None or not self.is_held:
            self.due_s = start_s
            return
        ((step, *_),) = self._in_flight
        while not step.has_ended(now_s) and until_s is not None and now_s < until_s:
            kind = self._receive(min(POLL_S, until_s - now_s))
            if kind is not None or not self._engine.is_running():
                until_s = self._until() if kind in _BRIEF else None
            now_s = self.clock()
        # Waking up late is a part of the lead.
        self.due_s = now_s if until_s is None else min(now_s, until_s)
        if self._meters is not None:
            self._meters.note_held_back(now_s - start_s)

    def _until(self) -> float | None:
        """Return until when the next step may be held back; None if something needs the loop."""
        engine = self._engine
        if len(self._in_flight) != 1 or self._num_left_waiting or self._late is not None:
            return None
        ((step, *_),) = self._in_flight
        if step.needs_loop or not step.tells_its_end or step.start_s is None:
            return None
        if not engine.is_running() or engine._idle_state_callbacks:
            return None
        if not engine.scheduler.has_unfinished_requests():
            return None
        return self._deadline(step, self._num_joining_tokens)

    def _deadline(self, step: StepInFlight, num_joining_tokens: int) -> float | None:
        """Return when the step behind this one has to be decided; None if that isn't known.

        Args:
            step: The one in flight.
            num_joining_tokens: Of prompts that the next one computes.

        """
        num_running, num_waiting = self._engine.scheduler.get_request_counts()
        if num_waiting and not num_joining_tokens:
            return None  # they came while the loop was at work: no reason to let them wait
        step_s = self._times.predict(step.kind)
        leads_s = [self._leads.predict(_DECODE)]
        if num_joining_tokens:
            joined = (False, _class_of(num_running + num_joining_tokens))
            leads_s.append(self._leads.predict(joined))
        if step.kind is not None and not step.is_decode:
            leads_s.append(self._leads.predict(step.kind))  # its prompts may go on
        known_s = [it for it in leads_s if it is not None]
        if step_s is None or step.start_s is None or len(known_s) < len(leads_s):
            return None
        return deadline(step.start_s, step_s, max(known_s))

    def _receive(self, timeout_s: float) -> Any:
        """Handle the next message, if one comes in time; return its kind."""
        try:
            kind, message = self._engine.input_queue.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if kind is EngineCoreRequestType.ADD:
            num_joining_tokens = self._num_joining_tokens + message[0].num_prompt_tokens
            ((step, *_),) = self._in_flight
            until_s = self._deadline(step, num_joining_tokens)
            if until_s is not None and until_s < self.clock():
                # The GPU would have to wait for a step with its prompt.
                self._late = (kind, message)
                return kind
            self._num_joining_tokens = num_joining_tokens
        self._handle(kind, message)
        return kind

    def _handle(self, kind: Any, message: Any) -> None:
        self._engine._handle_client_request(kind, message)
        self._engine._maybe_publish_request_counts()  # as the loop does after it has received

    # ---- what the queue of batches tells ----

    def note_launch(self, step: StepInFlight) -> None:
        """Take notice of a step that was launched just now."""
        if self._in_flight:
            self._in_flight[0][0].has_ended(step.launch_s)
        else:
            step.free_s = step.launch_s
        if not self._has_workers:
            self._note_lead(step)
        _, self._num_left_waiting = self._engine.scheduler.get_request_counts()
        if step.kind is not None and not step.tells_its_end:
            self._warn_once("the executor doesn't tell when a step has ended")

    def look_at(self, step: StepInFlight) -> None:
        """Take notice of whether a step has ended before anybody waits for it."""
        step.has_ended(self.clock())

    def note_end(self, step: StepInFlight, output: Any) -> None:
        """Take notice of a step whose result is here."""
        is_seen = step.end_s is None  # the loop was waiting for it
        end_s = step.end_s = self.clock() if step.end_s is None else step.end_s
        for following, *_ in self._in_flight:
            following.free_s, following.idle_s = end_s, step.last_running_s
        if self._has_workers and step.kind is not None:
            self._note_launch_by_workers(step, output)
        if step.kind is None or step.start_s is None:
            return
        if step.is_held and step.start_s == step.launch_s and self._meters is not None:
            self._meters.note_late(step.launch_s - step.idle_s)
        time_s = end_s - step.start_s
        expected_s = self._times.predict(step.kind)
        # When it really ended is not known if the loop has come late. It took no longer than this.
        if is_seen or (expected_s is not None and time_s < expected_s):
            self._times.note(step.kind, time_s)

    def _note_launch_by_workers(self, step: StepInFlight, output: Any) -> None:
        launch_s = launch_times.launch_of(output)
        if launch_s is not None:
            step.launch_s = launch_s
            self._note_lead(step)
        elif output is not None:
            self._warn_once("the workers don't tell when they have launched a step")

    def _note_lead(self, step: StepInFlight) -> None:
        # With a grammar it may have waited for the one before.
        if step.kind is not None and not step.needs_loop:
            self._leads.note(step.kind, step.launch_s - step.due_s)

    def _warn_once(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("sparksched: steps are not scheduled just in time: %s", reason)
