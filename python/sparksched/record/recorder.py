"""Records a scheduler, vLLM's or ours, from outside.

The methods that change the scheduler are replaced on the one object, so that one that is not
recorded pays nothing, and everything that asks for its class gets the answer that it knows. In the
engine's loop each call is only copied; the rest is done by the writer's thread.
"""

import functools
import time
import weakref
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vllm.logger import init_logger

from sparksched import environment
from sparksched.compat.pacing import StepKnobs
from sparksched.record.decisions import decide, num_drafts_of, num_tokens_of
from sparksched.record.events import (
    VERSION,
    Arrive,
    Begin,
    Drafts,
    Finish,
    Pause,
    Ready,
    Reset,
    Step,
    Update,
)
from sparksched.record.settings import UnrecordableError, settings_of
from sparksched.record.tokens import Tokens
from sparksched.record.write import Writer

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus

logger = init_logger("vllm.sparksched")

_MAX_IN_FLIGHT: Final = 64
_METHODS: Final = (
    "add_request",
    "finish_requests",
    "schedule",
    "update_from_output",
    "update_draft_token_ids",
    "update_draft_token_ids_in_output",
    "reset_prefix_cache",
    "set_pause_state",
    "shutdown",
)
_NOT_YET: Final[Future[Any]] = Future()
"""In the place of a grammar that nobody is to see before the next step."""

Call = Callable[..., Any]
Watch = Generator[None, Any, None]
"""Of a call: goes up to its `yield` before the call, and gets the result from there."""


def record(scheduler: Any) -> None:
    """Record a scheduler as the environment says, or log why that can't be.

    Raises:
        RuntimeError: if the file can't be created, or is there already.

    """
    asked = environment.recording()
    assert asked is not None, "a scheduler is recorded where the environment names a file"
    index = scheduler.vllm_config.parallel_config.data_parallel_index
    path = environment.file_of_engine(asked.path, index)
    try:
        Recorder(scheduler, path, asked.max_bytes)
    except UnrecordableError as error:
        logger.warning("sparksched: nothing is recorded: %s", error)
    except OSError as error:
        raise RuntimeError(
            f"{environment.RECORD}: {path} can't be created: {error.strerror}"
        ) from error
    else:
        logger.info("sparksched: recording the scheduler to %s, without tokens", path)


class Recorder:
    """Writes the calls of one scheduler to a file that only its owner may read.

    It neither waits for the disk nor raises an error: a recording that can't go on ends, with a
    warning. Not thread-safe. It ends with the scheduler's `shutdown()`, or with the scheduler.

    What stands for prompts and outputs is written, not they.

    Raises:
        UnrecordableError: if the scheduler decides by something that a trace has no words for.
        OSError: if the file can't be created, or is there already.

    """

    def __init__(
        self, scheduler: Any, path: Path, max_bytes: int = environment.DEFAULT_RECORD_BYTES
    ) -> None:
        settings = settings_of(scheduler)
        self.writer = Writer(path, max_bytes)
        self._now, self._note, self._append = self.writer.now, self.writer.note, self.writer.append
        self._tokens = Tokens(self._append, settings)
        self._note(self._append, Begin(VERSION, settings))
        self._num_steps = 0
        self._last_ids: list[str] = []
        self._in_flight: dict[int, tuple[SchedulerOutput, Step]] = {}
        self._compiling: list[tuple[str, Any, Any]] = []
        self._rejected: list[str] = []
        self._valid: dict[str, int] = {}
        self._is_called = False
        self._seconds = 0.0
        """What the last call took."""
        self._scheduler = weakref.ref(scheduler)
        # Nobody shuts down an engine that is in its user's process.
        self.close = weakref.finalize(scheduler, self.writer.close, "the engine was shut down")
        for name in _METHODS:
            watch = getattr(self, f"_{name}")
            setattr(scheduler, name, self._watched(getattr(scheduler, name), watch))
        manager = scheduler.structured_output_manager
        for name in ("accept_tokens", "validate_tokens"):
            replacement = functools.partial(getattr(self, f"_{name}"), getattr(manager, name))
            setattr(manager, name, replacement)

    def _watched(self, original: Call, watch: Callable[..., Watch]) -> Call:
        """Return a method that takes note of a call, but not of what the scheduler asks itself."""

        @functools.wraps(original)
        def call(*arguments: Any, **settings: Any) -> Any:
            if self._is_called:
                return original(*arguments, **settings)
            self._is_called = True
            try:
                watching = _begin(watch, arguments, settings)
                self._go_on(watching, None)
                start = time.perf_counter()
                result = original(*arguments, **settings)
                self._seconds = time.perf_counter() - start
                self._go_on(watching, result)
            finally:
                self._is_called = False
            return result

        return call

    def _go_on(self, watching: Watch, result: Any) -> None:
        """Have an error of ours, or a request without words, end the recording and nothing else."""
        try:
            watching.send(result)
        except StopIteration:
            pass
        except UnrecordableError as error:
            self.writer.give_up(str(error))
        except Exception as error:
            self.writer.give_up(f"{type(error).__name__}: {error}")

    # ---- requests ----

    def _add_request(self, request: "Request") -> Watch:
        # Before the scheduler: it may refuse the id, and then the engine ends.
        if not self.writer.is_open:
            return
        arrival = _arrival(request, self._now())
        adapter = "" if request.lora_request is None else request.lora_request.lora_name
        root = f"{adapter}\0{request.cache_salt or ''}"
        params, prompt = request.sampling_params, request.prompt_token_ids
        self._note(self._tokens.arrive, arrival, params, prompt, root)
        structured = request.structured_output_request
        if structured is not None:
            compiling = structured._grammar
            if isinstance(compiling, Future):
                # It may be done while the scheduler looks, and then one of the two would see it.
                structured._grammar = _NOT_YET
            self._compiling.append((request.request_id, structured, compiling))
        yield

    def _let_grammars_be_seen(self) -> None:
        """Let the scheduler see the grammars that are compiled, from this step on."""
        waiting, self._compiling = self._compiling, []
        for request_id, structured, compiling in waiting:
            if structured._grammar is _NOT_YET and compiling.done():
                structured._grammar = compiling
            if structured.grammar is None:
                self._compiling.append((request_id, structured, compiling))
            else:
                is_compiled = not isinstance(structured.grammar, Exception)
                self._note(self._append, Ready(request_id, is_compiled))

    def _finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: "RequestStatus"
    ) -> Watch:
        yield
        if isinstance(request_ids, str):
            request_ids = [request_ids]
        # The order in which the scheduler goes through them: that of the same set.
        ids = None if request_ids is None else list(set(request_ids))
        status: Any = finished_status.name
        self._note(self._tokens.finish, Finish(self._now(), ids, status))

    # ---- steps ----

    def _schedule(self, throttle_prefills: bool = False, *_knobs: Any) -> Watch:
        if self._compiling:
            self._let_grammars_be_seen()
        output: SchedulerOutput = yield
        if not self.writer.is_open:
            return
        knobs: StepKnobs | None = getattr(self._scheduler(), "chosen_knobs", None)
        duration_us = round(self._seconds * 1e6, 1)
        step = Step(self._num_steps, self._now(), duration_us, throttle_prefills, knobs)
        # Before anybody else changes it.
        self._last_ids = decide(step, output, self._last_ids)
        self._note(self._tokens.step, step)
        self._in_flight[id(output)] = (output, step)
        self._num_steps += 1
        while len(self._in_flight) > _MAX_IN_FLIGHT:
            # The engine has dropped it: its output will never arrive.
            del self._in_flight[next(iter(self._in_flight))]

    def _update_from_output(
        self, scheduler_output: "SchedulerOutput", model_runner_output: "ModelRunnerOutput"
    ) -> Watch:
        self._rejected = []
        in_flight = self._in_flight.pop(id(scheduler_output), None)
        if in_flight is None or not self.writer.is_open:
            return
        step = in_flight[1]
        # Before the scheduler, which shortens its lists.
        ids = list(scheduler_output.num_scheduled_tokens)
        update = Update(step.sequence, 0.0)
        if num_tokens_of(scheduler_output) != step.num_tokens:
            update.num_tokens = list(scheduler_output.num_scheduled_tokens.values())
        if (drafts := num_drafts_of(scheduler_output)) != step.num_drafts:
            update.num_drafts = drafts or [0] * len(ids)
        rows = _rows(ids, model_runner_output)
        lengths = list(map(len, rows))
        if not rows or lengths.count(1) != len(lengths):
            update.num_sampled = lengths
        if pooled := model_runner_output.pooler_output:
            row_of = model_runner_output.req_id_to_index
            update.pooled = [pooled[row_of[it]] is not None for it in ids]
        tokens = list(chain.from_iterable(rows))
        yield
        update.time, update.duration_us = self._now(), round(self._seconds * 1e6, 1)
        update.rejected = self._rejected
        self._note(self._tokens.update, update, tokens)

    def _accept_tokens(self, original: Call, request: Any, token_ids: list[int]) -> bool:
        accepted = bool(original(request, token_ids))
        if not accepted:
            self._rejected.append(request.request_id)
        return accepted

    # ---- draft tokens ----

    def _update_draft_token_ids(self, drafts: "DraftTokenIds", *output: "SchedulerOutput") -> Watch:
        self._valid = {}
        in_flight = self._in_flight.get(id(output[0])) if output else None
        if output and in_flight is None:
            return
        # Before the scheduler, which shortens their lists.
        rows = drafts.draft_token_ids
        num_drafts, num_padding = list(map(len, rows)), [row.count(-1) for row in rows]
        yield
        sequence = None if in_flight is None else in_flight[1].sequence
        valid, self._valid = self._valid, {}
        noted = Drafts(sequence, list(drafts.req_ids), num_drafts, num_padding, valid)
        self._note(self._append, noted)

    _update_draft_token_ids_in_output = _update_draft_token_ids

    def _validate_tokens(self, original: Call, request: Any, token_ids: list[int]) -> list[int]:
        valid: list[int] = original(request, token_ids)
        if request.use_structured_output:
            self._valid[request.request_id] = len(valid)
        return valid

    # ---- the rest ----

    def _reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> Watch:
        scheduler: Any = self._scheduler()
        ids = [it.request_id for it in scheduler.running] if reset_running_requests else []
        self._note(self._tokens.reset, Reset(self._now(), reset_running_requests), ids)
        yield

    def _set_pause_state(self, pause_state: Any) -> Watch:
        self._note(self._append, Pause(self._now(), int(pause_state)))
        yield

    def _shutdown(self) -> Watch:
        self.close()
        yield


def _begin(watch: Callable[..., Watch], arguments: Any, settings: Any) -> Watch:
    """Have arguments that nobody knows be an error of the watch, not of the call."""
    yield from watch(*arguments, **settings)


def _arrival(request: "Request", now: float) -> Arrive:
    """Return the event, without what stands for tokens.

    Raises:
        UnrecordableError: if a trace has no words for the request.

    """
    without_words = {
        "it has images or the like": bool(request.mm_features),
        "its prompt has embeddings": request.prompt_token_ids is None
        or request.prompt_embeds is not None,
        "it is a session, whose input goes on": request.resumable
        or request.streaming_queue is not None,
    }
    for reason, applies in without_words.items():
        if applies:
            raise UnrecordableError(f"request {request.request_id} can't be recorded: {reason}")
    return Arrive(
        time=now,
        request_id=request.request_id,
        client_index=request.client_index,
        arrival_time=request.arrival_time,
        priority=request.priority,
        num_prompt_tokens=request.num_prompt_tokens,
        max_tokens=request.max_tokens,
        has_grammar=request.structured_output_request is not None,
        is_pooling=request.pooling_params is not None,
        lora_id=0 if request.lora_request is None else request.lora_request.lora_int_id,
        skips_cache=bool(request.skip_reading_prefix_cache),
    )


def _rows(ids: list[str], output: "ModelRunnerOutput") -> list[list[int]]:
    """Return what was sampled, in the order of the step."""
    rows: list[list[int]] = output.sampled_token_ids
    if not rows or output.req_ids == ids:
        return rows
    row_of = output.req_id_to_index
    return [rows[row_of[it]] if it in row_of else [] for it in ids]
