"""What the engine's loop does for a recording: it copies what a call was given and decided."""

import functools
import time
import zlib
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import msgspec

from sparksched import environment
from sparksched.trace.events import Arrive, Begin, BlockIds, Drafts, Step, Update
from sparksched.trace.file import TraceFile
from sparksched.trace.record.make_events import EventMaker
from sparksched.trace.record.write import BackgroundWriter
from sparksched.trace.settings import UnrecordableError, settings_of
from sparksched.trace.tokens import segment_sizes

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus

_MAX_IN_FLIGHT: Final = 64
_NUM_LISTS: Final = 4
"""Of a step's events that may hold an item for each of its requests."""
_encode: Final = msgspec.msgpack.Encoder().encode
_decode_blocks: Final = msgspec.msgpack.Decoder(list[list[list[int]] | None]).decode


_Method = TypeVar("_Method", bound=Callable[..., None])


def _never_fails(method: _Method) -> _Method:
    """Have an error end the recording, and nothing else."""

    @functools.wraps(method)
    def call(self: "Recorder", *arguments: Any, **settings: Any) -> None:
        try:
            method(self, *arguments, **settings)
        except Exception as error:
            self.give_up(f"{type(error).__name__}: {error}")

    return cast("_Method", call)


class Recorder:
    """Writes the calls of one scheduler to a file that only its owner may read.

    Each method is to be called after the scheduler's own of that name has returned, with what that
    was given and what it returned, unless it says otherwise. None of them waits for the disk or
    raises an error: a recording that can't go on ends, with a warning, and the calls do nothing.
    Not thread-safe.

    Args:
        path: A file that doesn't exist yet.
        vllm_config: What the scheduler was built from; so are the next three.
        kv_cache_config: The same.
        block_size: Tokens of a scheduler's block.
        hash_block_size: Tokens of a block that is hashed; None if it is the same.
        with_tokens: Whether prompts and outputs are written; else what stands for them.
        max_bytes: Of the file, 65,536 or more.
        scheduler: Which scheduler it is: the name of its class.
        is_named: Whether the file exists from now on; else from `keep()` on, or never.

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
        with_tokens: bool = False,
        max_bytes: int = environment.DEFAULT_RECORD_BYTES,
        scheduler: str = "SparkScheduler",
        is_named: bool = True,
    ) -> None:
        settings = settings_of(
            vllm_config, kv_cache_config, block_size, hash_block_size, scheduler, with_tokens
        )
        self.path = Path(path)
        self._start = time.perf_counter()
        file = TraceFile(self.path, max_bytes, is_named=is_named)
        self._maker = EventMaker(
            file.append,
            segment_sizes(settings.hash_block_size, settings.num_hash_lookahead_tokens),
            has_keys=settings.enable_prefix_caching,
            has_tokens=with_tokens,
        )
        self._writer = BackgroundWriter(file, self._now, self._maker.write_growth)
        self._writer.note(file.append, Begin(settings))
        self._num_steps = 0
        self._in_flight: dict[int, tuple[SchedulerOutput, int, Step, list[int] | None]] = {}
        self._taken: tuple[int, Update, list[int]] | None = None
        self._compiling: dict[str, Request] = {}
        self._rejected: list[str] = []
        self._valid: list[tuple[str, int]] = []
        self._drafts: Drafts | None = None
        self._has_looked = False

    @property
    def is_recording(self) -> bool:
        """Whether calls are still written."""
        return self._writer.is_open

    @property
    def problem(self) -> str | None:
        """Why the recording has ended by itself, if it has."""
        return self._writer.problem

    def _now(self) -> float:
        return time.perf_counter() - self._start

    # ---- requests ----

    @_never_fails
    def add_request(self, request: "Request") -> None:
        """Record an arrival. One that a trace has no words for ends the recording."""
        if not self.is_recording:
            return
        try:
            arrival = self._arrival(request)
        except UnrecordableError as error:
            self.give_up(f"request {request.request_id} can't be recorded: {error}")
            return
        adapter = "" if request.lora_request is None else request.lora_request.lora_name
        roots = (adapter, request.cache_salt or "")
        prompt = request.prompt_token_ids
        self._writer.note(self._maker.arrive, arrival, prompt, roots, num_items=len(prompt))
        if arrival.has_grammar:
            self._compiling[request.request_id] = request

    def _arrival(self, request: "Request") -> Arrive:
        _refuse_unrecordable(request)
        params = request.sampling_params
        repetition = None if params is None else params.repetition_detection
        return Arrive(
            time=self._now(),
            request_id=request.request_id,
            client_index=request.client_index,
            arrival_time=request.arrival_time,
            priority=request.priority,
            num_prompt_tokens=request.num_prompt_tokens,
            keys=b"",
            prompt=None,
            salt=b"",
            max_tokens=request.max_tokens,
            min_tokens=0 if params is None else params.min_tokens,
            eos_token_id=None if params is None else params.eos_token_id,
            stop_token_ids=[] if params is None else list(params.stop_token_ids or ()),
            repetition=None
            if repetition is None
            else (
                repetition.max_pattern_size,
                repetition.min_pattern_size,
                repetition.min_count,
            ),
            has_grammar=request.structured_output_request is not None,
            is_pooling=request.pooling_params is not None,
            lora_id=0 if request.lora_request is None else request.lora_request.lora_int_id,
            skips_cache=bool(request.skip_reading_prefix_cache),
        )

    @_never_fails
    def finish_requests(
        self, request_ids: str | Iterable[str] | None, status: "RequestStatus"
    ) -> None:
        """Record an end from outside. The ids are those that the scheduler is given."""
        if isinstance(request_ids, str):
            ids: list[str] | None = [request_ids]
        else:
            # The order in which the scheduler goes through them: that of the same set.
            ids = None if request_ids is None else list(set(request_ids))
        num_ids = len(ids or ())
        self._writer.note(self._maker.finish, self._now(), ids, status.name, num_items=num_ids)

    def _note_compiled_grammars(self) -> None:
        for request_id, request in list(self._compiling.items()):
            grammar = request.structured_output_request.grammar
            if grammar is not None:
                del self._compiling[request_id]
                is_compiled = not isinstance(grammar, Exception)
                self._writer.note(self._maker.ready, request_id, is_compiled)

    # ---- steps ----

    @_never_fails
    def before_schedule(self) -> None:
        """Record which grammars are there. To be called before the scheduler looks for them."""
        self._has_looked = True
        if self._compiling:
            self._note_compiled_grammars()

    @_never_fails
    def schedule(
        self,
        output: "SchedulerOutput",
        seconds: float,
        throttle_prefills: bool = False,
        knobs: tuple[int, int] | None = None,
    ) -> None:
        """Record a step before anybody else changes it, and how long it took to decide.

        `knobs` are its own `max_num_scheduled_tokens` and `long_prefill_token_threshold`.
        """
        if not self.is_recording:
            return
        if not self._has_looked:
            self.before_schedule()
        self._has_looked = False
        counts = list(output.num_scheduled_tokens.values())
        step = self._step(output, counts, seconds, throttle_prefills, knobs)
        new = [
            (it.req_id, it.num_computed_tokens, [list(ids) for ids in it.block_ids])
            for it in output.scheduled_new_reqs
        ]
        told = (
            sorted(output.scheduled_cached_reqs.resumed_req_ids),
            sorted(output.preempted_req_ids or ()),
            sorted(output.finished_req_ids),
        )
        # The shortest way to a copy; the writer's thread takes it apart.
        blocks = _encode(output.scheduled_cached_reqs.new_block_ids)
        self._writer.note(
            self._write_step,
            step,
            list(output.num_scheduled_tokens),
            new,
            blocks,
            told,
            num_items=_NUM_LISTS * len(counts) + len(blocks) + _num_blocks(new),
        )
        self._in_flight[id(output)] = (output, self._num_steps, step, counts)
        self._num_steps += 1
        while len(self._in_flight) > _MAX_IN_FLIGHT:
            # The engine has dropped it: its output will never arrive.
            del self._in_flight[next(iter(self._in_flight))]

    def _step(
        self,
        output: "SchedulerOutput",
        counts: list[int],
        seconds: float,
        throttle_prefills: bool,
        knobs: tuple[int, int] | None,
    ) -> Step:
        """Return the event, as far as it is no list of requests."""
        cached = output.scheduled_cached_reqs
        return Step(
            sequence=self._num_steps,
            time=self._now(),
            duration_us=round(seconds * 1e6, 1),
            throttle_prefills=throttle_prefills,
            numbers=None,
            num_tokens=None if counts.count(1) == len(counts) else counts,
            num_drafts=_num_drafts(output),
            new=[],
            new_block_ids=[],
            resumed=[],
            preempted=[],
            finished=[],
            checksum=zlib.crc32(_encode((cached.num_computed_tokens, cached.num_output_tokens))),
            knobs=knobs,
        )

    def _write_step(
        self,
        step: Step,
        ids: list[str],
        new: list[tuple[str, int, BlockIds]],
        blocks: bytes,
        told: tuple[list[str], list[str], list[str]],
    ) -> None:
        complete = msgspec.structs.replace(step, new_block_ids=_decode_blocks(blocks))
        self._maker.step(complete, ids, new, told)

    @_never_fails
    def before_update(
        self, scheduler_output: "SchedulerOutput", model_runner_output: "ModelRunnerOutput"
    ) -> None:
        """Copy a step's output. To be called before the scheduler, which shortens its lists."""
        self._taken = None
        self._rejected = []
        in_flight = self._in_flight.pop(id(scheduler_output), None)
        if in_flight is None or not self.is_recording:
            return
        _, sequence, step, counts_before = in_flight
        ids = list(scheduler_output.num_scheduled_tokens)
        counts = list(scheduler_output.num_scheduled_tokens.values())
        drafts = _num_drafts(scheduler_output)
        rows = _rows(ids, model_runner_output)
        lengths = list(map(len, rows))
        pooled = model_runner_output.pooler_output
        row_of = model_runner_output.req_id_to_index
        update = Update(
            sequence=sequence,
            time=0.0,
            duration_us=0.0,
            num_sampled=None if rows and lengths.count(1) == len(lengths) else lengths,
            tokens=None,
            pooled=[pooled[row_of[it]] is not None for it in ids] if pooled else None,
            num_tokens=None if counts == counts_before else counts,
            num_drafts=None if drafts == step.num_drafts else drafts or [0] * len(ids),
            rejected=[],
        )
        self._taken = (id(scheduler_output), update, list(chain.from_iterable(rows)))

    @_never_fails
    def update_from_output(
        self,
        scheduler_output: "SchedulerOutput",
        model_runner_output: "ModelRunnerOutput",
        outputs: object = None,
        seconds: float = 0.0,
    ) -> None:
        """Record a step's output. Unless `before_update` was called, the lists must be as it was.

        `outputs`, what the scheduler made of it, follows from all else.
        """
        del outputs
        if self._taken is None or self._taken[0] != id(scheduler_output):
            self.before_update(scheduler_output, model_runner_output)
        if self._taken is None:
            return
        _, update, tokens = self._taken
        self._taken = None
        timed = (self._now(), round(seconds * 1e6, 1))
        num_items = _NUM_LISTS * len(update.num_sampled or ()) + len(tokens)
        self._writer.note(
            self._write_update, update, timed, tokens, self._rejected, num_items=num_items
        )

    def _write_update(
        self, update: Update, timed: tuple[float, float], tokens: list[int], rejected: list[str]
    ) -> None:
        timed_update = msgspec.structs.replace(update, time=timed[0], duration_us=timed[1])
        self._maker.update(timed_update, tokens, rejected)

    def grammar_rejects(self, request_id: str) -> None:
        """Record that the output that is being taken in is against a request's grammar."""
        self._rejected.append(request_id)

    # ---- draft tokens ----

    def grammar_allows(self, request_id: str, num_drafts: int) -> None:
        """Record how many of the drafts that are being taken in pass a request's grammar."""
        self._valid.append((request_id, num_drafts))

    @_never_fails
    def before_drafts(self, drafts: "DraftTokenIds") -> None:
        """Copy drafts. To be called before the scheduler, which shortens their lists."""
        rows = drafts.draft_token_ids
        self._valid = []
        self._drafts = Drafts(
            sequence=None,
            numbers=[],
            num_drafts=list(map(len, rows)),
            num_padding=[row.count(-1) for row in rows],
            tokens=list(chain.from_iterable(rows)),
            num_valid=[],
        )

    @_never_fails
    def update_draft_token_ids(self, drafts: "DraftTokenIds") -> None:
        """Record drafts for the next step."""
        self._note_drafts(drafts, None)

    @_never_fails
    def update_draft_token_ids_in_output(
        self, drafts: "DraftTokenIds", scheduler_output: "SchedulerOutput"
    ) -> None:
        """Record drafts for a step that has waited for them."""
        in_flight = self._in_flight.get(id(scheduler_output))
        if in_flight is not None:
            self._note_drafts(drafts, in_flight[1])

    def _note_drafts(self, drafts: "DraftTokenIds", sequence: int | None) -> None:
        if self._drafts is None:
            self.before_drafts(drafts)
        if self._drafts is not None:
            event = msgspec.structs.replace(self._drafts, sequence=sequence)
            num_items = _NUM_LISTS * len(drafts.req_ids) + len(event.tokens or ())
            self._writer.note(
                self._maker.drafts, event, list(drafts.req_ids), self._valid, num_items=num_items
            )
        self._drafts = None

    # ---- the rest ----

    @_never_fails
    def reset_prefix_cache(
        self,
        reset_running_requests: bool = False,
        reset_connector: bool = False,
        running: "Iterable[Request]" = (),
    ) -> None:
        """Record a reset. `running` are the requests that ran before it."""
        del reset_connector
        ids = [request.request_id for request in running] if reset_running_requests else []
        self._writer.note(
            self._maker.reset, self._now(), reset_running_requests, ids, num_items=len(ids)
        )

    @_never_fails
    def set_pause_state(self, state: int) -> None:
        """Record a pause, or its end."""
        self._writer.note(self._maker.pause, self._now(), int(state))

    @_never_fails
    def difference(self, text: str) -> None:
        """Record in words what another scheduler would have decided."""
        self._writer.note(self._maker.difference, self._now(), text)

    def give_up(self, reason: str) -> None:
        """End the recording for a reason, which is logged and written. Serving goes on."""
        if not self.is_recording:
            return
        from vllm.logger import init_logger

        init_logger("vllm.sparksched").warning(
            "sparksched: the recording has ended, serving goes on: %s", reason
        )
        self._writer.end(reason)

    def keep(self, reason: str, when_kept: Callable[[str | None], None]) -> bool:
        """End the recording, and have its file get its name. Returns at once.

        Another thread calls `when_kept` when it has the name, with None, or with why it won't have
        it. Returns False if the recording has ended already; then nothing is kept.
        """
        return self._writer.keep(reason, when_kept)

    def close(self) -> bool:
        """End the recording, and wait a little until all of it is in the file.

        Returns whether it is. The first call waits, for two seconds at most, and no other does.
        """
        self._writer.end("the engine was shut down")
        return self._writer.join()


def _refuse_unrecordable(request: "Request") -> None:
    if request.mm_features:
        raise UnrecordableError("it has images or the like")
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        raise UnrecordableError("its prompt has embeddings")
    if request.resumable or request.streaming_queue is not None:
        raise UnrecordableError("it is a session, whose input goes on")


def _num_blocks(new: list[tuple[str, int, BlockIds]]) -> int:
    return sum(len(ids) for _, _, groups in new for ids in groups)


def _num_drafts(output: "SchedulerOutput") -> list[int] | None:
    drafts = output.scheduled_spec_decode_tokens
    if not drafts:
        return None
    return [len(drafts.get(it, ())) for it in output.num_scheduled_tokens]


def _rows(ids: list[str], output: "ModelRunnerOutput") -> list[list[int]]:
    """Return what was sampled, in the order of the step."""
    rows: list[list[int]] = output.sampled_token_ids
    if not rows or output.req_ids == ids:
        return rows
    row_of = output.req_id_to_index
    return [rows[row_of[it]] if it in row_of else [] for it in ids]
