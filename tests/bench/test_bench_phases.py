"""What is made of an engine's steps and waits, and how its waits are timed."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from synthetic import PERIOD_US, noted_steps

from bench.serving.loop_cpu import evaluate_engine
from bench.serving.phases import busiest, decoding_steps, evaluate_phases, split_steps
from bench.serving.timers import Replacements, WaitTimer

EIGHT = [(8, 8)] * 20


def test_a_step_lasts_until_the_next_one() -> None:
    first, second = split_steps(noted_steps([(8, 1024), (8, 8), (4, 4)], 1000.0, 5.0))
    assert (first.num_requests, first.num_tokens, second.num_tokens) == (8, 1024, 8)
    assert (first.us, first.cpu_us) == (PERIOD_US, PERIOD_US - 1000.0 + 5.0)
    assert (first.wait_us, first.wait_cpu_us) == (1000.0, 5.0)


def test_steps_of_another_batch_are_left_out() -> None:
    found = evaluate_phases(noted_steps(EIGHT), 8, is_async=True)
    assert found["steps"] == 18
    assert found["mean_period_us"] == pytest.approx(PERIOD_US)
    assert found["wait_us"]["p50"] == pytest.approx(1000.0)
    # Neither that step nor the one after it.
    others = [*EIGHT[:5], (7, 7), *EIGHT[6:]]
    assert evaluate_phases(noted_steps(others), 8, is_async=True)["steps"] == 16
    assert list(evaluate_phases(noted_steps(EIGHT), 16, is_async=True)) == ["missing"]


@pytest.mark.parametrize(
    ("wait_us", "cpu_us", "late"),
    [
        # The host slept: the GPU was busy all the time.
        (1000.0, 5.0, 0.0),
        (60.0, 20.0, 0.0),
        # It didn't: the GPU may have stood still since the result before.
        (1.0, 1.0, 1.0),
        # All that a longer wait took was to hand over results that were there.
        (60.0, 58.0, 1.0),
    ],
)
def test_whether_the_host_is_late(wait_us: float, cpu_us: float, late: float) -> None:
    noted = noted_steps([(64, 64)] * 20, wait_us, cpu_us)
    assert evaluate_phases(noted, 64, is_async=True)["gap_estimate"]["host_late_share"] == late


def test_a_host_that_spins_or_never_waits_is_not_told_to_be_late() -> None:
    for wait_us, cpu_us in ((1000.0, 995.0), (0.0, 0.0)):
        found = evaluate_phases(noted_steps(EIGHT, wait_us, cpu_us), 8, is_async=True)
        assert list(found["gap_estimate"]["host_late_share"]) == ["missing"]


def test_the_gpu_waits_for_the_host_in_each_synchronous_step() -> None:
    found = evaluate_phases(noted_steps(EIGHT), 8, is_async=False)
    assert found["gap_estimate"]["host_late_share"] == 1.0


PROMPTS = [(8, 1024), (8, 1024), (9, 900)]


def test_the_engine_with_the_most_steps_stands_for_all() -> None:
    idle, busy = noted_steps([(0, 0)] * 50), noted_steps([(1, 128), *[(1, 1)] * 20])
    assert busiest([idle, busy]) is busiest([busy, idle]) is busy


def test_steps_with_parts_of_prompts_are_no_decodes() -> None:
    noted = noted_steps([*PROMPTS, (4, 4), (3, 3), (0, 0), (0, 0)])
    assert [it.num_tokens for it in decoding_steps(noted)] == [4, 3]
    assert not decoding_steps(noted_steps([*PROMPTS, (4, 4)]))
    assert not decoding_steps(noted_steps([(0, 0)] * 3))


# ---- CPU time ----

SHARE = {"percent": 110.0, "busiest": 99.0, "main": 99.0}
CPU = {"share": {"engine": SHARE}, "us_per_token": {"engine": 143.0}}


def working_us(sizes: list[tuple[int, int]]) -> float:
    """Return what the loop's thread works for a token, beside 14.3 µs of others."""
    noted = noted_steps(sizes, wait_us=1200.0, wait_cpu_us=1200.0)
    found = evaluate_engine(noted, [{"cpu": CPU}, {"cpu": {"missing": "too short"}}])
    return float(found["without_waiting_us_per_token"]) - 14.3


def test_waiting_is_taken_out_of_the_engine_s_cpu_time() -> None:
    assert working_us([(8, 1024), *[(10, 10)] * 20]) == pytest.approx(30)


def test_empty_turns_cost_what_the_others_pay_for() -> None:
    assert working_us([*[(10, 10), (0, 0)] * 20]) == pytest.approx(60, rel=0.03)


def test_what_is_not_known_is_no_figure() -> None:
    assert "missing" in evaluate_engine(noted_steps([(8, 1024)] * 3), [{"cpu": CPU}])
    without = [{"cpu": {"missing": "too short"}}]
    assert "missing" in evaluate_engine(noted_steps(EIGHT), without)


# ---- timers ----


def test_a_wait_within_another_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(
        perf_counter_ns=iter([100, 500]).__next__, thread_time_ns=iter([7, 27]).__next__
    )
    monkeypatch.setattr("bench.serving.timers.time", clock)
    timer = WaitTimer()
    assert timer.timed(timer.timed(lambda: "a result"))() == "a result"
    assert (timer.ns, timer.cpu_ns) == (400, 20)


def test_other_threads_are_not_timed() -> None:
    timer = WaitTimer()
    thread = threading.Thread(target=timer.timed(lambda: None))
    thread.start()
    thread.join()
    assert timer.ns == 0


def test_a_failing_wait_is_timed_and_fails() -> None:
    timer = WaitTimer()

    def fail() -> None:
        raise KeyError("x")

    for _ in range(2):
        before = timer.ns
        with pytest.raises(KeyError):
            timer.timed(fail)()
        assert timer.ns > before


def test_everything_is_put_back() -> None:
    class Owner:
        def method(self) -> str:
            return "original"

    instance = SimpleNamespace(call=len)
    owner = Owner()
    original = Owner.method
    replacements = Replacements()

    def make(call: Any) -> Any:
        return lambda *_: "replaced"

    replacements.replace(owner, "method", make)
    replacements.replace(Owner, "method", make)
    replacements.replace(instance, "call", make)
    assert owner.method() == instance.call() == Owner().method() == "replaced"
    replacements.put_back()
    assert owner.method() == "original"
    assert "method" not in vars(owner)
    assert Owner.method is original
    assert instance.call is len
