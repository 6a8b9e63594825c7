"""Attaches a recorder to a scheduler, vLLM's or ours, from outside.

The methods that change the scheduler are replaced on the one object, so that one that is not
recorded pays nothing, and everything that asks for its class gets the answer that it knows.
"""

import functools
import os
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

from vllm.logger import init_logger

from sparksched import environment
from sparksched.compat.pacing import StepKnobs
from sparksched.trace.record import engine_end
from sparksched.trace.record.copy_calls import Recorder
from sparksched.trace.settings import UnrecordableError

logger = init_logger("vllm.sparksched")

PROCESS_ID: Final = "%p"
"""In the name of a file: stands for the id of the engine's process."""

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
    path = _path(asked.path, vllm_config)
    try:
        recorder = Recorder(
            path,
            vllm_config,
            kv_cache_config,
            block_size,
            hash_block_size,
            with_tokens=asked.with_tokens,
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
    attach(recorder, scheduler)
    engine_end.prepare_engine()
    # Nobody shuts down an engine that is in its user's process.
    weakref.finalize(scheduler, recorder.close)
    what = "with all prompts and outputs" if asked.with_tokens else "without tokens"
    logger.info("sparksched: recording the scheduler to %s, %s", path, what)


def _path(name: str, vllm_config: Any) -> Path:
    name = name.replace(PROCESS_ID, str(os.getpid()))
    # Each engine has a file of its own.
    index = vllm_config.parallel_config.data_parallel_index
    return Path(f"{name}.{index}" if index else name)


def attach(recorder: Recorder, scheduler: Any) -> None:
    """Have a recorder see all that a scheduler is asked from now on, until its `shutdown()`."""
    _RecordedMethods(recorder, scheduler).replace_methods()


def recorded_methods(recorder: Recorder, scheduler: Any) -> "_RecordedMethods":
    """Return methods that record what they are given; each takes the scheduler's own first."""
    return _RecordedMethods(recorder, scheduler)


class _RecordedMethods:
    """What the scheduler's methods are replaced by, under their names; each takes its original."""

    def __init__(self, recorder: Recorder, scheduler: Any) -> None:
        self._recorder = recorder
        self._scheduler = scheduler
        self.gates = GrammarGates()
        self._depth = 0

    def replace_methods(self) -> None:
        for name in (
            "add_request",
            "finish_requests",
            "schedule",
            "update_from_output",
            "update_draft_token_ids",
            "update_draft_token_ids_in_output",
            "reset_prefix_cache",
            "set_pause_state",
            "shutdown",
        ):
            original = getattr(self._scheduler, name)
            replacement = functools.partial(getattr(self, name), original)
            setattr(self._scheduler, name, self._unless_nested(original, replacement))
        manager = self._scheduler.structured_output_manager
        for name in ("accept_tokens", "validate_tokens"):
            setattr(manager, name, functools.partial(getattr(self, name), getattr(manager, name)))
        engine_end.call_at_the_end(self._scheduler, self._recorder.close)

    def _unless_nested(self, original: Call, replacement: Call) -> Call:
        """Leave what the scheduler asks of itself to the scheduler."""

        @functools.wraps(original)
        def call(*arguments: Any, **settings: Any) -> Any:
            if self._depth:
                return original(*arguments, **settings)
            self._depth += 1
            try:
                return replacement(*arguments, **settings)
            finally:
                self._depth -= 1

        return call

    def add_request(self, original: Call, request: Any) -> None:
        # Before the scheduler: it may refuse the id, and then the engine ends.
        self.gates.put_before(request)
        self._recorder.add_request(request)
        original(request)

    def finish_requests(self, original: Call, request_ids: Any, finished_status: Any) -> Any:
        if request_ids is not None and not isinstance(request_ids, str | set | list | tuple):
            request_ids = list(request_ids)
        finished = original(request_ids, finished_status)
        self._recorder.finish_requests(request_ids, finished_status)
        return finished

    def schedule(
        self, original: Call, throttle_prefills: bool = False, *knobs: Any
    ) -> Any:
        self.gates.open()
        self._recorder.before_schedule()
        start = time.perf_counter()
        output = original(throttle_prefills, *knobs)
        seconds = time.perf_counter() - start
        chosen: StepKnobs | None = getattr(self._scheduler, "chosen_knobs", None)
        if chosen is None:
            self._recorder.schedule(output, seconds, throttle_prefills)
        else:
            self._recorder.schedule(output, seconds, chosen.throttle_prefills, chosen[:2])
        return output

    def update_from_output(
        self, original: Call, scheduler_output: Any, model_runner_output: Any
    ) -> Any:
        self._recorder.before_update(scheduler_output, model_runner_output)
        start = time.perf_counter()
        outputs = original(scheduler_output, model_runner_output)
        seconds = time.perf_counter() - start
        self._recorder.update_from_output(scheduler_output, model_runner_output, outputs, seconds)
        return outputs

    def update_draft_token_ids(self, original: Call, draft_token_ids: Any) -> None:
        self._recorder.before_drafts(draft_token_ids)
        original(draft_token_ids)
        self._recorder.update_draft_token_ids(draft_token_ids)

    def update_draft_token_ids_in_output(
        self, original: Call, draft_token_ids: Any, scheduler_output: Any
    ) -> None:
        self._recorder.before_drafts(draft_token_ids)
        original(draft_token_ids, scheduler_output)
        self._recorder.update_draft_token_ids_in_output(draft_token_ids, scheduler_output)

    def reset_prefix_cache(
        self, original: Call, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        running = list(self._scheduler.running)
        try:
            return bool(original(reset_running_requests, reset_connector))
        finally:
            self._recorder.reset_prefix_cache(reset_running_requests, reset_connector, running)

    def set_pause_state(self, original: Call, pause_state: Any) -> None:
        original(pause_state)
        self._recorder.set_pause_state(pause_state)

    def shutdown(self, original: Call) -> None:
        try:
            original()
        finally:
            self._recorder.close()

    def accept_tokens(self, original: Call, request: Any, token_ids: list[int]) -> bool:
        accepted = bool(original(request, token_ids))
        if not accepted:
            self._recorder.grammar_rejects(request.request_id)
        return accepted

    def validate_tokens(self, original: Call, request: Any, token_ids: list[int]) -> list[int]:
        valid: list[int] = original(request, token_ids)
        if request.use_structured_output:
            self._recorder.grammar_allows(request.request_id, len(valid))
        return valid


class GrammarGates:
    """Lets compiled grammars be seen from a step on, and not from the middle of one.

    Grammars are compiled by other threads. Without this, one that is done while the scheduler looks
    would be seen by the scheduler and not by the recorder, or the other way round.
    """

    def __init__(self) -> None:
        self._gates: list[tuple[Future[Any], Future[Any]]] = []

    def put_before(self, request: Any) -> None:
        """Hide a request's grammar until the next step, if it is still being compiled."""
        structured = request.structured_output_request
        if structured is not None and isinstance(structured._grammar, Future):
            compiling, structured._grammar = structured._grammar, Future()
            self._gates.append((compiling, structured._grammar))

    def remove(self) -> None:
        """Show each as soon as it is there: nobody records any more."""
        for compiling, gate in self._gates:
            compiling.add_done_callback(functools.partial(_hand_over, target=gate))
        self._gates.clear()

    def open(self) -> None:
        """Show those that are there."""
        for compiling, gate in self._gates:
            if compiling.done():
                _hand_over(compiling, gate)
        self._gates = [(compiling, gate) for compiling, gate in self._gates if not gate.done()]


def _hand_over(source: Future[Any], target: Future[Any]) -> None:
    if source.cancelled():
        target.cancel()
        return
    error = source.exception()
    if error is None:
        target.set_result(source.result())
    else:
        target.set_exception(error)
