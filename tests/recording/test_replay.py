"""A recorded scheduler's decisions are those of both schedulers, with and without tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import scale
from sparksched.trace.events import Arrive, Drafts, End, Event, Finish, Reset, Step, Stop, Update
from sparksched.trace.file import FULL
from sparksched.trace.read import History, Trace
from sparksched.trace.replay import Replay

from testkit.worlds import trace as differential_trace
from testkit.worlds.scenarios import NAMED_SETTINGS
from testkit.worlds.states import CIRCULAR_LAYOUTS

from .mutations import frames
from .scenarios import events, record_scenario, replay

pytestmark = pytest.mark.release

NUM_STEPS = 100

# What these add has no words in a trace, and ends a recording by name.
REFUSED = (
    *("connector", "experts", "offloading"),
    *("sessions", "multimodal", "features", "prompt-embeds"),
)
RECORDED_LAYOUTS = {
    name for name, layout in CIRCULAR_LAYOUTS.items() if not layout.num_state_groups
}
NAMES = [
    name
    for name, settings in NAMED_SETTINGS.items()
    if not any(it in name for it in REFUSED)
    and ("states" not in settings or settings["states"].get("layout") in RECORDED_LAYOUTS)
]
# They differ in what decides, which the differential suite looks at; here, in what is written down.
NAMES = NAMES if scale.FULL else NAMES[::3]


@pytest.mark.parametrize("name", NAMES)
def test_both_schedulers_decide_as_recorded(name: str, tmp_path: Path) -> None:
    for candidate, with_tokens in (("sparksched", False), ("stock", True)):
        path = tmp_path / candidate
        record_scenario(path, name, 0, NUM_STEPS, candidate=candidate, with_tokens=with_tokens)
        num_steps = sum(isinstance(event, Step) for event in events(path))
        assert num_steps > NUM_STEPS / 4
        for scheduler in ("sparksched", "vllm"):
            outcome = replay(path, scheduler)
            assert outcome.mismatch is None, (candidate, with_tokens, scheduler)
            assert outcome.num_steps == num_steps


@pytest.mark.parametrize("name", ["async-full", "sync-preempting", "speculating-structured"])
def test_steps_are_decided_with_the_knobs_that_they_had(name: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    record_scenario(path, name, 1, NUM_STEPS, with_knobs=True)
    steps = [event for event in events(path) if isinstance(event, Step)]
    assert all(step.knobs is not None for step in steps)
    assert len({step.knobs for step in steps}) > 5
    for scheduler in ("sparksched", "vllm"):
        outcome = replay(path, scheduler)
        assert outcome.mismatch is None, scheduler
        assert outcome.num_steps == len(steps)
    without = [it if not isinstance(it, Step) else _without_knobs(it) for it in events(path)]
    with mock.patch.object(Trace, "events", side_effect=lambda: iter(without)):
        assert replay(path, "vllm").mismatch is not None, "the knobs are of no account"


def _without_knobs(step: Step) -> Step:
    return msgspec.structs.replace(step, knobs=None)


def test_the_scenarios_reach_what_is_recorded(tmp_path: Path) -> None:
    """Each kind of event, and what is rare in them."""
    found: list[Event] = []
    for name in ("async-preempting", "speculating-structured", "sync-full"):
        for seed in range(4):
            path = tmp_path / f"{name}-{seed}"
            record_scenario(path, name, seed, NUM_STEPS)
            found += events(path)
    kinds = {type(event) for event in found}
    assert {Arrive, Step, Update, Finish, Reset, Drafts, Stop, End} <= kinds
    steps = [event for event in found if isinstance(event, Step)]
    assert any(step.preempted for step in steps)
    assert any(step.num_drafts for step in steps)
    assert any(computed for step in steps for _, computed, _ in step.new), "no prefix was found"
    updates = [event for event in found if isinstance(event, Update)]
    assert any(update.rejected for update in updates)
    assert any(event.numbers is None for event in found if isinstance(event, Finish))
    assert any(event.sequence is not None for event in found if isinstance(event, Drafts))
    assert any(event.reset_running_requests for event in found if isinstance(event, Reset))


# ----------------------------------------------------------------------------------------
# What is found
# ----------------------------------------------------------------------------------------


def _more_tokens(step: Step) -> Step:
    counts = list(step.num_tokens or [1] * len(step.numbers or ()))
    counts[-1] += 1
    return msgspec.structs.replace(step, num_tokens=counts)


def _other_block(step: Step) -> Step:
    number, computed, (first, *others) = step.new[0]
    blocks = [[first[0] + 1, *first[1:]], *others]
    return msgspec.structs.replace(step, new=[(number, computed, blocks), *step.new[1:]])


FLAWS: dict[str, Any] = {
    "scheduled tokens": _more_tokens,
    "new requests, with computed tokens and blocks": _other_block,
    "scheduled requests": lambda step: msgspec.structs.replace(
        step, numbers=step.numbers[::-1], num_tokens=(step.num_tokens or [1] * 9)[::-1]
    ),
    "preempted requests": lambda step: msgspec.structs.replace(step, preempted=[0]),
    "finished requests": lambda step: msgspec.structs.replace(step, finished=[0]),
    "resumed requests": lambda step: msgspec.structs.replace(step, resumed=[0]),
    "scheduled drafts": lambda step: msgspec.structs.replace(
        step, num_drafts=[1] * len(step.numbers)
    ),
    "new blocks": lambda step: msgspec.structs.replace(
        step, new_block_ids=[*step.new_block_ids, None]
    ),
    "checksum of computed and output tokens": lambda step: msgspec.structs.replace(
        step, checksum=step.checksum + 1
    ),
}


@pytest.fixture(name="path", scope="module")
def _path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "trace"
    record_scenario(path, "async-full", 1, NUM_STEPS)
    return path


@pytest.mark.parametrize("scheduler", ["sparksched", "vllm"])
@pytest.mark.parametrize("field", FLAWS)
def test_another_decision_is_found_by_name(field: str, scheduler: str, path: Path) -> None:
    trace = Trace(path)
    recorded = list(trace.events())
    at = next(
        number
        for number, event in enumerate(recorded)
        if isinstance(event, Step) and event.new and len(event.numbers or ()) > 1
    )
    step = recorded[at]
    assert isinstance(step, Step)
    recorded[at] = FLAWS[field](step)
    replayed = Replay(scheduler, trace.settings, History(trace.settings, recorded))
    for event in recorded:
        replayed.play(event)
        if replayed.is_over:
            break
    replayed.shutdown()
    mismatch = replayed.outcome.mismatch
    assert mismatch is not None
    assert (mismatch.step, mismatch.field) == (step.sequence, field)
    assert mismatch.recorded != mismatch.replayed


def test_a_scheduler_that_fails_is_found(path: Path) -> None:
    trace = Trace(path)
    replayed = Replay("vllm", trace.settings, History(trace.settings, trace.events()))
    failing = mock.Mock(side_effect=ZeroDivisionError("blocks"))
    with mock.patch.object(replayed._scheduler, "schedule", failing):
        for event in trace.events():
            if not replayed.is_over:
                replayed.play(event)
    assert replayed.outcome.mismatch is not None
    assert replayed.outcome.mismatch.field == "error (step)"
    assert "ZeroDivisionError" in replayed.outcome.mismatch.replayed


# ----------------------------------------------------------------------------------------
# What is in the file
# ----------------------------------------------------------------------------------------


def payload(path: Path) -> bytes:
    return b"".join(payload for _, payload in frames(path.read_bytes()))


def test_prompts_and_outputs_are_not_in_the_file(tmp_path: Path) -> None:
    """The same scenario, in the middle of the vocabulary: no token of its own, nor a salt."""
    # As msgpack writes them: five bytes, the last four of which are the token.
    first = 0x5AB0_0000
    marks = [bytes((0xCE, *(first + token).to_bytes(4))) for token in range(50)]
    sizes = {}
    for with_tokens in (False, True):
        path = tmp_path / f"{with_tokens}"
        with _tokens_from(first):
            record_scenario(path, "sync-full", 2, NUM_STEPS, with_tokens=with_tokens)
        sizes[with_tokens] = sum(payload(path).count(mark) for mark in marks)
        assert b"pepper" not in payload(path)
        assert replay(path, "sparksched").mismatch is None
    assert sizes[False] == 0
    assert sizes[True] > 100


def _tokens_from(first: int) -> Any:
    """Have all prompts consist of tokens above one."""
    draw = differential_trace.TraceGenerator._prompt

    def prompt(self: Any) -> tuple[int, ...]:
        return tuple(first + token % 50 for token in draw(self))

    return mock.patch.object(differential_trace.TraceGenerator, "_prompt", prompt)


def test_nothing_in_the_file_can_be_looked_up(tmp_path: Path) -> None:
    """Two recordings of the same prompts have no key in common."""
    keys = []
    for name in ("first", "second"):
        record_scenario(tmp_path / name, "sync-full", 2, 20)
        arrivals = [it for it in events(tmp_path / name) if isinstance(it, Arrive)]
        keys.append({it.keys[at : at + 8] for it in arrivals for at in range(0, len(it.keys), 8)})
    assert keys[0]
    assert not keys[0] & keys[1]


def test_the_bound_on_the_size(tmp_path: Path) -> None:
    """The recording ends cleanly, and what is in the file replays."""
    path = tmp_path / "trace"
    record_scenario(path, "large-batch", 0, 1500, with_tokens=True, max_bytes=1 << 16)
    assert (1 << 15) < path.stat().st_size <= 1 << 16
    found = events(path)
    assert found[-1] == End(found[-1].time, FULL)  # type: ignore[union-attr]
    outcome = replay(path, "sparksched")
    assert outcome.mismatch is None
    assert outcome.num_steps > 20
