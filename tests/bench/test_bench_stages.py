"""Phases and the loop's CPU time where requests take turns, or engines wait for each other."""

from typing import Any

import pytest
from synthetic import US, recorded_phases

from bench.serving.loop_cpu import evaluate_engine, evaluate_loop
from bench.serving.phases import evaluate_phases

PERIOD = sum(US.values())


def recorded(sizes: list[tuple[int, int]], working_us: float = 300.0) -> dict[str, Any]:
    """Return steps of these sizes, whose waiting takes all of a processor."""
    found = recorded_phases(1, len(sizes), US | {"wait_cpu": US["wait"]})
    step_ns = round(1000 * (working_us + US["wait"]))
    return found | {"sizes": sizes, "cpu_ns": [step_ns * number for number in range(len(sizes))]}


# ---- pipeline stages ----


def test_batches_of_any_size_count_where_they_take_turns() -> None:
    found = evaluate_phases(recorded([(64, 2048), *[(33, 33), (31, 31)] * 10]), None, is_async=True)
    assert found["steps"] == 19
    assert found["requests"] == pytest.approx(32, abs=0.1)
    assert found["period_us"]["p50"] == pytest.approx(PERIOD)
    assert list(found["gap_estimate"]) == ["missing"]


def test_a_step_with_nothing_belongs_to_the_one_before() -> None:
    found = evaluate_phases(recorded([(1, 128), (0, 0), *[(1, 1), (0, 0)] * 10]), None, True)
    assert found["steps"] == 9
    assert found["requests"] == 1
    assert found["period_us"]["p50"] == pytest.approx(2 * PERIOD)
    assert found["schedule_us"]["p50"] == pytest.approx(2 * US["schedule"])


def test_without_turns_only_the_number_asked_for_counts() -> None:
    steps = recorded([*[(33, 33), (31, 31)] * 10])
    assert "missing" in evaluate_phases(steps, 64, is_async=True)
    assert "missing" in evaluate_phases(recorded([(0, 0)] * 10), 0, is_async=True)


# ---- peers ----


def test_waiting_for_peers_is_not_the_host_s_time() -> None:
    steps = recorded_phases(8, 20, US)
    events = []
    for phase, start, end, _nested, cpu in steps["events"]:
        within = 150_000 if phase == "execute" else 0
        if within:
            events.append(("peer", start + 1000, start + 1000 + within, 0, within))
        events.append((phase, start, end, within, cpu))
    found = evaluate_phases(steps | {"events": events}, 8, is_async=True)
    assert found["peer_us"]["p50"] == pytest.approx(150)
    assert found["execute_us"]["p50"] == pytest.approx(US["execute"] - 150)
    assert found["host_us"]["p50"] == pytest.approx(PERIOD - US["wait"] - 150)
    # A peer that is late says nothing about whether a result was waited for.
    assert found["gap_estimate"]["us"]["p50"] == 0


# ---- CPU time ----


def test_waiting_is_taken_out_of_the_loop_s_cpu_time() -> None:
    found = evaluate_loop(recorded([(8, 1024), *[(10, 10)] * 20], working_us=300.0))
    assert found["loop_us_per_token"] == pytest.approx(130)
    assert found["waiting_us_per_token"] == pytest.approx(100)
    assert found["working_us_per_token"] == pytest.approx(30)


def test_empty_turns_cost_what_the_others_pay_for() -> None:
    found = evaluate_loop(recorded([*[(10, 10), (0, 0)] * 20], working_us=300.0))
    assert found["working_us_per_token"] == pytest.approx(60, rel=0.03)


def test_the_other_threads_of_the_engine_are_added() -> None:
    loop = evaluate_loop(recorded([(10, 10)] * 20, working_us=300.0))
    share = {"percent": 110.0, "threads": {"MainThread": 99.0, "output": 11.0}}
    cpu = {"share": {"engine": share}, "us_per_token": {"engine": 143.0}}
    found = evaluate_engine(loop, [{"cpu": cpu}, {"cpu": {"missing": "too short"}}])
    assert found["other_threads_us_per_token"] == pytest.approx(14.3)
    assert found["without_waiting_us_per_token"] == pytest.approx(44.3)


def test_what_is_not_known_is_no_figure() -> None:
    assert "missing" in evaluate_loop(recorded([(8, 1024)] * 3))
    loop = evaluate_loop(recorded([(10, 10)] * 20))
    assert evaluate_engine(loop, [{"cpu": {"missing": "too short"}}]) == loop
