"""Answers of `sparksched replay`: for people, for programs, and as an image."""

import dataclasses
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from sparksched.record.load import Load
from sparksched.record.replay import Outcome
from sparksched.record.step_time import step_time
from sparksched.record.what_if import Change, Sample, Timeline

PIPED_WIDTH: Final = 120
"""Columns where there is no terminal."""
NUM_ROWS: Final = 12
"""Of a table over time."""


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


_ROWS: Final = {
    "seconds": "{:,.1f}",
    "finished requests": "{:,}",
    "output tokens a second": "{:,.0f}",
    "first token, median (s)": "{:,.3f}",
    "first token, p99 (s)": "{:,.3f}",
    "between outputs, p99 (s)": "{:,.3f}",
    "between outputs, longest (s)": "{:,.3f}",
    "most running": "{:,}",
    "most waiting": "{:,}",
    "preemptions": "{:,}",
    "prefix cache hit rate": "{:.1%}",
    "most of the KV cache": "{:.1%}",
}

_OVER_TIME: Final[dict[str, tuple[str, Callable[[Sample], float]]]] = {
    "running": ("{:,}", lambda sample: sample.running),
    "waiting": ("{:,}", lambda sample: sample.waiting),
    "preemptions": ("{:,}", lambda sample: sample.preemptions),
    "hit rate": ("{:.0%}", lambda sample: sample.hit_rate),
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

    @property
    def name(self) -> str:
        """The change, as on a command line."""
        return " ".join(f"--{k.replace('_', '-')} {v}" for k, v in self._changed.items())

    def data(self) -> dict[str, Any]:
        """Return everything as JSON has it; times in seconds."""
        return {
            "trace": _about(self.load),
            "change": self._changed,
            "step_time": dataclasses.asdict(step_time(self.load)),
            "as_recorded": _data_of(self.before),
            "changed": _data_of(self.after),
        } | ({"promises": self._promises} if self.change.pacing else {})

    def show(self) -> None:
        """Print the two in sum, and over time."""
        out = _show_about(self.load)
        steps = step_time(self.load)
        out.print(
            f"A step is taken to last {steps.seconds * 1e3:,.2f} ms, and"
            f" {steps.seconds_a_decode_token * 1e6:,.1f} µs more for each token of a decode; with"
            f" prompts {steps.seconds_with_prompts * 1e3:,.2f} ms more, and"
            f" {steps.seconds_a_prompt_token * 1e6:,.1f} µs for each of their tokens."
        )
        table = Table("", "as recorded", "changed", title=self.name, title_justify="left")
        before, after = _summary_of(self.before), _summary_of(self.after)
        for name, text in _ROWS.items():
            table.add_row(name, text.format(before[name]), text.format(after[name]))
        out.print(table, self._over_time())
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

    def _over_time(self) -> Table:
        table = Table("at", *_OVER_TIME, title="as recorded → changed", title_justify="left")
        end = max(_seconds(self.before), _seconds(self.after))
        digits = 1 if end > 10 * NUM_ROWS else 3
        for row in range(1, NUM_ROWS + 1):
            at = end * row / NUM_ROWS
            before, after = _sample_at(self.before, at), _sample_at(self.after, at)
            cells = (
                f"{text.format(read(before))} → {text.format(read(after))}"
                for text, read in _OVER_TIME.values()
            )
            table.add_row(f"{at:,.{digits}f} s", *cells)
        return table


_NOTHING: Final = Sample(0.0, 0, 0, 0, 0, 0, 0.0)


def _seconds(timeline: Timeline) -> float:
    return timeline.samples[-1].time if timeline.samples else 0.0


def _sample_at(timeline: Timeline, at: float) -> Sample:
    """Return the state at a time: that after the last step until then."""
    until_then = (sample for sample in reversed(timeline.samples) if sample.time <= at * (1 + 1e-9))
    return next(until_then, _NOTHING)


def _summary_of(timeline: Timeline) -> dict[str, float]:
    samples = timeline.samples or [_NOTHING]
    first = list(timeline.first_token_s.values()) or [0.0]
    gaps = timeline.gaps_s or [0.0]
    values = (
        _seconds(timeline),
        timeline.num_finished,
        timeline.num_output_tokens / max(_seconds(timeline), 1e-9),
        statistics.median(first),
        _p99(first),
        _p99(gaps),
        max(gaps),
        max(sample.running for sample in samples),
        max(sample.waiting for sample in samples),
        samples[-1].preemptions,
        samples[-1].hit_rate,
        max(sample.kv_cache_usage for sample in samples),
    )
    return dict(zip(_ROWS, values, strict=True))


def _data_of(timeline: Timeline) -> dict[str, Any]:
    return {
        "summary": _summary_of(timeline),
        "stuck_requests": timeline.num_stuck,
        "samples": [dataclasses.asdict(sample) for sample in timeline.samples],
    }
