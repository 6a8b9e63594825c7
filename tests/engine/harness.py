"""Runs vLLM's real `EngineCore` in this process, with either scheduler, and notes all it does."""

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import vllm.envs
from sparksched import plugin
from sparksched.compat import patching
from sparksched.engine.scheduler import NativeScheduler
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine import core as engine_module
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor
from vllm.v1.request import Request

from testkit.device import EOS_TOKEN_ID
from testkit.executor import engine_config

GRAMMAR_TIMEOUT_S = 60
CLOSING_TIMEOUT_S = 60
MAX_STEPS = 2000

_REQUEST_FIELDS = frozenset(EngineCoreRequest.__struct_fields__)

ASYNC_SCHEDULING = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])


class Choice(Enum):
    """The ways to choose a scheduler."""

    STOCK = "stock"
    PLUGIN = "VLLM_SCHEDULER=sparksched"
    SCHEDULER_CLS = "--scheduler-cls sparksched.scheduler.SparkScheduler"


@contextmanager
def restored_vllm() -> Iterator[None]:
    """Undo on exit what sparksched and an engine change in this process."""
    with ExitStack() as stack:
        # These serve a process that holds one engine only, and take longer than a whole test.
        for name in ("freeze_gc_heap", "cleanup_dist_env_and_memory"):
            stack.enter_context(mock.patch.object(engine_module, name))
        stack.enter_context(restored_replacements())
        stack.enter_context(mock.patch.object(sys, "meta_path", list(sys.meta_path)))
        variables = dict(vllm.envs.environment_variables)
        stack.enter_context(mock.patch.object(vllm.envs, "environment_variables", variables))
        stack.enter_context(mock.patch.dict(os.environ))
        # An engine has vLLM read the environment once and for all.
        stack.callback(vllm.envs.disable_envs_cache)
        yield
        # A client whose engine has died closes down in a thread of ours, or in vLLM's monitor,
        # whoever notices first: that needs our changes.
        for thread in threading.enumerate():
            if thread.name in ("RingShutdown", "MPClientEngineMonitor"):
                thread.join(CLOSING_TIMEOUT_S)


@contextmanager
def restored_replacements() -> Iterator[None]:
    """Undo on exit whatever `patching.replace` has replaced meanwhile."""
    replace = patching.replace
    with ExitStack() as stack:

        def replace_for_a_while(owner: object, name: str, make: Any) -> None:
            inherited = name not in vars(owner)
            original = getattr(owner, name)
            replace(owner, name, make)
            if getattr(owner, name) is original:
                return
            if inherited:
                stack.callback(delattr, owner, name)
            else:
                stack.callback(setattr, owner, name, original)

        stack.enter_context(mock.patch.object(patching, "replace", replace_for_a_while))
        stack.enter_context(mock.patch.object(patching, "_reported", set()))
        yield


@dataclass
class Record:
    """All that an engine told its clients and its executor."""

    outputs: list[dict[int, EngineCoreOutputs]] = field(default_factory=list)
    batches_in_flight: list[int] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)
    steps: list[SchedulerOutput] = field(default_factory=list)
    bitmasks: list[Any] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> dict[str, list[int]]:
        """What each request was given."""
        tokens: dict[str, list[int]] = {}
        for output in self._request_outputs():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        return tokens

    @property
    def finish_reasons(self) -> dict[str, FinishReason]:
        """Why each request that the scheduler ended was ended."""
        return {
            output.request_id: output.finish_reason
            for output in self._request_outputs()
            if output.finish_reason is not None
        }

    @property
    def num_preemptions(self) -> int:
        return sum(len(step.preempted_req_ids or ()) for step in self.steps)

    @property
    def num_cached_tokens(self) -> int:
        """How many tokens of prompts were found in the prefix cache."""
        stats = (output.prefill_stats for output in self._request_outputs())
        return sum(it.num_cached_tokens for it in stats if it is not None)

    def _request_outputs(self) -> Iterator[Any]:
        for by_client in self.outputs:
            for outputs in by_client.values():
                yield from outputs.outputs


class DrivenEngine:
    """An `EngineCore` whose busy loop the test plays."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.record = Record()

    @property
    def is_busy(self) -> bool:
        return self.core.scheduler.has_requests() or bool(self.core.batch_queue)

    def add(self, request: EngineCoreRequest) -> Request:
        """Take in a request as the input thread and the busy loop do, its grammar compiled."""
        preprocessed, wave = self.core.preprocess_add_request(request)
        _wait_for_grammar(preprocessed)
        self.core.add_request(preprocessed, wave)
        return preprocessed

    def step(self, num_steps: int = 1) -> None:
        """Let the engine make steps, as long as it has something to do."""
        for _ in range(num_steps):
            if not self.is_busy:
                return
            outputs, model_executed = self.core.step_fn()
            self.core.post_step(model_executed)
            self.record.batches_in_flight.append(len(self.core.batch_queue or ()))
            if outputs:
                self.record.outputs.append(_without_times(outputs))

    def run(self) -> None:
        """Let the engine run until nothing is left to do."""
        for _ in range(MAX_STEPS):
            if not self.is_busy:
                return
            self.step()
        raise AssertionError(f"the engine is still busy after {MAX_STEPS} steps")

    def note(self, answer: object) -> None:
        """Add an answer of the engine to what is compared."""
        self.record.answers.append(answer)

    def close(self) -> Record:
        """Shut the engine down and return all that happened."""
        executor = self.core.model_executor
        self.record.steps = executor.steps
        self.record.bitmasks = executor.bitmasks
        self.record.calls = executor.calls
        self.core.shutdown()
        return self.record


def _wait_for_grammar(request: Request) -> None:
    structured = request.structured_output_request
    if structured is not None and isinstance(structured._grammar, Future):
        _, pending = wait([structured._grammar], timeout=GRAMMAR_TIMEOUT_S)
        assert not pending, "the grammar is still being compiled"


def _without_times(outputs: dict[int, EngineCoreOutputs]) -> dict[int, EngineCoreOutputs]:
    for of_client in outputs.values():
        of_client.timestamp = 0.0
        stats = of_client.scheduler_stats
        if stats is not None and stats.iteration_details is not None:
            stats.iteration_details.elapsed_ms = 0.0
        for output in of_client.outputs:
            for event in output.events or ():
                event.timestamp = 0.0
    return outputs


@contextmanager
def running_engine(
    choice: Choice,
    model_directory: Path,
    *,
    async_scheduling: bool,
    strict: bool = False,
    **settings: Any,
) -> Iterator[DrivenEngine]:
    """Build an engine with the chosen scheduler; leave no trace of it afterwards."""
    with restored_vllm():
        os.environ.pop("VLLM_SCHEDULER", None)
        os.environ["SPARKSCHED_STRICT"] = str(int(strict))
        if choice is Choice.PLUGIN:
            os.environ["VLLM_SCHEDULER"] = "sparksched"
        if choice is Choice.SCHEDULER_CLS:
            settings["scheduler_cls"] = "sparksched.scheduler.SparkScheduler"
        plugin.register()
        config = engine_config(model_directory, async_scheduling=async_scheduling, **settings)
        engine = DrivenEngine(EngineCore(config, Executor.get_class(config), log_stats=True))
        try:
            yield engine
        finally:
            engine.close()


def new_request(
    request_id: str, prompt_token_ids: list[int] | None, max_tokens: int = 16, **settings: Any
) -> EngineCoreRequest:
    """Return a request as a client sends it; `settings` are its own or its sampling parameters'."""
    fields = {name: settings.pop(name) for name in list(settings) if name in _REQUEST_FIELDS}
    params = SamplingParams(max_tokens=max_tokens, **settings)
    params.update_from_generation_config({}, EOS_TOKEN_ID)
    defaults: dict[str, Any] = {
        "mm_features": None,
        "pooling_params": None,
        "arrival_time": 1.0,
        "lora_request": None,
        "cache_salt": None,
        "data_parallel_rank": None,
    }
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        sampling_params=params,
        **{**defaults, **fields},
    )


Scenario = Callable[[DrivenEngine], None]


def run_both(
    scenario: Scenario, model_directory: Path, *, async_scheduling: bool, **settings: Any
) -> Record:
    """Play a scenario on both schedulers, compare the records and return one of them."""
    stock, native = (
        _run_one(choice, scenario, model_directory, async_scheduling=async_scheduling, **settings)
        for choice in (Choice.STOCK, Choice.PLUGIN)
    )
    assert native.tokens == stock.tokens
    assert native.finish_reasons == stock.finish_reasons
    assert native.answers == stock.answers
    assert native.calls == stock.calls
    assert native.batches_in_flight == stock.batches_in_flight
    _assert_equal_sequences(native.steps, stock.steps)
    _assert_equal_sequences(native.bitmasks, stock.bitmasks)
    _assert_equal_sequences(native.outputs, stock.outputs)
    return native


def _assert_equal_sequences(native: Sequence[Any], stock: Sequence[Any]) -> None:
    for step, (ours, theirs) in enumerate(zip(native, stock, strict=True)):
        assert ours == theirs, f"at step {step}"


def _run_one(choice: Choice, scenario: Scenario, model_directory: Path, **settings: Any) -> Record:
    with running_engine(choice, model_directory, **settings) as engine:
        assert isinstance(engine.core.scheduler, NativeScheduler) == (choice is Choice.PLUGIN)
        scenario(engine)
    return engine.record
