"""Draws what other settings would have done. matplotlib may be missing; it is not required."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from sparksched.trace.errors import TraceError
from sparksched.trace.whatif import Sample, Timeline

if TYPE_CHECKING:
    from sparksched.trace.show import Alternatives

_PANELS: Final[dict[str, Callable[[Sample], float]]] = {
    "running": lambda sample: sample.running,
    "waiting": lambda sample: sample.waiting,
    "preemptions so far": lambda sample: sample.preemptions,
    "prefix cache hit rate so far": lambda sample: sample.hit_rate,
}


def draw(answer: "Alternatives", path: str) -> None:
    """Write an image; without matplotlib, say that it is missing.

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
