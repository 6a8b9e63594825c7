"""How phases of the engine's loop are timed, and what is made of their times."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from synthetic import US, recorded_phases

from bench.serving.client_probe import ClientProbe
from bench.serving.lateness import Call
from bench.serving.phases import evaluate_messages, evaluate_phases, split_steps, usual_size
from bench.serving.timers import PhaseTimer, Replacements


def test_phases_add_up_to_the_step() -> None:
    found = evaluate_phases(recorded_phases(8, 20, US), 8, is_async=True)
    assert {name: found[f"{name}_us"]["p50"] for name in US} == pytest.approx(US)
    assert found["period_us"]["p50"] == pytest.approx(sum(US.values()))
    assert found["host_us"]["p50"] == pytest.approx(sum(US.values()) - US["wait"])
    assert found["mean_period_us"] == pytest.approx(sum(US.values()))
    assert found["wait_spins"] == 0


def test_waiting_without_sleep_is_spinning() -> None:
    recorded = recorded_phases(8, 20, US | {"wait_cpu": US["wait"]})
    assert evaluate_phases(recorded, 8, is_async=True)["wait_spins"] == pytest.approx(1.0)


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


def recorded_messages() -> dict[str, Any]:
    """Return what the client's probe would have recorded of one message, and of a smaller one."""
    return {
        "messages": [(8, 200_000, Call(0, 50_000, 30_000)), (3, 1, Call(60_000, 1, 1))],
        "processing": [Call(70_000, 20_000, 10_000)],
        "handed": [(8, 900_000), (3, 1)],
        "collections": [],
    }


def test_messages_that_lack_requests_are_left_out() -> None:
    engine = recorded_phases(8, 3, US | {"encode": 30.0})
    client = recorded_messages()
    found = evaluate_messages({"engine": engine, "client": client}, 8)
    assert found["arrival_us"]["p50"] == 200
    assert found["encode_us"]["p50"] == 30
    assert found["handed_us"]["p50"] == 900
    assert (found["decode_us"]["p50"], found["decode_cpu_us"]["p50"]) == (50, 30)
    assert (found["process_us"]["p50"], found["process_cpu_us"]["p50"]) == (20, 10)
    assert found["late"]["decode"]["calls"] == 1
    assert "missing" in evaluate_messages({"engine": engine, "client": client}, 16)


def test_without_vllms_encoder_its_time_is_missing_and_not_zero() -> None:
    recorded = {"engine": recorded_phases(8, 3, US), "client": recorded_messages()}
    found = evaluate_messages(recorded, 8)
    assert list(found["encode_us"]) == ["missing"]


def test_a_message_is_handed_over_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its wait after decoding counts, too; its further parts come later and don't."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    monkeypatch.setattr(OutputProcessor, "process_outputs", lambda *_: None)
    outputs = [EngineCoreOutput(request_id=str(it), new_token_ids=[it]) for it in range(3)]
    message = EngineCoreOutputs(outputs=outputs, timestamp=time.monotonic())
    frames = MsgpackEncoder().encode(message)
    probe = ClientProbe()
    decoded = MsgpackDecoder(EngineCoreOutputs).decode(frames)
    time.sleep(0.01)
    for part in (decoded.outputs[:2], decoded.outputs[2:]):
        OutputProcessor.process_outputs(SimpleNamespace(), part, decoded.timestamp)  # type: ignore[arg-type]
    recorded = probe.stop()
    ((size, arrival_ns, decoding),) = recorded["messages"]
    ((handed_size, handed_ns),) = recorded["handed"]
    assert size == handed_size == 3
    assert handed_ns >= arrival_ns + decoding.wall_ns + 10_000_000


# ---- timers ----


def test_time_in_a_phase_within_another_counts_once() -> None:
    timer = PhaseTimer()
    inner = timer.timed(lambda: time.sleep(0.02), "wait", with_cpu=True)
    outer = timer.timed(inner, "execute")
    outer()
    (_, _, _, nested, cpu), (name, start, end, nested_outer, _) = timer.events
    assert name == "execute"
    assert nested == 0
    assert nested_outer >= 20_000_000
    assert end - start - nested_outer < 10_000_000
    assert cpu < 10_000_000


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
