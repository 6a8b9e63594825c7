"""The report's pictures. vLLM is orange and sparksched blue in all of them."""

import io
import re
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from bench.reporting.cells import (
    ASYNCLLM,
    LABELS,
    OURS,
    STOCK,
    Pair,
    Row,
    Side,
    TraceKey,
    counted,
    pairs_of,
    rows_of,
    steady,
    traces_of,
)
from bench.reporting.document import Image
from bench.reporting.values import as_number, dig, numbers

# Colours that remain different for the colour-blind: Okabe and Ito's.
COLOURS = {STOCK: "#D55E00", OURS: "#0072B2"}
MARKERS = {STOCK: "o", OURS: "s"}
WIDTHS = {STOCK: 3.2, OURS: 1.5}

PHASE_COLOURS = {
    "schedule": "#CC4C02",
    "update": "#FE9929",
    "deliver": "#FEE391",
    "execute": "#41AB5D",
    "sample": "#A1D99B",
    "wait": "#D9D9D9",
}
GPU_COLOURS = {
    "attention": "#6A51A3",
    "MoE": "#2171B5",
    "matrix products": "#6BAED6",
    "sampling": "#DD3497",
    "copies": "#737373",
    "other": "#BDBDBD",
}

DPI = 130
MAX_COLUMNS = 3
MARKED_PERCENTS = (50, 99)
SPREAD = ("median", "p10", "p90")
LEAST_SPAN = 4.0
"""Of a logarithmic axis, as a factor: small differences are to look small."""

mpl.use("Agg")
mpl.rcParams.update(
    {
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#E5E5E5",
        "axes.axisbelow": True,
        "legend.frameon": False,
    }
)


def decode_images(results: Sequence[Row]) -> list[Image]:
    """Return the pictures of `bench.decode`'s results that can be drawn."""
    pairs = steady(pairs_of(results))
    traces = traces_of(results)
    images: list[Image] = []
    groups: dict[tuple[str, str, str], list[Pair]] = {}
    for pair in pairs:
        groups.setdefault((pair.key.model, pair.key.mode, pair.key.driver), []).append(pair)
    for (model, mode, driver), group in groups.items():
        name = _file_name(model, mode, driver)
        title = f"{model}, {mode}, {driver}"
        images += _drawn(f"itl-{name}", f"Inter-token latency: {title}", _itl, group)
    for (model, mode, driver), group in groups.items():
        if driver == ASYNCLLM or (model, mode, ASYNCLLM) not in groups:
            name = _file_name(model, mode, driver)
            title = f"{model}, {mode}"
            images += _drawn(f"host-{name}", f"Host time a step: {title}", _host, group, traces)
            images += _drawn(f"timeline-{name}", f"A few steps: {title}", _timeline, group, traces)
    return images


def _file_name(*parts: str) -> str:
    return re.sub("[^A-Za-z0-9_]+", "-", "-".join(parts).replace(".", "_"))


def _drawn(name: str, title: str, draw: Any, *arguments: Any) -> list[Image]:
    """Return a picture, or none if there is nothing to draw."""
    figure = draw(title, *arguments)
    return [] if figure is None else [Image(name, _png(figure), title)]


def _png(figure: Figure) -> bytes:
    target = io.BytesIO()
    figure.savefig(target, format="png", dpi=DPI, bbox_inches="tight")
    return target.getvalue()


def _number_axis(axis: Any) -> None:
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axis.set_minor_formatter(ticker.NullFormatter())


# ---- inter-token latency ----


def _itl(title: str, pairs: Sequence[Pair]) -> Figure | None:
    """Draw which share of tokens came within a latency, a panel for each number of streams."""
    curves = [(pair, {STOCK: _curve(pair.stock), OURS: _curve(pair.ours)}) for pair in pairs]
    curves = [
        (pair, found) for pair, found in curves if any(it is not None for it in found.values())
    ]
    if not curves:
        return None
    columns = min(MAX_COLUMNS, len(curves))
    rows = -(-len(curves) // columns)
    figure = Figure(figsize=(1.2 + 3.6 * columns, 0.9 + 3.0 * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, sharey=True).flat)
    for panel, (pair, found) in zip(axes, curves, strict=False):
        _draw_itl_panel(panel, pair, found)
    for panel in axes[len(curves) :]:
        panel.set_visible(False)
    for row in range(rows):
        figure.axes[row * columns].set_ylabel("tokens that came within it, %")
    handles = [Patch(color=COLOURS[it], label=LABELS[it]) for it in (STOCK, OURS)]
    figure.legend(handles=handles, loc="outside upper right", ncols=2)
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    return figure


def _draw_itl_panel(panel: Axes, pair: Pair, found: dict[str, Any]) -> None:
    for side, curve in found.items():
        if curve is None:
            continue
        latencies, percents = curve
        # Tokens that came together with another have no place on a logarithmic axis.
        has_place = latencies > 0
        # Both are seen where they are the same.
        panel.plot(
            latencies[has_place],
            percents[has_place],
            color=COLOURS[side],
            linewidth=WIDTHS[side],
        )
        for percent in MARKED_PERCENTS:
            _mark(panel, side, float(np.interp(percent, percents, latencies)), percent)
    missing = [LABELS[side] for side, curve in found.items() if curve is None]
    if missing:
        panel.text(
            0.97,
            0.05,
            f"{missing[0]}: missing",
            transform=panel.transAxes,
            ha="right",
            color="#777777",
            style="italic",
        )
    tokens = f" of {pair.key.tokens} tokens" if pair.key.tokens else ""
    streams = counted(pair.key.concurrency, "stream")
    panel.set_title(f"{streams}{tokens}", loc="left", fontsize=10)
    panel.set_xscale("log")
    panel.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5), numticks=8))
    _number_axis(panel.xaxis)
    panel.set_ylim(0, 101)
    _widen(panel)
    panel.set_xlabel("ms (log); marks at p50 and p99, on the left edge: 0")


def _mark(panel: Axes, side: str, latency: float, percent: float) -> None:
    """Mark a percentile; 0 ms stands on the edge."""
    panel.plot(
        [latency],
        [percent],
        linestyle="",
        marker=MARKERS[side],
        color=COLOURS[side],
        ms=4,
        clip_on=False,
        transform=panel.transData if latency > 0 else panel.get_yaxis_transform(),
    )


def _widen(panel: Axes) -> None:
    low, high = panel.get_xlim()
    factor = max(1.0, (LEAST_SPAN / (high / low)) ** 0.5)
    panel.set_xlim(low / factor, high * factor)


def _curve(side: Side) -> tuple[Any, Any] | None:
    """Return latencies and percents: of each percentile the median over the rounds."""
    found = [dig(entry, "itl_quantiles_ms") for entry in side.rounds()]
    curves = [(_floats(dig(it, "ms")), _floats(dig(it, "percent"))) for it in found]
    curves = [it for it in curves if it[0] and len(it[0]) == len(it[1]) == len(curves[0][0])]
    if not curves:
        return None
    return np.median(np.array([ms for ms, _ in curves]), axis=0), np.array(curves[0][1])


def _floats(values: Any) -> list[float]:
    """Return a list's numbers, or none if not all of it are some."""
    found = numbers(values) if isinstance(values, list) else []
    return found if found and len(found) == len(values) else []


# ---- host time against streams ----


def _host(
    title: str, pairs: Sequence[Pair], traces: dict[TraceKey, dict[str, Row]]
) -> Figure | None:
    """Draw host time a step, and the scheduler's part of it, against the number of streams."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    whole, part = figure.subplots(1, 2)
    drawn = 0
    for side in (STOCK, OURS):
        drawn += _draw_line(whole, pairs, side, ("host_us",))
        _draw_line(part, pairs, side, ("schedule_us", "update_us", "deliver_us"))
        _draw_gpu(whole, pairs, traces, side)
    if not drawn:
        return None
    whole.set_title("all of the engine's loop but waiting", loc="left", fontsize=10)
    part.set_title("of it: schedule, update and deliver", loc="left", fontsize=10)
    for panel in (whole, part):
        _set_log_axes(panel, [pair.key.concurrency for pair in pairs])
        panel.legend(loc="upper left")
    whole.set_ylabel("µs a step (log); bars: p10 to p90")
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    return figure


def _set_log_axes(panel: Axes, counts: Sequence[int]) -> None:
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(sorted(set(counts)))
    _number_axis(panel.xaxis)
    panel.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5), numticks=10))
    _number_axis(panel.yaxis)
    panel.set_xlabel("streams (log)")
    low, high = panel.get_ylim()
    panel.set_ylim(low / 1.3, high * 2.2)


def _draw_line(panel: Axes, pairs: Sequence[Pair], side: str, names: Sequence[str]) -> int:
    """Draw medians of a phase or a sum of phases, with p10 to p90 if it is one."""
    points = []
    for pair in pairs:
        found = pair.stock if side == STOCK else pair.ours
        rows = [found.get("phases", name) for name in names]
        middles = [as_number(dig(row, "p50")) for row in rows]
        if any(it is None for it in middles):
            continue
        middle = sum(it for it in middles if it is not None)
        spread = [as_number(dig(rows[0], it)) if len(rows) == 1 else None for it in ("p10", "p90")]
        low, high = (middle if it is None else it for it in spread)
        points.append((pair.key.concurrency, middle, middle - low, high - middle))
    if points:
        counts, middles_us, below, above = zip(*points, strict=True)
        panel.errorbar(
            counts,
            middles_us,
            yerr=np.maximum(0, [below, above]),
            color=COLOURS[side],
            marker=MARKERS[side],
            capsize=3,
            linewidth=1.8,
            label=LABELS[side],
        )
    return len(points)


def _draw_gpu(
    panel: Axes, pairs: Sequence[Pair], traces: dict[TraceKey, dict[str, Row]], side: str
) -> None:
    """Draw how long the GPU works on a step, where a trace tells."""
    points = []
    for pair in pairs:
        key = TraceKey(pair.key.model, pair.key.mode, pair.key.concurrency)
        busy = as_number(dig(traces.get(key, {}).get(side), "gpu_busy_us", "p50"))
        if busy is not None:
            points.append((pair.key.concurrency, busy))
    if points:
        panel.plot(
            *zip(*points, strict=True),
            linestyle="--",
            color=COLOURS[side],
            alpha=0.6,
            label=f"the GPU's time, {LABELS[side]}",
        )


# ---- timeline ----


def _timeline(
    title: str, pairs: Sequence[Pair], traces: dict[TraceKey, dict[str, Row]]
) -> Figure | None:
    """Draw the lanes of host and GPU in a few steps, with the most streams that both have."""
    chosen = [
        (pair, lanes)
        for pair in pairs
        if any((lanes := _lanes(pair, traces))[side]["host"] for side in (STOCK, OURS))
    ]
    if not chosen:
        return None
    shown = [chosen[0], chosen[-1]] if len(chosen) > 1 else chosen
    figure = Figure(figsize=(11, 0.9 + 2.7 * len(shown)), layout="constrained")
    panels = figure.subplots(len(shown), 1, squeeze=False).flat
    for panel, (pair, lanes) in zip(panels, shown, strict=True):
        _draw_lanes(panel, lanes)
        count = pair.key.concurrency
        panel.set_title(f"{count:,} stream{'s' if count > 1 else ''}", loc="left", fontsize=10)
    has_gpu = any(lanes[side]["gpu"] for _, lanes in shown for side in (STOCK, OURS))
    handles = [Patch(color=colour, label=name) for name, colour in PHASE_COLOURS.items()]
    if has_gpu:
        handles += [
            Patch(color=colour, label=f"GPU: {name}") for name, colour in GPU_COLOURS.items()
        ]
    figure.legend(handles=handles, loc="outside right upper", fontsize=8.5)
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    return figure


def _lanes(pair: Pair, traces: dict[TraceKey, dict[str, Row]]) -> dict[str, dict[str, list[Any]]]:
    """Return the bars of each side: from traces, or the host's alone from the engine's probe."""
    key = TraceKey(pair.key.model, pair.key.mode, pair.key.concurrency)
    lanes: dict[str, dict[str, list[Any]]] = {}
    for side, found in pair.sides():
        traced = dig(traces.get(key, {}).get(side), "timeline")
        if isinstance(traced, dict) and traced.get("gpu"):
            lanes[side] = {"host": traced.get("host") or [], "gpu": traced["gpu"]}
        else:
            probed = found.get("phases", "timeline")
            lanes[side] = {"host": probed if isinstance(probed, list) else [], "gpu": []}
    return lanes


def _draw_lanes(panel: Axes, lanes: dict[str, dict[str, list[Any]]]) -> None:
    names, position = [], 0.0
    longest = max(bar[2] for it in lanes.values() for bars in it.values() for bar in bars)
    scale, unit = (1000, "ms") if longest > 2000 else (1, "µs")
    for side in (STOCK, OURS):
        for lane, colours in (("host", PHASE_COLOURS), ("gpu", GPU_COLOURS)):
            bars = lanes[side][lane]
            for name, start, end in bars:
                panel.broken_barh(
                    [(start / scale, (end - start) / scale)],
                    (position - 0.38, 0.76),
                    facecolors=colours.get(name, "#BDBDBD"),
                )
            if not bars:
                text = "missing" if lane == "host" else "no trace"
                panel.text(
                    longest / scale * 0.005,
                    position,
                    text,
                    va="center",
                    color="#777777",
                    style="italic",
                    fontsize=8.5,
                )
            label = f"{LABELS[side]}, {'GPU' if lane == 'gpu' else 'host'}"
            names.append((position, label, COLOURS[side]))
            position += 1
        position += 0.3
    panel.set_yticks([at for at, *_ in names], [label for _, label, _ in names])
    for tick, (*_, colour) in zip(panel.get_yticklabels(), names, strict=True):
        tick.set_color(colour)
    panel.set_ylim(position - 0.7, -0.6)
    panel.set_xlim(0, longest / scale)
    panel.grid(axis="y", visible=False)
    panel.set_xlabel(f"{unit}; white: everything else")


# ---- step_cost ----


def step_cost_image(result: Row) -> list[Image]:
    """Return the picture of what a step costs against the number of requests."""
    rows = [row for row in rows_of(result, "decode") if as_number(row.get("requests"))]
    figure = Figure(figsize=(6.5, 4.2), layout="constrained")
    panel = figure.subplots()
    drawn = 0
    for side in (STOCK, OURS):
        points = [
            (row.get("requests"), *(as_number(dig(row, side, "step_us", it)) for it in SPREAD))
            for row in rows
        ]
        known = [point for point in points if all(it is not None for it in point)]
        if known:
            counts, middles, lows, highs = (
                np.array(it, dtype=float) for it in zip(*known, strict=True)
            )
            panel.errorbar(
                counts,
                middles,
                yerr=np.maximum(0, [middles - lows, highs - middles]),
                capsize=3,
                color=COLOURS[side],
                marker=MARKERS[side],
                label=LABELS[side],
            )
            drawn += 1
    if not drawn:
        return []
    _set_log_axes(panel, [row["requests"] for row in rows])
    panel.set_ylabel("µs a step (log); bars: p10 to p90")
    panel.set_xlabel("running requests (log)")
    panel.legend(loc="upper left")
    title = "Host time of a decode step, scheduler alone"
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    return [Image("step-cost", _png(figure), title)]
