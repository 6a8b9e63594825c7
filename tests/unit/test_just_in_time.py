"""Just-in-time scheduling, in vLLM's loop around a simulated clock and GPU."""

import itertools
import logging
import pickle
import queue
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from sparksched.engine import just_in_time, launch_times
from sparksched.engine.just_in_time import MARGIN_S, POLL_S, HostLeads, JustInTime, StepTimes
from unit.simulated_loop import WAKE_S, Engine, Executor, Scenario, Workers
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineShutdownState
from vllm.v1.executor.multiproc_executor import FutureWrapper, WorkerProc
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

STEP_S = 0.018
HOST_S = 0.0003
LATER_S = 0.001
"""How much later than without it a request may be served."""

END_S = 6.0


class Meters:
    """Keeps what is counted."""

    def __init__(self) -> None:
        self.held_back: list[float] = []
        self.late: list[float] = []

    def note_held_back(self, time_s: float) -> None:
        self.held_back.append(time_s)

    def note_late(self, time_s: float) -> None:
        self.late.append(time_s)


def run(scenario: Scenario) -> tuple[Engine, Meters]:
    engine, meters = Engine(scenario), Meters()
    JustInTime(engine, meters, engine.clock)  # type: ignore[arg-type]
    engine.run()
    return engine, meters


def idle_gaps(engine: Engine) -> list[float]:
    """Return how long the GPU has waited before each step but the first."""
    return [launch.start_s - before.end_s for before, launch in itertools.pairwise(engine.launches)]


@pytest.fixture(params=[Executor, Workers], ids=["one process", "workers"])
def executor_class(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> type[Executor]:
    monkeypatch.setattr(just_in_time, "MultiprocExecutor", Workers)
    found: type[Executor] = request.param
    return found


def decode(step_s: Callable[[int, Any], float], **settings: Any) -> Scenario:
    """Return a scenario with one stream from the beginning to the end."""
    scenario = Scenario(step_s, **settings)
    scenario.add(0.0, "stream", round(END_S / STEP_S))
    return scenario


# ----------------------------------------------------------------------------------------
# What an engine does with it
# ----------------------------------------------------------------------------------------


def jittering(number: int, step: Any) -> float:
    return STEP_S * random.Random(number).uniform(0.99, 1.01)


def drifting(number: int, step: Any) -> float:
    return STEP_S * (1 + 0.5 * abs((number / 100) % 2 - 1))


JUMPS = (1.0, 0.2, 1.0, 5.0, 0.2, 1.0)
JUMP_EVERY = 50


def jumping(number: int, step: Any) -> float:
    return STEP_S * JUMPS[number // JUMP_EVERY % len(JUMPS)]


def stalling(number: int, step: Any) -> float:
    return STEP_S * (5 if random.Random(number).random() < 0.1 else 1)


PACES = {it.__name__: it for it in (jittering, drifting, jumping, stalling)}


@pytest.fixture(params=PACES.values(), ids=PACES)
def pace(request: pytest.FixtureRequest) -> Callable[[int, Any], float]:
    found: Callable[[int, Any], float] = request.param
    return found


def test_steady_decode_leaves_no_gap(executor_class: type[Executor]) -> None:
    engine, meters = run(
        decode(jittering, host_s=lambda step: 0.001, executor_class=executor_class)
    )
    assert max(idle_gaps(engine)) <= MARGIN_S
    assert sum(idle_gaps(engine)) <= 0.001 * END_S
    held_s = sorted(meters.held_back)[len(meters.held_back) // 2]
    assert STEP_S - 0.001 - 2 * MARGIN_S - POLL_S < held_s < STEP_S


def test_a_deadline_without_the_hosts_lead_is_found(
    executor_class: type[Executor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostLeads, "predict", lambda self, kind: 0.0)
    with pytest.raises(AssertionError):
        test_steady_decode_leaves_no_gap(executor_class)


def test_a_step_that_gets_shorter_costs_three_gaps(executor_class: type[Executor]) -> None:
    engine, meters = run(decode(jumping, executor_class=executor_class))
    gaps = idle_gaps(engine)
    assert max(gaps) <= LATER_S
    for begin in range(0, len(gaps) - JUMP_EVERY, JUMP_EVERY):
        # The first gap is before the second step of a kind.
        assert sum(it > 0 for it in gaps[begin : begin + JUMP_EVERY]) <= 4
    assert len(meters.late) == sum(it > 0 for it in gaps)
    assert sum(meters.late) >= sum(gaps)


def test_a_prediction_that_does_not_shrink_is_found(
    executor_class: type[Executor], monkeypatch: pytest.MonkeyPatch
) -> None:
    longest: dict[Any, float] = {}

    def note(self: StepTimes, kind: Any, time_s: float) -> None:
        longest[kind] = max(time_s, longest.get(kind, 0.0))

    monkeypatch.setattr(StepTimes, "note", note)
    monkeypatch.setattr(StepTimes, "predict", lambda self, kind: longest.get(kind))
    with pytest.raises(AssertionError):
        test_a_step_that_gets_shorter_costs_three_gaps(executor_class)


def host_of_prompts(step: Any) -> float:
    """Return what a launch takes: with a prompt longer, with a long one as long as a step."""
    num_tokens = step.total_num_scheduled_tokens
    if num_tokens == len(step.num_scheduled_tokens):
        return 0.001
    return 0.004 if num_tokens < 1000 else STEP_S


def with_prompts(num_long: int) -> Scenario:
    """Return a scenario in which short prompts join, and first some long ones."""
    scenario = decode(jittering, host_s=host_of_prompts)
    for number in range(num_long):
        scenario.add(0.5 + 0.05 * number, f"long-{number}", 4, num_prompt_tokens=4000)
    # Too seldom to be seen in a quantile of all launches.
    for number in range(30):
        scenario.add(1.0 + 0.1305 * number, f"short-{number}", 4)
    return scenario


def test_prompts_that_take_longer_to_launch_leave_no_gap() -> None:
    engine, meters = run(with_prompts(num_long=0))
    is_known = sum(launch.end_s < 2.0 for launch in engine.launches)
    assert max(idle_gaps(engine)[is_known:]) <= MARGIN_S
    assert meters.held_back


def test_a_prompt_for_which_it_is_too_late_is_found_if_it_is_taken_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deadline_of = JustInTime._deadline
    monkeypatch.setattr(JustInTime, "_deadline", lambda self, step, _: deadline_of(self, step, 0))
    with pytest.raises(AssertionError):
        test_prompts_that_take_longer_to_launch_leave_no_gap()


def test_long_prompts_do_not_make_short_ones_wait() -> None:
    engine, _ = run(with_prompts(num_long=8))
    waits = [wait for name, wait in waits_of_arrivals(engine) if name.startswith("short")]
    assert sum(it == 1 for it in waits) > 0.6 * len(waits)


def arrivals(
    pace: Callable[[int, Any], float], seed: int, executor_class: type[Executor] = Executor
) -> Scenario:
    """Return a scenario in which requests come alone and in bursts, and some are aborted."""
    chance = random.Random(seed)
    scenario = decode(pace, executor_class=executor_class)
    time_s = 1.0
    for number in itertools.count():
        time_s += chance.expovariate(20)
        if time_s > END_S - 1:
            return scenario
        for member in range(chance.choice([1, 1, 1, 8])):
            name = f"request-{number}-{member}"
            scenario.add(time_s, name, chance.randint(1, 12))
            if chance.random() < 0.2:
                scenario.abort(time_s + chance.uniform(0, 0.1), name)
    raise AssertionError


@pytest.mark.parametrize("seed", range(2))
def test_no_request_is_served_later_than_without_it(
    pace: Callable[[int, Any], float], seed: int, executor_class: type[Executor]
) -> None:
    """Without it a request that comes during step K gets into step K + 2, and no step is late."""
    engine, _ = run(arrivals(pace, seed, executor_class))
    assert max(idle_gaps(engine)) <= LATER_S
    steps_waited = [wait for _, wait in waits_of_arrivals(engine)]
    assert len(steps_waited) > 20
    assert max(steps_waited) <= 2
    assert not engine.scheduler.requests


def waits_of_arrivals(engine: Engine) -> Iterator[tuple[str, int]]:
    """Yield each request, and how many steps after the one in which it came it has begun."""
    first: dict[str, int] = {}
    for number, launch in enumerate(engine.launches):
        for request_id in launch.request_ids:
            first.setdefault(request_id, number)
    for request in (it.message[1][0] for it in engine.handled if is_add(it.message)):
        came_s = arrival_of(engine, request.request_id)
        during = [
            number
            for number, launch in enumerate(engine.launches)
            if launch.start_s < came_s <= launch.end_s
        ]
        if during and request.request_id in first:  # else aborted before
            yield request.request_id, first[request.request_id] - during[0]


def is_add(message: Any) -> bool:
    return message[0] is EngineCoreRequestType.ADD


def arrival_of(engine: Engine, request_id: str) -> float:
    return next(
        time_s
        for time_s, message in engine.scenario.messages
        if is_add(message) and message[1][0].request_id == request_id
    )


def test_most_requests_begin_a_step_sooner(executor_class: type[Executor]) -> None:
    engine, _ = run(arrivals(jittering, 1, executor_class))
    waits = [wait for _, wait in waits_of_arrivals(engine)]
    assert sum(it == 1 for it in waits) > 0.5 * len(waits)


def test_what_comes_meanwhile_is_taken_in_at_once() -> None:
    scenario = decode(jittering)
    times = [1.0 + 0.0971 * number for number in range(40)]
    for number, time_s in enumerate(times):
        scenario.add(time_s, f"request-{number}", 3)
    engine, _ = run(scenario)
    delays = [
        handled.time_s - time_s for handled, time_s in zip(engine.handled[1:], times, strict=True)
    ]
    # But for those that come while a launch or the end of a step is waited for.
    assert sum(it <= 2 * WAKE_S for it in delays) > 0.8 * len(delays)
    assert max(delays) <= HOST_S + MARGIN_S + 10 * WAKE_S + 2 * 0.01 * STEP_S


# ----------------------------------------------------------------------------------------
# Ends and pauses
# ----------------------------------------------------------------------------------------

IN_A_STEP_S = 3.005
"""While a step is held back."""


def test_a_signal_ends_the_engine_at_once() -> None:
    scenario = decode(lambda *_: STEP_S)
    scenario.messages.append((IN_A_STEP_S, (EngineCoreRequestType.WAKEUP, None)))
    with pytest.raises(SystemExit):
        run(scenario)
    engine = scenario.engine
    assert engine.shutdown_state is EngineShutdownState.SHUTTING_DOWN
    assert engine.clock.now < IN_A_STEP_S + 3 * STEP_S


def test_the_death_of_an_executor_is_noticed_while_a_step_is_held_back() -> None:
    scenario = decode(lambda *_: STEP_S)
    scenario.messages.append((IN_A_STEP_S, (EngineCoreRequestType.EXECUTOR_FAILED, b"")))
    with pytest.raises(RuntimeError, match="Executor failed"):
        run(scenario)
    assert scenario.engine.clock.now <= IN_A_STEP_S + 2 * WAKE_S


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_a_pause_is_answered_and_ends(mode: str) -> None:
    scenario = Scenario(lambda *_: STEP_S)
    scenario.add(0.0, "stream", 180)
    scenario.call(IN_A_STEP_S, "pause_scheduler", mode, False)
    scenario.add(IN_A_STEP_S + 0.01, "meanwhile", 5)
    scenario.call(5.0, "resume_scheduler")
    engine, _ = run(scenario)
    assert engine.output_queue.qsize() == 2, "both calls are answered"
    # What is in flight is made, and what waits is drained.
    drained_s = 180 * STEP_S + 0.1 if mode == "wait" else IN_A_STEP_S + 3 * STEP_S
    assert not [it for it in engine.launches if drained_s < it.launch_s < 5.0]
    assert not engine.scheduler.requests
    assert engine.launches[-1].launch_s > 5.0


# ----------------------------------------------------------------------------------------
# Where nothing is held back
# ----------------------------------------------------------------------------------------


def test_steps_are_not_held_back_while_requests_wait_for_room() -> None:
    scenario = decode(jittering, room=2)
    for number in range(2):
        scenario.add(2.0, f"request-{number}", 50)
    engine, meters = run(scenario)
    crowded = [it for it in engine.launches if 2 * STEP_S + 2.0 < it.launch_s < 2.0 + 48 * STEP_S]
    before = {it.launch_s: last for last, it in itertools.pairwise(engine.launches)}
    assert len(crowded) > 40
    for launch in crowded:
        assert launch.launch_s - before[launch.launch_s].start_s < 2 * HOST_S
    assert meters.held_back


def test_steps_are_not_held_back_for_grammars() -> None:
    scenario = decode(jittering)
    engine, meters = Engine(scenario), Meters()
    engine.scheduler.needs_grammar = True
    JustInTime(engine, meters, engine.clock)  # type: ignore[arg-type]
    engine.run()
    assert not meters.held_back


def num_told(caplog: pytest.LogCaptureFixture, what: str) -> int:
    """Return how many records say it; pytest hears of one twice from a logger that propagates."""
    return len({it for it in caplog.records if what in it.getMessage()})


def test_steps_of_an_executor_that_does_not_tell_their_ends_are_not_held_back(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(just_in_time, "end_of", lambda *_: None)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    _, meters = run(decode(jittering))
    assert not meters.held_back
    assert num_told(caplog, "doesn't tell") == 1


class _Lazy(Future):  # type: ignore[type-arg]
    def result(self, timeout: float | None = None) -> Any:
        raise NotImplementedError


def test_ends_are_asked_where_they_are_known() -> None:
    """Of vLLM's futures those that only `result` completes would never be done."""
    assert just_in_time.end_of(_Lazy()) is None
    assert just_in_time.end_of(SimpleNamespace(async_output=SimpleNamespace())) is None
    for name in ("async_copy_ready_event", "copy_event"):
        output = SimpleNamespace(**{name: SimpleNamespace(query=lambda: True)})
        is_over = just_in_time.end_of(SimpleNamespace(async_output=output))
        assert is_over is not None
        assert is_over()
    future: Future[None] = Future()
    is_over = just_in_time.end_of(future)
    assert is_over is not None
    assert not is_over()
    future.set_result(None)
    assert is_over()


# ----------------------------------------------------------------------------------------
# Workers in processes of their own
# ----------------------------------------------------------------------------------------


@pytest.fixture
def answers() -> tuple[MessageQueue, MessageQueue]:
    """Return a worker's real queue of answers, and the executor's end of it."""
    writer = MessageQueue(n_reader=1, n_local_reader=1, max_chunk_bytes=1 << 16, max_chunks=4)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    with ThreadPoolExecutor() as threads:
        for ready in [threads.submit(it.wait_until_ready) for it in (writer, reader)]:
            ready.result(timeout=30)
    return writer, reader


@pytest.mark.release
def test_answers_of_workers_are_seen_without_waiting(
    answers: tuple[MessageQueue, MessageQueue],
) -> None:
    writer, reader = answers
    futures: deque[FutureWrapper] = deque()
    launch, step, another = (
        FutureWrapper(futures, lambda: reader.dequeue(timeout=30)) for _ in range(3)
    )
    executor = SimpleNamespace(response_mqs=[reader], output_rank=0)
    has_ended = just_in_time.end_of(step, launch, executor)
    assert has_ended is not None
    assert not has_ended()
    writer.enqueue("launched")
    assert not has_ended()
    assert launch.result() == "launched"
    for later in range(2):
        writer.enqueue(f"tokens {later}")
    assert has_ended()
    # What others wait for is left to them.
    has_third_ended = just_in_time.end_of(launch, None, executor)
    fourth = FutureWrapper(futures, lambda: reader.dequeue(timeout=30))
    has_fourth_ended = just_in_time.end_of(fourth, None, executor)
    assert has_third_ended is not None
    assert has_fourth_ended is not None
    assert has_third_ended()
    assert not has_fourth_ended()
    assert (step.result(), another.result()) == ("tokens 0", "tokens 1")
    reader.shutting_down = True
    assert has_fourth_ended()
    with pytest.raises(RuntimeError, match="cancelled"):
        fourth.result()


@pytest.mark.release
def test_workers_tell_when_they_have_launched_a_step() -> None:
    class Worker(WorkerProc):
        def __init__(self) -> None:
            self.use_async_scheduling = True
            self.async_output_queue = queue.Queue()

    class Output(AsyncModelRunnerOutput):
        def get_output(self) -> ModelRunnerOutput:
            return ModelRunnerOutput(["request"], {"request": 0})

        def get_kv_connector_output(self) -> None:
            return None

    launch_times.install(SimpleNamespace(WorkerProc=Worker))  # type: ignore[arg-type]
    worker, output = Worker(), Output()
    before_s = time.monotonic()
    worker.handle_output(output)
    after_s = time.monotonic()
    worker.handle_output(None)
    received = worker.async_output_queue.get()
    assert received is output
    sent = pickle.loads(pickle.dumps(received.get_output()))
    assert sent.req_ids == ["request"]
    launch_s = launch_times.launch_of(sent)
    assert launch_s is not None
    assert before_s <= launch_s <= after_s
    assert not vars(output), "a cycle would keep what is on the GPU"
    assert worker.async_output_queue.get() is None
    assert launch_times.launch_of(None) is None


def test_workers_that_do_not_tell_are_handed_steps_at_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(just_in_time, "MultiprocExecutor", Workers)
    monkeypatch.setattr(launch_times, "launch_of", lambda output: None)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    _, meters = run(decode(jittering, executor_class=Workers))
    assert not meters.held_back
    assert num_told(caplog, "workers don't tell") == 1
