"""How phases of the engine's loop are timed, and what is made of their times."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from synthetic import US, recorded_phases

from bench.serving.phases import (
    busiest,
    decoding_range,
    evaluate_phases,
    split_steps,
    usual_size,
)
from bench.serving.timers import PhaseTimer, Replacements


def test_phases_add_up_to_the_step() -> None:
    found = evaluate_phases(recorded_phases(8, 20, US), 8, is_async=True)
    phases = {name: us for name, us in US.items() if name != "other"}
    assert {name: found[f"{name}_us"]["p50"] for name in phases} == pytest.approx(phases)
    assert found["period_us"]["p50"] == pytest.approx(sum(US.values()))
    assert found["host_us"]["p50"] == pytest.approx(sum(US.values()) - US["wait"])
    assert found["mean_period_us"] == pytest.approx(sum(US.values()))


def test_steps_of_another_batch_are_left_out() -> None:
    recorded = recorded_phases(8, 20, US)
    recorded["sizes"][5] = (7, 7)
    assert evaluate_phases(recorded, 8, is_async=True)["steps"] == 17
    missing = evaluate_phases(recorded, 16, is_async=True)
    assert list(missing) == ["missing"]


def test_an_engine_s_share_of_the_requests_is_what_most_of_its_steps_have() -> None:
    recorded = recorded_phases(5, 20, US)
    recorded["sizes"][:8] = [(5, 640)] * 4 + [(4, 4)] * 3 + [(0, 0)]
    assert usual_size(recorded) == 5
    assert usual_size({"sizes": [(5, 640), (0, 0)]}) == 0


def test_what_was_recorded_before_the_first_step_is_left_out() -> None:
    recorded = recorded_phases(8, 3, US)
    recorded["events"].insert(0, ("update", -500, -400, 0, 0))
    steps = split_steps(recorded)
    assert [len(step.events) for step in steps] == [6, 6, 6]


BOUND_US = 40.0 + 10.0 + 30.0 + 100.0 + 200.0
"""From a result to the end of the next launch."""


@pytest.mark.parametrize(
    ("wait_us", "cpu_us", "expected", "late"),
    [
        # The host slept: the GPU was busy all the time.
        (1000.0, 5.0, 0.0, 0.0),
        (60.0, 20.0, 0.0, 0.0),
        # It didn't: the GPU may have stood still since the result before.
        (1.0, 1.0, BOUND_US, 1.0),
        # All that a longer wait took was to hand over results that were there.
        (60.0, 58.0, BOUND_US, 1.0),
    ],
)
def test_the_gap_of_asynchronous_steps(
    wait_us: float, cpu_us: float, expected: float, late: float
) -> None:
    us = US | {"wait": wait_us, "wait_cpu": cpu_us}
    gap = evaluate_phases(recorded_phases(64, 20, us), 64, is_async=True)["gap_estimate"]
    assert gap["us"]["p50"] == pytest.approx(expected)
    assert gap["host_late_share"] == late
    assert gap["untold_share"] == 0
    assert gap["is_bound"]


def test_a_host_that_spins_tells_nothing_of_the_gap() -> None:
    us = US | {"wait": 1000.0, "wait_cpu": 995.0}
    gap = evaluate_phases(recorded_phases(64, 20, us), 64, is_async=True)["gap_estimate"]
    assert list(gap["us"]) == list(gap["host_late_share"]) == ["missing"]
    assert gap["untold_share"] == 1


def test_the_gap_of_synchronous_steps_lasts_until_the_launch() -> None:
    gap = evaluate_phases(recorded_phases(8, 20, US), 8, is_async=False)["gap_estimate"]
    assert gap["us"]["p50"] == pytest.approx(40.0 + 10.0 + 30.0 + 100.0)
    assert not gap["is_bound"]


PROMPTS = [(8, 1024), (8, 1024), (9, 900)]


def test_the_engine_with_the_most_steps_stands_for_all() -> None:
    idle = {"name": "idle", "sizes": [(0, 0)] * 50}
    busy = {"name": "busy", "sizes": [(1, 128), *[(1, 1)] * 20]}
    assert busiest([idle, busy])["name"] == "busy"
    assert busiest([busy, idle])["name"] == "busy"


def test_steps_with_parts_of_prompts_are_no_decodes() -> None:
    sizes = [*PROMPTS, (4, 4), (4, 4), (0, 0)]
    assert list(decoding_range(sizes)) == [3, 4]
    assert not decoding_range(PROMPTS)
    assert not decoding_range([(0, 0)])


# ---- timers ----


def test_time_in_a_phase_within_another_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(
        perf_counter_ns=iter([100, 150, 450, 500]).__next__,
        thread_time_ns=iter([7, 27]).__next__,
    )
    monkeypatch.setattr("bench.serving.timers.time", clock)
    timer = PhaseTimer()
    timer.timed(timer.timed(lambda: None, "wait", with_cpu=True), "execute")()
    assert timer.events == [("wait", 150, 450, 0, 20), ("execute", 100, 500, 300, 0)]


def test_other_threads_are_not_timed() -> None:
    timer = PhaseTimer()
    timed = timer.timed(lambda: None, "deliver")
    thread = threading.Thread(target=timed)
    thread.start()
    thread.join()
    assert timer.events == []


def test_a_failing_call_is_timed_and_fails() -> None:
    timer = PhaseTimer()

    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        timer.timed(fail, "update")()
    assert len(timer.events) == 1


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
