"""Answers of `sparksched replay`: for people, for programs, and as an image."""

import dataclasses
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from sparksched.trace.compare import Mismatch
from sparksched.trace.events import TraceError
from sparksched.trace.read import Opened
from sparksched.trace.replay import Outcome
from sparksched.trace.what_if import Change, Sample, Timeline
from sparksched.trace.workload import StepTime, step_time

PIPED_WIDTH: Final = 120
"""Columns where there is no terminal."""

NUM_ROWS: Final = 12
"""Of a table over time."""


def console() -> Console:
    """Return what is printed to: as wide as the terminal, or as long lines need."""
    return Console() if sys.stdout.isatty() else Console(width=PIPED_WIDTH)


def _times(microseconds: list[float]) -> dict[str, float]:
    """Return the median and the 99th percentile; nothing of nothing."""
    if not microseconds:
        return {}
    ordered = sorted(microseconds)
    return {
        "median": round(statistics.median(ordered), 1),
        "p99": round(_p99(ordered), 1),
    }


def _p99(ordered: list[float]) -> float:
    return ordered[min(int(0.99 * len(ordered)), len(ordered) - 1)]


def _about(opened: Opened) -> dict[str, Any]:
    settings, workload = opened.trace.settings, opened.workload
    return {
        "file": str(opened.trace.path),
        "missing": opened.trace.missing,
        "recorded_scheduler": settings.scheduler,
        "vllm": settings.vllm,
        "sparksched": settings.sparksched,
        "has_tokens": settings.has_tokens,
        "seconds": round(workload.seconds, 3),
        "requests": len(workload.arrivals),
        "steps": len(workload.schedule_us),
        "differences": workload.differences,
    }


def _show_about(out: Console, opened: Opened) -> None:
    about = _about(opened)
    out.print(
        f"{about['requests']:,} requests, {about['steps']:,} steps, {about['seconds']:,.1f} s, "
        f"recorded of {about['recorded_scheduler']} in vLLM {about['vllm']}",
        highlight=False,
    )
    for text in about["differences"]:
        out.print(f"Recorded with this difference: {text}", markup=False, highlight=False)


@dataclass(frozen=True)
class Comparison:
    """What came of replays."""

    opened: Opened
    outcomes: list[Outcome]

    @property
    def status(self) -> int:
        """The exit status: whether a decision differs."""
        return int(any(outcome.mismatch is not None for outcome in self.outcomes))

    def data(self) -> dict[str, Any]:
        """Return everything as JSON has it; times in microseconds."""
        workload = self.opened.workload
        recorded = {
            "schedule_us": _times(workload.schedule_us),
            "update_us": _times(workload.update_us),
        }
        return {
            "trace": _about(self.opened) | {"times": recorded},
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
        out = console()
        _show_about(out, self.opened)
        table = Table("scheduler", "as recorded", "schedule, median / p99", "update, median / p99")
        workload = self.opened.workload
        table.add_row("recorded", "", _span(workload.schedule_us), _span(workload.update_us))
        for it in self.outcomes:
            equal = f"{it.num_steps:,} steps"
            if it.mismatch is None:
                equal = f"all {equal}"
            table.add_row(it.scheduler, equal, _span(it.schedule_us), _span(it.update_us))
        out.print(table)
        for it in self.outcomes:
            if it.mismatch is not None:
                _show_mismatch(out, it.scheduler, it.mismatch)


def _span(microseconds: list[float]) -> str:
    times = _times(microseconds)
    return f"{times['median']:,.0f} / {times['p99']:,.0f} µs" if times else "-"


def _show_mismatch(out: Console, scheduler: str, mismatch: Mismatch) -> None:
    lines = (
        f"{scheduler} decides something else in step {mismatch.step}: {mismatch.field}",
        f"  recorded: {mismatch.recorded}",
        f"  replayed: {mismatch.replayed}",
    )
    for line in lines:
        out.print(line, markup=False, highlight=False)


@dataclass(frozen=True)
class Alternatives:
    """What other settings would have done."""

    opened: Opened
    change: Change
    before: Timeline
    after: Timeline

    status: int = 0

    @property
    def name(self) -> str:
        """The change, as on a command line."""
        return " ".join(
            f"--{name.replace('_', '-')} {value}"
            for name, value in dataclasses.asdict(self.change).items()
            if value is not None
        )

    def data(self) -> dict[str, Any]:
        """Return everything as JSON has it; times in seconds."""
        return {
            "trace": _about(self.opened),
            "change": {k: v for k, v in dataclasses.asdict(self.change).items() if v is not None},
            "step_time": dataclasses.asdict(step_time(self.opened.workload)),
            "as_recorded": _data_of(self.before),
            "changed": _data_of(self.after),
        }

    def show(self) -> None:
        """Print the two in sum, and over time."""
        out = console()
        _show_about(out, self.opened)
        out.print(_describe(step_time(self.opened.workload)), highlight=False)
        out.print(self._summary())
        out.print(self._over_time())
        if self.after.num_stuck:
            out.print(f"{self.after.num_stuck:,} requests would never have run: they don't fit.")

    def _summary(self) -> Table:
        table = Table("", "as recorded", "changed", title=self.name, title_justify="left")
        before, after = _summary_of(self.before), _summary_of(self.after)
        for name, text in _ROWS.items():
            table.add_row(name, text.format(before[name]), text.format(after[name]))
        return table

    def _over_time(self) -> Table:
        table = Table("at", *(f"{name}" for name in _COLUMNS), title="as recorded → changed")
        table.title_justify = "left"
        end = max(_seconds(self.before), _seconds(self.after))
        digits = 1 if end > 10 * NUM_ROWS else 3
        for row in range(1, NUM_ROWS + 1):
            at = end * row / NUM_ROWS
            before, after = _sample_at(self.before, at), _sample_at(self.after, at)
            cells = (f"{read(before)} → {read(after)}" for read in _COLUMNS.values())
            table.add_row(f"{at:,.{digits}f} s", *cells)
        return table


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

_COLUMNS: Final[dict[str, Callable[[Sample], str]]] = {
    "running": lambda sample: f"{sample.running:,}",
    "waiting": lambda sample: f"{sample.waiting:,}",
    "preemptions": lambda sample: f"{sample.preemptions:,}",
    "hit rate": lambda sample: f"{sample.hit_rate:.0%}",
}

_NOTHING: Final = Sample(0.0, 0, 0, 0, 0, 0, 0.0)


def _seconds(timeline: Timeline) -> float:
    return timeline.samples[-1].time if timeline.samples else 0.0


def _sample_at(timeline: Timeline, at: float) -> Sample:
    """Return the state at a time: that after the last step until then."""
    found = _NOTHING
    for sample in timeline.samples:
        if sample.time > at * (1 + 1e-9):
            break
        found = sample
    return found


def _summary_of(timeline: Timeline) -> dict[str, float]:
    samples = timeline.samples or [_NOTHING]
    first = sorted(timeline.first_token_s) or [0.0]
    gaps = sorted(timeline.gaps_s) or [0.0]
    return {
        "seconds": _seconds(timeline),
        "finished requests": timeline.num_finished,
        "output tokens a second": timeline.num_output_tokens / max(_seconds(timeline), 1e-9),
        "first token, median (s)": statistics.median(first),
        "first token, p99 (s)": _p99(first),
        "between outputs, p99 (s)": _p99(gaps),
        "between outputs, longest (s)": gaps[-1],
        "most running": max(sample.running for sample in samples),
        "most waiting": max(sample.waiting for sample in samples),
        "preemptions": samples[-1].preemptions,
        "prefix cache hit rate": samples[-1].hit_rate,
        "most of the KV cache": max(sample.kv_cache_usage for sample in samples),
    }


def _data_of(timeline: Timeline) -> dict[str, Any]:
    return {
        "summary": _summary_of(timeline),
        "stuck_requests": timeline.num_stuck,
        "samples": [dataclasses.asdict(sample) for sample in timeline.samples],
    }


def _describe(steps: StepTime) -> str:
    return (
        f"A step is taken to last {steps.seconds * 1e3:,.2f} ms, and"
        f" {steps.seconds_a_decode_token * 1e6:,.1f} µs more for each token of a decode; with"
        f" prompts {steps.seconds_with_prompts * 1e3:,.2f} ms more, and"
        f" {steps.seconds_a_prompt_token * 1e6:,.1f} µs for each of their tokens."
    )


_PANELS: Final[dict[str, Callable[[Sample], float]]] = {
    "running": lambda sample: sample.running,
    "waiting": lambda sample: sample.waiting,
    "preemptions so far": lambda sample: sample.preemptions,
    "prefix cache hit rate so far": lambda sample: sample.hit_rate,
}


def draw(answer: Alternatives, path: str) -> None:
    """Write an image. matplotlib is not required: without it, say that it is missing.

    Raises:
        TraceError: if matplotlib doesn't know what kind of image it is to be.
        OSError: if it can't be written.

    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("sparksched replay: no plot: matplotlib is not installed", file=sys.stderr)
        return
    figure = Figure(figsize=(9, 10), layout="constrained")
    axes = figure.subplots(len(_PANELS), sharex=True)
    for panel, (name, read) in zip(axes, _PANELS.items(), strict=True):
        _draw_line(panel, answer.before, read, "as recorded")
        _draw_line(panel, answer.after, read, answer.name)
        panel.set_ylabel(name)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    axes[0].legend()
    axes[-1].set_xlabel("seconds")
    try:
        figure.savefig(path)
    except ValueError as error:
        raise TraceError(f"no image can be written to {path}: {error}") from None


def _draw_line(
    panel: object, timeline: Timeline, read: Callable[[Sample], float], label: str
) -> None:
    times = [sample.time for sample in timeline.samples]
    values = [read(sample) for sample in timeline.samples]
    panel.step(times, values, where="post", label=label)  # type: ignore[attr-defined]
