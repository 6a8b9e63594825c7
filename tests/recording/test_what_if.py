"""What pacing would have done to a day whose steps took known times."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs
from sparksched import cli
from sparksched.compat.pacing import max_graph_tokens
from sparksched.engine.warm_up import PREFIX
from sparksched.record.build import build_scheduler
from sparksched.record.events import VERSION, Arrive, Begin, End, Event, Step, Update
from sparksched.record.load import Load
from sparksched.record.step_time import StepTime, step_time
from sparksched.record.what_if import Change, Timeline, what_if

from .samples import ENDED, arrival, settings, write

BUDGET = 8192
TIME = StepTime(5e-3, 1e-4, 20e-3, 50e-6)
COMPILATION_S = 3.0
WARM_UP_S = 10.0

# When it came, tokens of its prompt and of its output: streams, then a long prompt, and short ones.
STREAMS = [(11 + 0.05 * it, 32 << it % 5, 400 + 20 * it) for it in range(12)]
LONG = (12.0, 4 * BUDGET, 20)
SHORT = [(12.2 + 0.3 * it, 100, 5) for it in range(4)]


def day(*, is_async: bool, has_compiler: bool = True) -> list[Event]:
    """Return a day as vLLM would have served it, with an engine's warm-up before it."""
    config = {
        "max_num_batched_tokens": BUDGET,
        "max_num_seqs": 64,
        "async_scheduling": is_async,
        "max_model_len": 1 << 17,
        "enable_prefix_caching": False,
    }
    begin = Begin(VERSION, settings(config, num_blocks=1 << 15))
    load = sorted([*STREAMS, LONG, *SHORT])
    events: list[Event] = [begin, came(0, 0.0, BUDGET, 1, f"{PREFIX}0")]
    events += step(0, 0.0, WARM_UP_S, [f"{PREFIX}0"], [BUDGET], [1])
    now, sequence, missing, owed = WARM_UP_S, 1, dict[int, int](), dict[int, int]()
    while load or owed:
        if not owed:
            now = max(now, load[0][0])
        while load and load[0][0] <= now:
            at, num_prompt_tokens, num_output_tokens = load.pop(0)
            number = sum(isinstance(it, Arrive) for it in events)
            events.append(came(number, at, num_prompt_tokens, num_output_tokens, f"{number}"))
            missing[number], owed[number] = num_prompt_tokens, num_output_tokens
        num_decodes = sum(not it for it in missing.values())
        left, rows = BUDGET - num_decodes, dict[int, int]()
        for number, its in missing.items():
            if count := min(its, left) if its else 1:
                rows[number] = count
                left -= count if its else 0
        seconds = TIME(num_decodes, sum(rows.values()) - num_decodes)
        if has_compiler and sequence % 50 == 0:
            seconds = COMPILATION_S
        for number, count in rows.items():
            missing[number] -= min(count, missing[number])
        sampled = [int(not missing[number]) for number in rows]
        events += step(sequence, now, seconds, list(map(str, rows)), list(rows.values()), sampled)
        for number, count in zip(rows, sampled, strict=True):
            owed[number] -= count
            if not owed[number]:
                del owed[number], missing[number]
        now += seconds
        sequence += 1
    return [*events, End(now, ENDED)]


def came(number: int, at: float, num_prompt: int, num_output: int, request_id: str) -> Arrive:
    return arrival(
        number, num_prompt, time=at, keys=b"", max_tokens=num_output, request_id=request_id
    )


def step(
    sequence: int,
    begin: float,
    seconds: float,
    ids: list[str],
    num_tokens: list[int],
    sampled: list[int],
) -> list[Event]:
    return [
        Step(sequence, begin, 20.0, ids=ids, num_tokens=num_tokens),
        Update(sequence, begin + seconds, 30.0, sampled),
    ]


def held_up(events: list[Event]) -> list[Event]:
    """Launch each step while the one before runs, and look late at that one if it has prompts."""
    ahead: list[Event] = []
    update: Update | None = None
    for it, after in zip(events, [*events[1:], None], strict=True):
        if isinstance(it, Update):
            update = it
            continue
        if isinstance(it, Step) and isinstance(after, Update) and update is not None:
            is_long = any(count > 1 for count in it.num_tokens or [])
            follows = it.time <= update.time
            seen_at = after.time - 1e-3 if is_long and follows else update.time
            late = structs.replace(update, time=seen_at)
            begun = structs.replace(it, time=min(it.time, update.time - 1e-4))
            ahead += [begun, late] if follows else [late, it]
            update = None
        else:
            ahead += [it] if update is None or not isinstance(it, End) else [update, it]
    return ahead


def loaded(folder: Path, *, is_async: bool = False) -> Load:
    return Load(str(write(folder / "day", day(is_async=is_async), 400)))


@pytest.mark.parametrize("is_held_up", [False, True])
def test_the_fit_gives_back_what_steps_took(tmp_path: Path, is_held_up: bool) -> None:
    """However long the warm-up's took, some waited for a compiler, or were looked at late."""
    events = held_up(day(is_async=True, has_compiler=False)) if is_held_up else day(is_async=False)
    fitted = step_time(Load(str(write(tmp_path / "day", events, 400))))
    for num_decode_tokens in (1, 4, 12, 16):
        for num_prompt_tokens in (0, 100, 1024, BUDGET):
            size = num_decode_tokens, num_prompt_tokens
            assert fitted(*size) == pytest.approx(TIME(*size), rel=0.05)
    assert fitted.seconds_with_prompts == pytest.approx(TIME.seconds_with_prompts, rel=0.1)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_pacing_shortens_the_longest_gap(tmp_path: Path, is_async: bool) -> None:
    a_day = loaded(tmp_path, is_async=is_async)
    before, after = what_if("sparksched", a_day, Change(max_stall_ms=100, max_slowdown=2.5))
    num_requests = len(STREAMS) + 1 + len(SHORT)
    for it in (before, after):
        assert (it.num_finished, it.num_stuck) == (num_requests, 0)
        assert it.num_output_tokens == before.num_output_tokens
    whole = TIME(len(STREAMS), BUDGET - len(STREAMS))
    assert max(before.gaps_s) == pytest.approx(whole, rel=0.05)
    assert max(after.gaps_s) < whole / 2
    assert p99(after) < 0.11
    # The long prompt pays for it.
    assert longest(before) < longest(after) < 6 * longest(before)


def longest(timeline: Timeline) -> float:
    return max(timeline.first_token_s.values())


def p99(timeline: Timeline) -> float:
    gaps = sorted(timeline.gaps_s)
    return gaps[int(0.99 * len(gaps))]


def test_graphs_are_those_of_the_recorded_engine() -> None:
    for size in (0, 512):
        scheduler = build_scheduler("sparksched", settings(max_graph_tokens=size))
        assert max_graph_tokens(scheduler.vllm_config) == size


def test_who_can_not_pace_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(loaded(tmp_path).trace.path)
    assert cli.main(["replay", file, "--max-stall-ms=100", "--scheduler=vllm"]) == 2
    assert "only sparksched paces prompts" in capsys.readouterr().err
    whole = write(tmp_path / "whole", day_without_chunks(), 400)
    assert cli.main(["replay", str(whole), "--max-slowdown=2.5"]) == 2
    assert "--no-enable-chunked-prefill: prompts are to be computed at once" in (
        capsys.readouterr().err
    )


def day_without_chunks() -> list[Event]:
    return [Begin(VERSION, settings({"enable_chunked_prefill": False})), End(1.0, ENDED)]
