"""`SPARKSCHED_VERIFY` in vLLM's real engine: what is planted is found, ours goes on or nobody."""

import itertools
import logging
import pkgutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from logs import collected
from sparksched.verify.report import VerificationError
from sparksched.verify.scheduler import VerifyingScheduler
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import EventPublisher, EventPublisherFactory
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import FinishReason
from vllm.v1.request import Request

from testkit.device import Device
from testkit.executor import engine_config

from .harness import (
    ASYNC_SCHEDULING,
    GRAMMAR_TIMEOUT_S,
    Choice,
    DrivenEngine,
    Record,
    run_both,
    running_engine,
)
from .test_engine_core import add_long_requests, arriving_in_turn, mixed_requests
from .test_structured_output import REGEX, SCHEMA, structured_request

pytestmark = pytest.mark.release

PLANTED_STEP = 8


@pytest.fixture
def messages(model_directory: Path) -> Iterator[list[str]]:
    """Collect what sparksched logs."""
    # vLLM's loggers get new handlers with the first configuration of the process.
    engine_config(model_directory, async_scheduling=False)
    with collected(logger="vllm.sparksched", text=with_cause) as lines:
        yield lines


def with_cause(record: logging.LogRecord) -> str:
    cause = record.exc_info and record.exc_info[1]
    because = f" {cause!r}" if cause else ""
    return f"{record.levelname}: {record.getMessage()}{because}"


# ----------------------------------------------------------------------------------------
# No false alarm
# ----------------------------------------------------------------------------------------


def disturbed(engine: DrivenEngine) -> None:
    """Let requests with and without grammars be aborted, preempted and paused."""
    engine.add(structured_request("regex", [1] * 20, regex=REGEX))
    add_long_requests(engine, "stays", "aborted", "in-flight")
    engine.step(3)
    engine.add(structured_request("json", [4] * 60, json=SCHEMA))
    engine.core.abort_requests(["aborted", "unknown"])
    engine.step(2)
    engine.core.aborts_queue.put_nowait(["in-flight", "stays", "in-flight"])
    engine.step()
    engine.note(engine.core.reset_prefix_cache(reset_running_requests=True))
    engine.core.pause_scheduler(mode="keep")
    engine.step(2)
    engine.core.resume_scheduler()
    for request in mixed_requests(8):
        engine.add(request)
    engine.run()


@ASYNC_SCHEDULING
@pytest.mark.parametrize("scenario", [arriving_in_turn, disturbed])
def test_engines_that_agree(
    scenario: Callable[[DrivenEngine], None],
    async_scheduling: bool,
    model_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    messages: list[str],
) -> None:
    monkeypatch.setenv("SPARKSCHED_VERIFY", "stop")
    run_both(
        scenario,
        model_directory,
        async_scheduling=async_scheduling,
        num_gpu_blocks_override=48,
        scheduler_reserve_full_isl=False,
        strict=True,
    )
    assert any("verifies each step" in message for message in messages)
    assert any("steps verified, no difference" in message for message in messages)


# ----------------------------------------------------------------------------------------
# Planted differences
# ----------------------------------------------------------------------------------------


class PlantedCore:
    """A core that decides as the one it holds, but for one step."""

    def __init__(
        self,
        core: Any,
        plant: Callable[["PlantedCore", Any], Any],
        call: str,
        step: int = PLANTED_STEP,
    ) -> None:
        self.core = core
        self._step = step
        self._plant = plant
        self._call = call
        self._num_calls = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.core, name)
        if name != self._call:
            return method

        def planted(*arguments: Any) -> Any:
            self._num_calls += 1
            result = method(*arguments)
            return self._plant(self, result) if self._num_calls == self._step else result

        return planted


def other_block(_: PlantedCore, output: SchedulerOutput) -> SchedulerOutput:
    output.scheduled_new_reqs[0].block_ids[0][0] += 1
    return output


def other_token(_: PlantedCore, outputs: dict[int, Any]) -> dict[int, Any]:
    outputs[0].outputs[0].new_token_ids[0] ^= 1
    return outputs


def forgotten_abort(_: PlantedCore, ended: list[Request]) -> list[Request]:
    return ended[1:]


PLANTS: dict[str, tuple[Any, str, str]] = {
    "block": (other_block, "schedule", "scheduled_new_reqs[0].block_ids[0][0]"),
    "token": (other_token, "update_from_output", "outputs[0].new_token_ids[0]"),
    "abort": (forgotten_abort, "finish_requests", "finish_requests()"),
}


def with_aborts(engine: DrivenEngine) -> None:
    """Add a few requests at each step, some of which are aborted."""
    requests = mixed_requests()
    engine.add(structured_request("regex", [1] * 20, regex=REGEX))
    for number in range(0, len(requests), 2):
        for request in requests[number : number + 2]:
            engine.add(request)
        engine.core.abort_requests([f"request-{number}", f"request-{number + 1}"][: number % 3])
        engine.step()
    engine.run()


def run_with_plant(
    plant: str,
    verify: str,
    model_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    **settings: Any,
) -> Record:
    monkeypatch.setenv("SPARKSCHED_VERIFY", verify)
    change, call, _ = PLANTS[plant]
    with running_engine(Choice.PLUGIN, model_directory, strict=True, **settings) as engine:
        scheduler = engine.core.scheduler
        assert type(scheduler) is VerifyingScheduler
        scheduler.core = PlantedCore(scheduler.core, change, call)
        try:
            with_aborts(engine)
        finally:
            # What the real core holds is what is closed.
            scheduler.core = scheduler.core.core
    return engine.record


def differences_in(messages: list[str]) -> list[str]:
    return [message for message in messages if message.startswith("ERROR: ")]


@pytest.mark.parametrize("plant", PLANTS)
@ASYNC_SCHEDULING
def test_the_engine_stops(
    plant: str,
    async_scheduling: bool,
    model_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    messages: list[str],
) -> None:
    with pytest.raises(VerificationError) as error:
        run_with_plant(
            plant, "stop", model_directory, monkeypatch, async_scheduling=async_scheduling
        )
    assert PLANTS[plant][2] in str(error.value)
    (message,) = differences_in(messages)
    assert str(error.value).split(" (SPARKSCHED")[0] in message
    assert not any("no difference" in message for message in messages)


@ASYNC_SCHEDULING
def test_ours_goes_on(
    async_scheduling: bool,
    model_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    messages: list[str],
) -> None:
    """The device must not notice that it was given another block: it would end the engine."""
    monkeypatch.setattr(Device, "_read", lambda *_: None)
    record = run_with_plant(
        "block", "1", model_directory, monkeypatch, async_scheduling=async_scheduling
    )
    with running_engine(Choice.STOCK, model_directory, async_scheduling=async_scheduling) as stock:
        with_aborts(stock)
    assert record.outputs == stock.record.outputs
    differing = [
        number
        for number, (ours, theirs) in enumerate(
            zip(record.steps, stock.record.steps, strict=True), start=1
        )
        if ours != theirs
    ]
    assert differing == [PLANTED_STEP]
    (message,) = differences_in(messages)
    first = record.steps[PLANTED_STEP - 1].scheduled_new_reqs[0]
    block_id = first.block_ids[0][0]
    assert f"in step {PLANTED_STEP - 1} at schedule()" in message
    assert f"(request {first.req_id!r})" in message
    assert f"vLLM's has {block_id - 1}, sparksched's {block_id};" in message
    assert message.endswith("; going on without verification.")


# ----------------------------------------------------------------------------------------
# What verification itself does wrong
# ----------------------------------------------------------------------------------------

EACH_OF_THESE = pytest.mark.parametrize(
    "broken",
    [
        "scheduler.difference_of_outputs",
        "scheduler.copy_of_runner_output",
        "shadow.copy_of_request",
        "shadow.take_over_changes",
    ],
)


def break_later(monkeypatch: pytest.MonkeyPatch, function: str, call: int = 5) -> None:
    """Have a function of verification fail from one call on."""
    path = f"sparksched.verify.{function}"
    works, numbers = pkgutil.resolve_name(path), itertools.count(1)

    def break_down(*arguments: Any, **settings: Any) -> Any:
        if next(numbers) >= call:
            raise RecursionError("broken")
        return works(*arguments, **settings)

    monkeypatch.setattr(path, break_down)


@EACH_OF_THESE
def test_ours_goes_on_without_verification(
    broken: str, model_directory: Path, monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    with running_engine(Choice.STOCK, model_directory, async_scheduling=True) as stock:
        disturbed(stock)
    monkeypatch.setenv("SPARKSCHED_VERIFY", "1")
    with running_engine(Choice.PLUGIN, model_directory, async_scheduling=True) as engine:
        break_later(monkeypatch, broken)
        disturbed(engine)
        scheduler = engine.core.scheduler
        assert scheduler._shadow is None
        assert not scheduler.structured_output_manager.answers
    assert engine.record.outputs == stock.record.outputs
    (message,) = differences_in(messages)
    assert "verification has failed; going on without verification" in message
    assert not any("no difference" in it for it in messages)


def test_an_engine_stops_that_can_not_be_verified(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    monkeypatch.setenv("SPARKSCHED_VERIFY", "stop")
    with running_engine(Choice.PLUGIN, model_directory, async_scheduling=True) as engine:
        break_later(monkeypatch, "shadow.Shadow.pair")
        with pytest.raises(VerificationError):
            disturbed(engine)
    (message,) = differences_in(messages)
    assert "verification has failed; stopping the engine" in message


Batch = tuple[Any, ...]


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """Collect the KV cache events that leave an engine."""
    batches: list[Batch] = []

    def publish(batch: Any) -> None:
        batches.append(tuple(batch.events))

    publisher = mock.Mock(spec=EventPublisher)
    publisher.publish.side_effect = publish
    monkeypatch.setattr(EventPublisherFactory, "create", lambda *_: publisher)
    return batches


def test_lost_events_are_a_difference_and_others_are_published_once(
    model_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    messages: list[str],
    published: list[Batch],
) -> None:
    config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    settings: Any = {"async_scheduling": False, "kv_events_config": config}
    with running_engine(Choice.STOCK, model_directory, **settings) as stock:
        with_aborts(stock)
    expected, published[:] = list(published), []
    monkeypatch.setenv("SPARKSCHED_VERIFY", "1")
    with running_engine(Choice.PLUGIN, model_directory, **settings) as engine:
        lose_events(engine.core.scheduler, batch=PLANTED_STEP)
        with_aborts(engine)
    expected[PLANTED_STEP - 1] = ()
    assert published == expected
    (message,) = differences_in(messages)
    assert "KV cache events of" in message


def lose_events(scheduler: Any, batch: int) -> None:
    """Have our side publish nothing of what one batch should have."""
    publisher, numbers = scheduler._kv_event_publisher, itertools.count(1)
    original = publisher.publish

    def publish(events: Any) -> None:
        if next(numbers) == batch:
            events.events = []
        original(events)

    publisher.publish = publish


def test_a_grammar_that_is_compiled_between_two_looks(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours looks first, and vLLM's believes that."""
    monkeypatch.setenv("SPARKSCHED_VERIFY", "stop")
    with running_engine(Choice.PLUGIN, model_directory, async_scheduling=False) as engine:
        late = add_with_pending_grammar(engine, "late")
        add_long_requests(engine, "free")
        scheduler = engine.core.scheduler

        def compile_grammar(_: PlantedCore, output: SchedulerOutput) -> SchedulerOutput:
            late()
            return output

        scheduler.core = PlantedCore(scheduler.core, compile_grammar, "schedule")
        engine.run()
    assert engine.record.finish_reasons["late"] == FinishReason.STOP


def add_with_pending_grammar(engine: DrivenEngine, name: str) -> Callable[[], None]:
    """Add a request whose grammar is compiled when the function that is returned is called."""
    request, wave = engine.core.preprocess_add_request(
        structured_request(name, [len(name)] * 20, regex=REGEX)
    )
    structured = request.structured_output_request
    wait([structured._grammar], timeout=GRAMMAR_TIMEOUT_S)
    pending: Future[Any] = Future()
    compiled, structured._grammar = structured._grammar.result(), pending
    engine.core.add_request(request, wave)
    return lambda: pending.set_result(compiled)


def test_a_grammar_that_went_on_without_vllm(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    monkeypatch.setenv("SPARKSCHED_VERIFY", "1")
    with running_engine(Choice.PLUGIN, model_directory, async_scheduling=False) as engine:
        engine.add(structured_request("astray", [1] * 20, regex=REGEX))
        engine.step(4)
        scheduler = engine.core.scheduler
        scheduler.structured_output_manager.accept_tokens(scheduler.requests["astray"], [66])
        engine.run()
    (message,) = differences_in(messages)
    assert "question to a grammar in" in message
