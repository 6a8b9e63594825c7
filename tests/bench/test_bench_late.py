"""Why a message was late: what is recorded of calls and of garbage collections, and made of it."""

import gc
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from synthetic import calls

from bench.serving.client_probe import ClientProbe
from bench.serving.garbage import Collection, GarbageWatch
from bench.serving.lateness import Call, evaluate_collections, evaluate_late
from bench.serving.phases import evaluate_messages

REASONS = ("collecting_share", "stopped_share", "working_share")
USUAL = [100.0] * 9


def shares(found: dict[str, Any]) -> list[float]:
    return [found[it] for it in REASONS]


# ---- who was late, and why ----


def test_a_late_call_s_time_is_told_apart() -> None:
    """Of 1,000 µs more 600 went to a collection of its own; in 300 its thread didn't run."""
    found = evaluate_late(
        calls([*USUAL, 1100.0], [*USUAL, 800.0]), [Collection(90_100_000, 600_000, 600_000, 2)]
    )
    assert (found["calls"], found["count"]) == (10, 1)
    assert found["extra_ms"] == pytest.approx(1.0)
    assert shares(found) == pytest.approx([0.6, 0.3, 0.1])


def test_another_thread_s_collection_is_no_unexplained_stop() -> None:
    """It began 200 µs before the call, and held up its thread for 400 of the 600 µs it was off."""
    found = evaluate_late(
        calls([*USUAL, 1100.0], [*USUAL, 500.0]), [Collection(89_800_000, 600_000, 0, 2)]
    )
    assert shares(found) == pytest.approx([0.4, 0.2, 0.4])


def test_what_happens_in_the_median_call_makes_none_late() -> None:
    """Each call collects for 50 µs, and is off for 30; the late one has work for 300 more."""
    made = calls([*USUAL, 400.0], [70.0] * 9 + [370.0])
    young = [Collection(it.start_ns + 1, 50_000, 50_000, 0) for it in made]
    assert shares(evaluate_late(made, young)) == pytest.approx([0.0, 0.0, 1.0])


def test_late_is_twice_the_median() -> None:
    found = evaluate_late(calls([*USUAL, 199.0, 200.0], [*USUAL, 199.0, 200.0]), [])
    assert (found["count"], found["extra_ms"]) == (1, pytest.approx(0.1))


def test_where_no_call_was_late_shares_are_missing_and_not_zero() -> None:
    found = evaluate_late(calls(USUAL, USUAL), [])
    assert found["count"] == 0
    assert all(list(found[it]) == ["missing"] for it in REASONS)
    assert list(evaluate_late([], [])) == ["missing"]


def test_collections_by_generation() -> None:
    made = [Call(1_000_000, 500_000, 500_000), Call(2_000_000, 500_000, 500_000)]
    collections = [
        Collection(100_000, 200_000, 0, 0),
        Collection(600_000, 400_000, 0, 0),  # ends when the call begins
        Collection(1_400_000, 700_000, 0, 0),  # in both
        Collection(2_500_000, 300_000, 0, 1),  # begins when the call ends
    ]
    found = evaluate_collections(collections, made)
    assert list(found) == ["0", "1", "2"]
    assert [found[it]["count"] for it in found] == [3, 1, 0]
    assert [found[it]["within_calls"] for it in found] == [1, 0, 0]
    assert [found[it]["total_ms"] for it in found] == pytest.approx([1.3, 0.3, 0.0])
    assert (found["0"]["longest_ms"], found["1"]["longest_ms"]) == pytest.approx((0.7, 0.3))
    assert list(found["2"]["longest_ms"]) == ["missing"]


def test_smaller_messages_are_held_up_by_collections_too() -> None:
    full, smaller, processing = calls([100.0] * 3, [100.0] * 3)
    client = {
        "messages": [(8, 1, full), (3, 1, smaller)],
        "processing": [processing],
        "handed": [(8, 1)],
        "collections": [Collection(it.start_ns + 1, 10, 10, 2) for it in (smaller, processing)],
    }
    found = evaluate_messages({"engine": {"encodings": []}, "client": client}, 8)
    assert found["collections"]["2"]["within_calls"] == 2
    assert found["late"]["decode"]["calls"] == found["late"]["process"]["calls"] == 1


# ---- what is recorded ----


@pytest.fixture
def _only_explicit_collections() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_only_explicit_collections")
def test_collections_are_noted_until_the_end() -> None:
    former = list(gc.callbacks)
    watch = GarbageWatch()
    before = time.monotonic_ns()
    gc.collect(1)
    gc.collect()
    after = time.monotonic_ns()
    noted = watch.stop()
    gc.collect()
    assert gc.callbacks == former
    first, second = noted
    assert (first.generation, second.generation) == (1, 2)
    assert before <= first.start_ns <= first.end_ns <= second.start_ns <= second.end_ns <= after
    assert second.cpu_ns > 0


@pytest.mark.usefixtures("_only_explicit_collections")
def test_another_thread_s_collection_takes_no_cpu_time_of_this_one() -> None:
    watch = GarbageWatch()
    thread = threading.Thread(target=gc.collect)
    thread.start()
    thread.join()
    (noted,) = watch.stop()
    assert noted.wall_ns > 0
    assert noted.cpu_ns == 0


@pytest.mark.usefixtures("_only_explicit_collections")
def test_the_probe_tells_why_a_message_was_late(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    def process(_: Any, do: Any) -> None:
        do()

    monkeypatch.setattr(OutputProcessor, "process_outputs", process)
    output = EngineCoreOutput(request_id="a", new_token_ids=[1])
    frames = MsgpackEncoder().encode(EngineCoreOutputs(outputs=[output], timestamp=0.0))
    former = list(gc.callbacks)
    probe = ClientProbe()
    MsgpackDecoder(EngineCoreOutputs).decode(frames)
    for do in (gc.collect, lambda: time.sleep(0.02)):
        OutputProcessor.process_outputs(SimpleNamespace(), do)  # type: ignore[arg-type, call-arg]
    recorded = probe.stop()
    assert gc.callbacks == former
    ((_, _, decoding),) = recorded["messages"]
    collecting, sleeping = recorded["processing"]
    (collection,) = recorded["collections"]
    assert decoding.end_ns <= collecting.start_ns
    assert collecting.start_ns <= collection.start_ns <= collection.end_ns <= collecting.end_ns
    assert 0 < collection.cpu_ns <= collecting.cpu_ns
    assert sleeping.wall_ns >= 20_000_000
    assert sleeping.cpu_ns < 10_000_000
