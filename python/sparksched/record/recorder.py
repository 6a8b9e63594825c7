"""Records a scheduler, vLLM's or ours, from outside.

The methods that change the scheduler are replaced on the one object, so that one that is not
recorded pays nothing, and everything that asks for its class gets the answer that it knows. In the
engine's loop each call is only copied; the rest is done by the writer's thread.
"""

import functools
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vllm.logger import init_logger

from sparksched import environment
from sparksched.compat.pacing import StepKnobs
from sparksched.record.decisions import Decision, decision_of, num_drafts_of
from sparksched.record.events import (
    VERSION,
    Arrive,
    Begin,
    Drafts,
    Finish,
    Knobs,
    Pause,
    Reset,
    Step,
    Update,
)
from sparksched.record.keys import segment_sizes
from sparksched.record.make_events import Ends, EventMaker
from sparksched.record.settings import UnrecordableError, settings_of
from sparksched.record.write import BackgroundWriter, Lines

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
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
_NUM_LISTS: Final = 4
"""Of a step's events that may hold an item for each of its requests."""
_KNOBS: Final = {throttled: Knobs(throttle_prefills=throttled) for throttled in (False, True)}
_NOT_YET: Final[Future[Any]] = Future()
"""In the place of a grammar that nobody is to see before the next step."""

Call = Callable[..., Any]


def record(
    scheduler: Any,
    vllm_config: Any,
    kv_cache_config: Any,
    block_size: int,
    hash_block_size: int | None = None,
    **_others: Any,
) -> None:
    """Record a scheduler as the environment says, or log why that can't be.

    Raises:
        RuntimeError: if the file can't be created, or is there already.

    """
    asked = environment.recording()
    assert asked is not None, "a scheduler is recorded where the environment names a file"
    index = vllm_config.parallel_config.data_parallel_index
    path = environment.file_of_engine(asked.path, index)
    try:
        recorder = Recorder(
            path,
            vllm_config,
            kv_cache_config,
            block_size,
            hash_block_size,
            max_bytes=asked.max_bytes,
            scheduler=type(scheduler).__name__,
        )
    except UnrecordableError as error:
        logger.warning("sparksched: nothing is recorded: %s", error)
        return
    except OSError as error:
        raise RuntimeError(
            f"{environment.RECORD}: {path} can't be created: {error.strerror}"
        ) from error
    recorder.attach(scheduler)
    # Nobody shuts down an engine that is in its user's process.
    weakref.finalize(scheduler, recorder.close)
    logger.info("sparksched: recording the scheduler to %s, without tokens", path)


class Recorder:
    """Writes the calls of one scheduler to a file that only its owner may read.

    It neither waits for the disk nor raises an error: a recording that can't go on ends, with a
    warning. Not thread-safe.

    It takes what the scheduler was built from, and the name of its class. What stands for prompts
    and outputs is written, not they.

    Raises:
        UnrecordableError: if the scheduler decides by something that a trace has no words for.
        OSError: if the file can't be created, or is there already.

    """

    def __init__(
        self,
        path: str | Path,
        vllm_config: "VllmConfig",
        kv_cache_config: "KVCacheConfig",
        block_size: int,
        hash_block_size: int | None = None,
        *,
        max_bytes: int = environment.DEFAULT_RECORD_BYTES,
        scheduler: str = "SparkScheduler",
    ) -> None:
        settings = settings_of(vllm_config, kv_cache_config, block_size, hash_block_size, scheduler)
        self._start = time.perf_counter()
        lines = Lines(Path(path), max_bytes)
        self._maker = EventMaker(
            lines.append,
            segment_sizes(settings.hash_block_size, settings.num_hash_lookahead_tokens),
            has_keys=settings.cache_config.enable_prefix_caching,
        )
        self._writer = BackgroundWriter(lines, self._now, self._maker.write_growth)
        self._note, self._append = self._writer.note, lines.append
        self._note(lines.append, Begin(VERSION, settings))
        self._num_steps = 0
        self._in_flight: dict[int, tuple[SchedulerOutput, int, Decision]] = {}
        self._compiling: list[tuple[str, Any, Any]] = []
        self._rejected: list[str] = []
        self._valid: list[tuple[str, int]] = []
        self._scheduler: Callable[[], Any] = lambda: None
        self._depth = 0
        self._seconds = 0.0
        """What the last call took."""

    @property
    def is_recording(self) -> bool:
        """Whether calls are still written."""
        return self._writer.is_open

    @property
    def problem(self) -> str | None:
        """Why the recording has ended by itself, if it has."""
        return self._writer.problem

    def attach(self, scheduler: Any) -> None:
        """See all that a scheduler is asked from now on, until its `shutdown()`."""
        self._scheduler = weakref.ref(scheduler)
        for name in _METHODS:
            before, after = (getattr(self, f"_{it}_{name}", None) for it in ("before", "after"))
            setattr(scheduler, name, self._recorded(getattr(scheduler, name), before, after))
        manager = scheduler.structured_output_manager
        for name in ("accept_tokens", "validate_tokens"):
            replacement = functools.partial(getattr(self, f"_{name}"), getattr(manager, name))
            setattr(manager, name, replacement)

    def _recorded(self, original: Call, before: Call | None, after: Call | None) -> Call:
        """Return a method that takes note of a call, but not of what the scheduler asks itself.

        `after` is given what `before` has returned, or else the result.
        """

        @functools.wraps(original)
        def call(*arguments: Any, **settings: Any) -> Any:
            if self._depth:
                return original(*arguments, **settings)
            self._depth += 1
            taken = None
            try:
                if before is not None:
                    try:
                        taken = before(*arguments, **settings)
                    except Exception as error:
                        self._fail(error)
                start = time.perf_counter()
                result = original(*arguments, **settings)
                self._seconds = time.perf_counter() - start
                if after is not None:
                    try:
                        after(result if taken is None else taken, *arguments, **settings)
                    except Exception as error:
                        self._fail(error)
            finally:
                self._depth -= 1
            return result

        return call

    def _fail(self, error: Exception) -> None:
        """Have an error of ours end the recording, and nothing else."""
        self.give_up(f"{type(error).__name__}: {error}")

    def give_up(self, reason: str) -> None:
        """End the recording for a reason, which is logged and written. Serving goes on."""
        if self.is_recording:
            logger.warning("sparksched: the recording has ended, serving goes on: %s", reason)
            self._writer.end(reason)

    def close(self) -> bool:
        """End the recording, and wait a little until all of it is in the file.

        Returns whether it is. The first call waits, for two seconds at most, and no other does.
        """
        self._writer.end("the engine was shut down")
        return self._writer.join()

    def _now(self) -> float:
        return round(time.perf_counter() - self._start, 6)

    # ---- requests ----

    def _before_add_request(self, request: "Request") -> None:
        # Before the scheduler: it may refuse the id, and then the engine ends.
        if not self.is_recording:
            return
        try:
            arrival = _arrival(request, self._now())
        except UnrecordableError as error:
            self.give_up(f"request {request.request_id} can't be recorded: {error}")
            return
        adapter = "" if request.lora_request is None else request.lora_request.lora_name
        prompt, salt = request.prompt_token_ids, request.cache_salt or ""
        arguments = arrival, _ends(request), prompt, adapter, salt
        self._note(self._maker.arrive, *arguments, num_items=len(prompt))
        structured = request.structured_output_request
        if structured is not None:
            compiling = structured._grammar
            if isinstance(compiling, Future):
                # It may be done while the scheduler looks, and then one of the two would see it.
                structured._grammar = _NOT_YET
            self._compiling.append((request.request_id, structured, compiling))

    def _before_schedule(self, *_arguments: Any, **_settings: Any) -> None:
        """Let the scheduler see the grammars that are compiled, from this step on."""
        if not self._compiling:
            return
        waiting, self._compiling = self._compiling, []
        for request_id, structured, compiling in waiting:
            if structured._grammar is _NOT_YET and compiling.done():
                structured._grammar = compiling
            if structured.grammar is None:
                self._compiling.append((request_id, structured, compiling))
            else:
                is_compiled = not isinstance(structured.grammar, Exception)
                self._note(self._maker.ready, request_id, is_compiled)

    def _after_finish_requests(
        self, _: object, request_ids: str | Iterable[str] | None, finished_status: "RequestStatus"
    ) -> None:
        if isinstance(request_ids, str):
            request_ids = [request_ids]
        # The order in which the scheduler goes through them: that of the same set.
        ids = None if request_ids is None else list(set(request_ids))
        finish: Any = Finish(self._now(), None, finished_status.name)
        self._note(self._maker.finish, finish, ids, num_items=len(ids or ()))

    # ---- steps ----

    def _after_schedule(
        self, output: "SchedulerOutput", throttle_prefills: bool = False, *_knobs: Any
    ) -> None:
        """Copy a step before anybody else changes it."""
        if not self.is_recording:
            return
        decision = decision_of(output)
        chosen: StepKnobs | None = getattr(self._scheduler(), "chosen_knobs", None)
        knobs = Knobs(**chosen._asdict()) if chosen else _KNOBS[throttle_prefills]
        step = Step(self._num_steps, self._now(), round(self._seconds * 1e6, 1), knobs)
        num_items = _NUM_LISTS * len(decision.ids) + len(bytes(decision.new_block_ids))
        if decision.new:
            num_items += sum(len(group) for *_, groups in decision.new for group in groups)
        self._note(self._maker.step, step, decision, num_items=num_items)
        self._in_flight[id(output)] = (output, self._num_steps, decision)
        self._num_steps += 1
        while len(self._in_flight) > _MAX_IN_FLIGHT:
            # The engine has dropped it: its output will never arrive.
            del self._in_flight[next(iter(self._in_flight))]

    def _before_update_from_output(
        self, scheduler_output: "SchedulerOutput", model_runner_output: "ModelRunnerOutput"
    ) -> tuple[Update, list[int]] | None:
        """Copy a step's output before the scheduler, which shortens its lists."""
        self._rejected = []
        in_flight = self._in_flight.pop(id(scheduler_output), None)
        if in_flight is None or not self.is_recording:
            return None
        _, sequence, before = in_flight
        ids = list(scheduler_output.num_scheduled_tokens)
        counts = list(scheduler_output.num_scheduled_tokens.values())
        drafts = num_drafts_of(scheduler_output)
        rows = _rows(ids, model_runner_output)
        lengths = list(map(len, rows))
        pooled = model_runner_output.pooler_output
        row_of = model_runner_output.req_id_to_index
        update = Update(
            sequence,
            0.0,
            num_sampled=None if rows and lengths.count(1) == len(lengths) else lengths,
            pooled=[pooled[row_of[it]] is not None for it in ids] if pooled else None,
            num_tokens=None if counts == before.counts else counts,
            num_drafts=None if drafts == before.num_drafts else drafts or [0] * len(ids),
        )
        return update, list(chain.from_iterable(rows))

    def _after_update_from_output(self, taken: Any, *_arguments: Any) -> None:
        if isinstance(taken, tuple):
            update, tokens = taken
            update.time, update.duration_us = self._now(), round(self._seconds * 1e6, 1)
            num_items = _NUM_LISTS * len(update.num_sampled or ()) + len(tokens)
            self._note(self._maker.update, update, tokens, self._rejected, num_items=num_items)

    def _accept_tokens(self, original: Call, request: Any, token_ids: list[int]) -> bool:
        accepted = bool(original(request, token_ids))
        if not accepted:
            self._rejected.append(request.request_id)
        return accepted

    # ---- draft tokens ----

    def _before_update_draft_token_ids(
        self, drafts: "DraftTokenIds", *output: "SchedulerOutput"
    ) -> Drafts | None:
        """Copy drafts before the scheduler, which shortens their lists."""
        self._valid = []
        in_flight = self._in_flight.get(id(output[0])) if output else None
        if output and in_flight is None:
            return None
        rows = drafts.draft_token_ids
        return Drafts(
            sequence=None if in_flight is None else in_flight[1],
            num_drafts=list(map(len, rows)),
            num_padding=[row.count(-1) for row in rows],
        )

    def _after_update_draft_token_ids(
        self, taken: Drafts | None, drafts: "DraftTokenIds", *_output: "SchedulerOutput"
    ) -> None:
        if taken is not None:
            ids = list(drafts.req_ids)
            num_items = _NUM_LISTS * len(ids)
            self._note(self._maker.drafts, taken, ids, self._valid, num_items=num_items)

    _before_update_draft_token_ids_in_output = _before_update_draft_token_ids
    _after_update_draft_token_ids_in_output = _after_update_draft_token_ids

    def _validate_tokens(self, original: Call, request: Any, token_ids: list[int]) -> list[int]:
        valid: list[int] = original(request, token_ids)
        if request.use_structured_output:
            self._valid.append((request.request_id, len(valid)))
        return valid

    # ---- the rest ----

    def _before_reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> None:
        ids = [it.request_id for it in self._scheduler().running] if reset_running_requests else []
        reset = Reset(self._now(), reset_running_requests)
        self._note(self._maker.reset, reset, ids, num_items=len(ids))

    def _before_set_pause_state(self, pause_state: Any) -> None:
        self._note(self._append, Pause(self._now(), int(pause_state)))

    def _before_shutdown(self) -> None:
        self.close()


def _arrival(request: "Request", now: float) -> Arrive:
    """Return the event, without what stands for tokens.

    Raises:
        UnrecordableError: if a trace has no words for the request.

    """
    if request.mm_features:
        raise UnrecordableError("it has images or the like")
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        raise UnrecordableError("its prompt has embeddings")
    if request.resumable or request.streaming_queue is not None:
        raise UnrecordableError("it is a session, whose input goes on")
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


def _ends(request: "Request") -> Ends:
    params = request.sampling_params
    if params is None:
        return Ends(frozenset(), None, 0)
    tokens = {*(params.stop_token_ids or ()), params.eos_token_id} - {None}
    repetition = params.repetition_detection
    patterns = repetition and (
        repetition.max_pattern_size,
        repetition.min_pattern_size,
        repetition.min_count,
    )
    return Ends(frozenset(tokens), patterns, params.min_tokens)


def _rows(ids: list[str], output: "ModelRunnerOutput") -> list[list[int]]:
    """Return what was sampled, in the order of the step."""
    rows: list[list[int]] = output.sampled_token_ids
    if not rows or output.req_ids == ids:
        return rows
    row_of = output.req_id_to_index
    return [rows[row_of[it]] if it in row_of else [] for it in ids]
