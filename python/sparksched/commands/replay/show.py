"""Answers of `sparksched replay`: for people, and for programs."""

import dataclasses
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from sparksched.record.load import Load
from sparksched.record.replay import Outcome
from sparksched.record.step_time import step_time
from sparksched.record.what_if import Change, Timeline

PIPED_WIDTH: Final = 120
"""Columns where there is no terminal."""


def _show_about(load: Load) -> Console:
    """Print what is replayed to a console as wide as the terminal, or as long lines need."""
    out = Console(highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)
    settings = load.trace.settings
    out.print(
        f"{len(load.requests):,} requests, {len(load.schedule_us):,} steps, {load.seconds:,.1f} s, "
        f"recorded of {settings.scheduler} in vLLM {settings.vllm}"
    )
    return out


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


def _times(microseconds: list[float]) -> dict[str, float]:
    """Return the median and the 99th percentile; nothing of nothing."""
    if not microseconds:
        return {}
    median = statistics.median(microseconds)
    return {"median": round(median, 1), "p99": round(_p99(microseconds), 1)}


def _span(microseconds: list[float]) -> str:
    times = _times(microseconds)
    return f"{times['median']:,.0f} / {times['p99']:,.0f} µs" if times else "-"


@dataclass(frozen=True)
class Comparison:
    """What came of replays."""

    load: Load
    outcomes: list[Outcome]

    @property
    def status(self) -> int:
        """The exit status: whether a decision differs."""
        return int(any(outcome.mismatch is not None for outcome in self.outcomes))

    def data(self) -> dict[str, Any]:
        """Return everything as JSON has it; times in microseconds."""
        recorded = {
            "schedule_us": _times(self.load.schedule_us),
            "update_us": _times(self.load.update_us),
        }
        return {
            "trace": _about(self.load) | {"times": recorded},
            "replays": [
                {
                    "scheduler": outcome.scheduler,
                    "equal_steps": outcome.num_steps,
                    "mismatch": outcome.mismatch and dataclasses.asdict(outcome.mismatch),
                    "schedule_us": _times(outcome.schedule_us),
                    "update_us": _times(outcome.update_us),
                }
                for outcome in self.outcomes
            ],
        }

    def show(self) -> None:
        """Print a table, and the first difference of each scheduler."""
        out = _show_about(self.load)
        table = Table("scheduler", "as recorded", "schedule, median / p99", "update, median / p99")
        table.add_row("recorded", "", _span(self.load.schedule_us), _span(self.load.update_us))
        for it in self.outcomes:
            equal = f"{'all ' if it.mismatch is None else ''}{it.num_steps:,} steps"
            table.add_row(it.scheduler, equal, _span(it.schedule_us), _span(it.update_us))
        out.print(table)
        for it in self.outcomes:
            if it.mismatch is not None:
                out.print(
                    f"{it.scheduler} decides something else in step {it.mismatch.step}:"
                    f" {it.mismatch.field}\n  recorded: {it.mismatch.recorded}"
                    f"\n  replayed: {it.mismatch.replayed}",
                    markup=False,
                )


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


@dataclass(frozen=True)
class Alternatives:
    """What other settings would have done."""

    load: Load
    change: Change
    before: Timeline
    after: Timeline

    status: int = 0

    @property
    def _changed(self) -> dict[str, Any]:
        return {k: v for k, v in dataclasses.asdict(self.change).items() if v is not None}

    def data(self) -> dict[str, Any]:
        """Return everything as JSON has it; times in seconds."""
        return {
            "trace": _about(self.load),
            "change": self._changed,
            "step_time": dataclasses.asdict(step_time(self.load)),
            "as_recorded": _summary_of(self.before),
            "changed": _summary_of(self.after),
        } | ({"promises": self._promises} if self.change.pacing else {})

    def show(self) -> None:
        """Print the two side by side."""
        out = _show_about(self.load)
        steps = step_time(self.load)
        out.print(
            f"A step is taken to last {steps.seconds * 1e3:,.2f} ms, and"
            f" {steps.seconds_a_decode_token * 1e6:,.1f} µs more for each token of a decode; with"
            f" prompts {steps.seconds_with_prompts * 1e3:,.2f} ms more, and"
            f" {steps.seconds_a_prompt_token * 1e6:,.1f} µs for each of their tokens."
        )
        title = " ".join(f"--{k.replace('_', '-')} {v}" for k, v in self._changed.items())
        table = Table("", "as recorded", "changed", title=title, title_justify="left")
        after = _summary_of(self.after)
        for name, before in _summary_of(self.before).items():
            table.add_row(name, _number(before), _number(after[name]))
        out.print(table)
        if self.change.pacing:
            out.print(
                "Promises: {late_prompts:,} of {prompts:,} first tokens come more than"
                " {max_slowdown:g} times as late, and a stall; {steps_over_stall:,} steps with"
                " prompts take longer than {max_stall_s:g} s, {unasked_steps:,} of them for no"
                " deadline.".format(**self._promises)
            )
        if self.after.num_stuck:
            out.print(f"{self.after.num_stuck:,} requests would never have run: they don't fit.")

    @property
    def _promises(self) -> dict[str, float]:
        """Return what became of both: late is who comes late beside the load as recorded."""
        pacing = self.change.pacing
        assert pacing is not None
        before, after = self.before.first_token_s, self.after.first_token_s
        paired = [(before[it], after[it]) for it in before.keys() & after.keys()]
        latest = [(pacing.max_slowdown * stock + pacing.max_stall_s, it) for stock, it in paired]
        over = self.after.steps_over_stall
        return {
            "max_stall_s": pacing.max_stall_s,
            "max_slowdown": pacing.max_slowdown,
            "prompts": len(paired),
            "late_prompts": sum(it > deadline for deadline, it in latest),
            "steps_over_stall": sum(over.values()),
            "unasked_steps": over["unexpected"],
        }


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"
