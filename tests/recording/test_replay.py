"""A recorded scheduler's decisions are those of both schedulers."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import scale
from sparksched.record.events import End, Step
from sparksched.record.load import Trace
from sparksched.record.write import FULL

from testkit.worlds import trace as differential_trace
from testkit.worlds.scenarios import NAMED_SETTINGS
from testkit.worlds.states import CIRCULAR_LAYOUTS

from .scenarios import events, record_scenario, replayed

# What is written down doesn't depend on the release: only `test-all` replays with both.
pytestmark = [pytest.mark.release] * scale.FULL

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
    for candidate in ("sparksched", "stock"):
        path = tmp_path / candidate
        record_scenario(path, name, 0, NUM_STEPS, candidate=candidate)
        num_steps = sum(isinstance(event, Step) for event in events(path))
        assert num_steps > NUM_STEPS / 4
        for scheduler in ("sparksched", "vllm"):
            outcome = replayed(path, scheduler)
            assert outcome.mismatch is None, (candidate, scheduler)
            assert outcome.num_steps == num_steps


@pytest.mark.parametrize("name", ["async-full", "sync-preempting", "speculating-structured"])
def test_steps_are_decided_with_the_knobs_that_they_had(name: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    record_scenario(path, name, 1, NUM_STEPS, with_knobs=True)
    found = events(path)
    steps = [event for event in found if isinstance(event, Step)]
    assert None not in [step.knobs for step in steps]
    assert len({step.knobs for step in steps}) > 5
    for scheduler in ("sparksched", "vllm"):
        outcome = replayed(path, scheduler)
        assert outcome.mismatch is None, scheduler
        assert outcome.num_steps == len(steps)
    for step in steps:
        step.knobs = None
    with mock.patch.object(Trace, "events", side_effect=lambda: iter(found)):
        assert replayed(path, "vllm").mismatch is not None, "the knobs are of no account"


# ----------------------------------------------------------------------------------------
# What is found
# ----------------------------------------------------------------------------------------


def _more_tokens(step: Step) -> list[int]:
    *counts, last = step.num_tokens or [1] * len(step.ids or ())
    return [*counts, last + 1]


def _other_block(step: Step) -> list[Any]:
    request_id, computed, (first, *others) = step.new[0]
    return [(request_id, computed, [[first[0] + 1, *first[1:]], *others]), *step.new[1:]]


FLAWS: dict[str, Any] = {
    "num_tokens": _more_tokens,
    "new": _other_block,
    "ids": lambda step: step.ids[::-1],
    "preempted": lambda _: ["nobody"],
    "finished": lambda _: ["nobody"],
    "resumed": lambda _: ["nobody"],
    "num_drafts": lambda step: [1] * len(step.ids),
    "new_block_ids": lambda step: [*step.new_block_ids, None],
    "checksum": lambda step: step.checksum + 1,
}


@pytest.fixture(name="path", scope="module")
def _path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "trace"
    record_scenario(path, "async-full", 1, NUM_STEPS)
    return path


@pytest.mark.parametrize("scheduler", ["sparksched", "vllm"])
@pytest.mark.parametrize("field", FLAWS)
def test_another_decision_is_found_by_name(field: str, scheduler: str, path: Path) -> None:
    found = events(path)
    step = next(
        event
        for event in found
        if isinstance(event, Step) and event.new and len(event.ids or ()) > 1
    )
    setattr(step, field, FLAWS[field](step))
    with mock.patch.object(Trace, "events", side_effect=lambda: iter(found)):
        mismatch = replayed(path, scheduler).mismatch
    assert mismatch is not None
    assert (mismatch.step, mismatch.field) == (step.sequence, field)
    assert mismatch.recorded != mismatch.replayed


# ----------------------------------------------------------------------------------------
# What is in the file
# ----------------------------------------------------------------------------------------


def test_prompts_and_outputs_are_not_in_the_file(tmp_path: Path) -> None:
    """The same scenario, in the middle of the vocabulary: no token of its own, nor a salt."""
    first = 1_521_483_000
    marks = [b"%d" % (first + token) for token in range(50)]
    path = tmp_path / "trace"
    with _tokens_from(first):
        record_scenario(path, "sync-full", 2, NUM_STEPS)
    content = gzip.decompress(path.read_bytes())
    assert not any(mark in content for mark in marks)
    assert b"pepper" not in content
    assert replayed(path, "sparksched").mismatch is None


def _tokens_from(first: int) -> Any:
    """Have all prompts consist of tokens above one."""
    draw = differential_trace.TraceGenerator._prompt

    def prompt(self: Any) -> tuple[int, ...]:
        return tuple(first + token % 50 for token in draw(self))

    return mock.patch.object(differential_trace.TraceGenerator, "_prompt", prompt)


def test_the_bound_on_the_size(tmp_path: Path) -> None:
    """The recording ends cleanly, and what is in the file replays."""
    path = tmp_path / "trace"
    record_scenario(path, "large-batch", 0, 600, max_bytes=1 << 14)
    assert (1 << 13) < path.stat().st_size <= 1 << 14
    found = events(path)
    assert found[-1] == End(found[-1].time, FULL)  # type: ignore[union-attr]
    outcome = replayed(path, "sparksched")
    assert outcome.mismatch is None
    assert outcome.num_steps > 20
