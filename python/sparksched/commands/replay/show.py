"""Answers of `sparksched replay`: data for programs, and tables of it for people."""

import dataclasses
import statistics
import sys
from collections.abc import Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from sparksched.record.load import Load
from sparksched.record.replay import Outcome
from sparksched.record.step_time import step_time
from sparksched.record.what_if import Change, Timeline

PIPED_WIDTH: Final = 120
"""Columns where there is no terminal."""


def comparison(load: Load, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return what came of replays; times in microseconds."""
    return {
        "trace": _about(load) | {"times": _times_of(load)},
        "replays": [
            {
                "scheduler": outcome.scheduler,
                "equal_steps": outcome.num_steps,
                "mismatch": outcome.mismatch and dataclasses.asdict(outcome.mismatch),
                **_times_of(outcome),
            }
            for outcome in outcomes
        ],
    }


def alternatives(load: Load, change: Change, before: Timeline, after: Timeline) -> dict[str, Any]:
    """Return what other settings would have done; times in seconds."""
    answer = {
        "trace": _about(load),
        "change": {k: v for k, v in dataclasses.asdict(change).items() if v is not None},
        "step_time": dataclasses.asdict(step_time(load)),
        "as_recorded": _summary_of(before),
        "changed": _summary_of(after),
    }
    return answer | ({"promises": _promises(change, before, after)} if change.pacing else {})


def show(answer: dict[str, Any]) -> None:
    """Print an answer, as wide as the terminal, or as long lines need."""
    out = Console(highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)
    out.print(
        "{requests:,} requests, {steps:,} steps, {seconds:,.1f} s, recorded of"
        " {recorded_scheduler} in vLLM {vllm}".format(**answer["trace"])
    )
    if "replays" in answer:
        _show_comparison(out, answer)
    else:
        _show_alternatives(out, answer)


def _show_comparison(out: Console, answer: dict[str, Any]) -> None:
    table = Table("scheduler", "as recorded", "schedule, median / p99", "update, median / p99")
    table.add_row("recorded", "", *_spans(answer["trace"]["times"]))
    for it in answer["replays"]:
        equal = f"{'all ' if it['mismatch'] is None else ''}{it['equal_steps']:,} steps"
        table.add_row(it["scheduler"], equal, *_spans(it))
    out.print(table)
    for it in answer["replays"]:
        if it["mismatch"] is not None:
            mismatch = (
                "{scheduler} decides something else in step {step}: {field}\n"
                "  recorded: {recorded}\n  replayed: {replayed}"
            )
            out.print(mismatch.format(**it, **it["mismatch"]), markup=False)


def _show_alternatives(out: Console, answer: dict[str, Any]) -> None:
    fixed, decode, prompts, prompt = answer["step_time"].values()
    out.print(
        f"A step is taken to last {fixed * 1e3:,.2f} ms, and {decode * 1e6:,.1f} µs more for each"
        f" token of a decode; with prompts {prompts * 1e3:,.2f} ms more, and {prompt * 1e6:,.1f} µs"
        " for each of their tokens."
    )
    title = " ".join(f"--{k.replace('_', '-')} {v}" for k, v in answer["change"].items())
    table = Table("", "as recorded", "changed", title=title, title_justify="left")
    for name, before in answer["as_recorded"].items():
        values = (before, answer["changed"][name])
        table.add_row(name, *(f"{it:,}" if isinstance(it, int) else f"{it:,.3f}" for it in values))
    out.print(table)
    if "promises" in answer:
        promises = (
            "Promises: {late_prompts:,} of {prompts:,} first tokens come more than"
            " {max_slowdown:g} times as late, and a stall; {steps_over_stall:,} steps with"
            " prompts take longer than {max_stall_s:g} s."
        )
        out.print(promises.format(**answer["promises"]))
    if num_stuck := answer["changed"]["stuck requests"]:
        out.print(f"{num_stuck:,} requests would never have run: they don't fit.")


def _about(load: Load) -> dict[str, Any]:
    settings = load.trace.settings
    return {
        "file": str(load.trace.path),
        "missing": load.trace.missing,
        "recorded_scheduler": settings.scheduler,
        "vllm": settings.vllm,
        "sparksched": settings.sparksched,
        "seconds": round(load.seconds, 3),
        "requests": len(load.requests),
        "steps": len(load.schedule_us),
    }


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[min(int(0.99 * len(values)), len(values) - 1)]


def _times_of(source: Load | Outcome) -> dict[str, dict[str, float]]:
    """Return medians and 99th percentiles; nothing of nothing."""
    both = {"schedule_us": source.schedule_us, "update_us": source.update_us}
    return {
        call: {"median": round(statistics.median(it), 1), "p99": round(_p99(it), 1)} if it else {}
        for call, it in both.items()
    }


def _spans(times: dict[str, Any]) -> list[str]:
    both = (times["schedule_us"], times["update_us"])
    return ["{median:,.0f} / {p99:,.0f} µs".format(**it) if it else "-" for it in both]


def _summary_of(timeline: Timeline) -> dict[str, float]:
    first = list(timeline.first_token_s.values()) or [0.0]
    gaps = timeline.gaps_s or [0.0]
    return {
        "seconds": timeline.seconds,
        "steps": timeline.num_steps,
        "finished requests": timeline.num_finished,
        "stuck requests": timeline.num_stuck,
        "output tokens a second": timeline.num_output_tokens / max(timeline.seconds, 1e-9),
        "first token, median (s)": statistics.median(first),
        "first token, p99 (s)": _p99(first),
        "between outputs, p99 (s)": _p99(gaps),
        "between outputs, longest (s)": max(gaps),
        "most running": timeline.most_running,
        "most waiting": timeline.most_waiting,
        "preemptions": timeline.num_preemptions,
        "prefix cache hit rate": timeline.hit_tokens / max(timeline.queried_tokens, 1),
        "most of the KV cache": timeline.most_kv_cache,
    }


def _promises(change: Change, before: Timeline, after: Timeline) -> dict[str, float]:
    """Return what became of both: late is who comes late beside the load as recorded."""
    pacing = change.pacing
    assert pacing is not None
    first, paced = before.first_token_s, after.first_token_s
    latest = {it: pacing.max_slowdown * first[it] + pacing.max_stall_s for it in first}
    return {
        "max_stall_s": pacing.max_stall_s,
        "max_slowdown": pacing.max_slowdown,
        "prompts": len(first.keys() & paced.keys()),
        "late_prompts": sum(paced[it] > latest[it] for it in first.keys() & paced.keys()),
        "steps_over_stall": after.steps_over_stall,
    }
