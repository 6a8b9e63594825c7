"""The pictures of README.md and docs/results.md, as SVG. vLLM is orange and sparksched blue."""

import io
from collections.abc import Callable, Sequence

import matplotlib as mpl
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.report.pairs import (
    ALL,
    ASYNC,
    HTTP,
    LABELS,
    OURS,
    RUST,
    STOCK,
    Pair,
    Row,
    Side,
    pairs_of,
    rows_of,
)
from bench.report.tables import JOINING_SIDES, ROLES, Results, current, joining_name
from bench.report.values import as_number, dig, median, numbers

# Colours that remain different for the colour-blind: Okabe and Ito's.
COLOURS = {STOCK: "#D55E00", OURS: "#0072B2"}
STYLES = {"p50": "-", "p99": "--", "python": "-", "rust": ":"}
JOINING_COLOURS = tuple(COLOURS.values())
SHOWN = ("Qwen2-1.5B", "gpt-oss-120b")
"""Models that pictures show: the one that the host limits most, and the one least."""

mpl.use("Agg")
mpl.rcParams.update(
    {
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#E5E5E5",
        "legend.frameon": False,
        # The same results make the same file.
        "svg.hashsalt": "sparksched",
        "svg.fonttype": "none",
    }
)

Points = list[tuple[float, list[float]]]
"""Streams, and a figure of each round."""


def pictures(results: Results) -> dict[str, str]:
    """Return the pictures that can be drawn, as SVG, by name."""
    found = {
        "serving": _serving(results),
        "latency": _of_models(results, _draw_gaps, "ms between outputs (log)"),
        "cpu": _of_models(results, _draw_costs, "engine and API server, µs of CPU a token (log)"),
        "first_token": _first_tokens(results),
    }
    return {name: _svg(figure) for name, figure in found.items() if figure is not None}


def _svg(figure: Figure) -> str:
    target = io.StringIO()
    figure.savefig(target, format="svg", bbox_inches="tight", metadata={"Date": None})
    # Matplotlib leaves spaces at the ends of lines.
    return "\n".join(line.rstrip() for line in target.getvalue().splitlines()) + "\n"


def _serving(results: Results) -> Figure | None:
    """Draw tokens a second against streams; beside it the host's time a step."""
    pairs = _over_http(current(results, compare_front_ends=True), SHOWN[0])
    steps = [row for result in results.values() for row in rows_of(result, "decode")]
    steps = [row for row in steps if as_number(row.get("requests")) and STOCK in row]
    if not pairs or not steps:
        return None
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_each(left, pairs, lambda side: side.each("tokens_per_s"))
    left.set_title(f"{SHOWN[0]} over HTTP: tokens/s", loc="left", fontsize=10)
    for name in (STOCK, OURS):
        points: Points = [
            (row["requests"], numbers(dig(row, name, "step_us", it) for it in ("median",)))
            for row in steps
        ]
        _draw_line(right, points, name, "-", LABELS[name])
    right.set_title("the host's time a decode step, µs", loc="left", fontsize=10)
    for panel in (left, right):
        _finish(panel)
    right.set_xlabel("running requests (log)")
    return figure


def _of_models(
    results: Results, draw: Callable[[Axes, Sequence[Pair]], None], what: str
) -> Figure | None:
    """Draw a panel for each model that was measured over HTTP."""
    found = {model: pairs for model in SHOWN if (pairs := _over_http(current(results), model))}
    if not found:
        return None
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    panels = figure.subplots(1, len(found), squeeze=False).flat
    for panel, (model, pairs) in zip(panels, found.items(), strict=True):
        draw(panel, pairs)
        panel.set_title(f"{model} over HTTP", loc="left", fontsize=10)
        _finish(panel)
    figure.axes[0].set_ylabel(what)
    return figure


def _first_tokens(results: Results) -> Figure | None:
    """Draw how long requests wait that join others: p50, and a line to p90."""
    cases = [case for result in results.values() for case in rows_of(result, "joining")]
    if not cases:
        return None
    figure = Figure(figsize=(10, 1.2 + 0.5 * len(cases)), layout="constrained")
    panel = figure.subplots()
    for number, (side, colour) in enumerate(zip(JOINING_SIDES, JOINING_COLOURS, strict=True)):
        times = [(place, dig(case, side, "ttft_ms")) for place, case in enumerate(cases)]
        known = [(place, found["p50"], found["p90"]) for place, found in times if found]
        panel.errorbar(
            [p50 for _, p50, _ in known],
            [place + 0.25 * (number - 1) for place, *_ in known],
            xerr=[[0.0] * len(known), [p90 - p50 for _, p50, p90 in known]],
            color=colour,
            linestyle="none",
            marker="os^"[number],
            markersize=5,
            label=side,
        )
    panel.set_yticks(range(len(cases)), [joining_name(case) for case in cases])
    panel.invert_yaxis()
    panel.set_xscale("log")
    panel.xaxis.set_major_formatter(_in_full)
    panel.set_xlabel("ms to the first token of a request that joins (log): p50, a line to p90")
    panel.legend(fontsize=8.5)
    return figure


def _over_http(found: Sequence[Row], model: str) -> list[Pair]:
    wanted = (model, ASYNC, HTTP, ALL)
    return [
        pair
        for pair in pairs_of(found)
        if wanted == tuple(getattr(pair.case, it) for it in ("model", "mode", "driver", "cores"))
    ]


def _draw_gaps(panel: Axes, pairs: Sequence[Pair]) -> None:
    for percentile in ("p50", "p99"):
        _draw_each(
            panel, pairs, lambda side, at=percentile: side.gaps(at), percentile, STYLES[percentile]
        )


def _draw_costs(panel: Axes, pairs: Sequence[Pair]) -> None:
    def costs(side: Side) -> list[float]:
        by_role = [side.each("cpu", "us_per_token", role) for role in ROLES]
        return [sum(it) for it in zip(*by_role, strict=True)]

    _draw_each(panel, pairs, costs)


def _draw_each(
    panel: Axes,
    pairs: Sequence[Pair],
    figures: Callable[[Side], list[float]],
    suffix: str = "",
    style: str | None = None,
) -> None:
    """Draw a line for each scheduler and front end."""
    for front_end in dict.fromkeys(pair.case.front_end for pair in pairs):
        chosen = [pair for pair in pairs if pair.case.front_end == front_end]
        rust = ", Rust front end" if front_end == RUST else ""
        for number, name in enumerate((STOCK, OURS)):
            points = [(it.case.concurrency, figures(it.sides()[number])) for it in chosen]
            label = f"{LABELS[name]}{rust}{f', {suffix}' if suffix else ''}"
            _draw_line(panel, points, name, style or STYLES[front_end], label)


def _draw_line(panel: Axes, points: Points, name: str, style: str, label: str) -> None:
    """Draw medians, with the least and most of the rounds."""
    known = sorted((count, found) for count, found in points if found)
    middles = [median(found) or 0.0 for _, found in known]
    panel.errorbar(
        [count for count, _ in known],
        middles,
        yerr=[
            [it - min(found) for it, (_, found) in zip(middles, known, strict=True)],
            [max(found) - it for it, (_, found) in zip(middles, known, strict=True)],
        ],
        color=COLOURS[name],
        linestyle=style,
        marker="o" if name == STOCK else "s",
        markersize=4,
        capsize=3,
        label=label,
    )


def _in_full(value: float, _: int | None) -> str:
    """Return the label of a number on an axis."""
    return f"{value:,.6g}"


def _finish(panel: Axes) -> None:
    panel.set_xscale("log", base=4)
    panel.set_yscale("log")
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_formatter(_in_full)
        axis.set_minor_formatter(ticker.NullFormatter())
    panel.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5), numticks=10))
    panel.set_xlabel("streams (log); bars: least and most of the rounds")
    panel.legend(fontsize=8.5)
