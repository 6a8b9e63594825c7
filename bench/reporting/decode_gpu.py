"""Tables about `bench.decode`: what the GPU does, by traces and by computation."""

from collections.abc import Sequence
from typing import Any

from bench.reporting.cells import (
    CASE,
    OURS,
    STOCK,
    Pair,
    Row,
    are_of_separate_runs,
    marked,
    steady,
    traces_of,
)
from bench.reporting.document import Paragraph, Part, Table
from bench.reporting.values import dig, pair_text, text_of

KERNEL_CLASSES = ("attention", "MoE", "matrix products", "sampling", "copies", "other")
NUM_KERNELS = 6


# ---- GPU ----


def gpu(results: Sequence[Row], pairs: Sequence[Pair]) -> list[Part]:
    """Return what traces tell of the GPU, and the memory bandwidth that is computed."""
    parts: list[Part] = []
    traces = traces_of(results)
    if traces:
        rows = [
            [marked(key.label, are_of_separate_runs(sides)), *_trace_cells(sides)]
            for key, sides in traces.items()
        ]
        parts += [
            Paragraph(
                "From a trace of torch's profiler, vLLM → sparksched. Gap: for how long no "
                "kernel ran between the last one of a step and the first of the next. Profiling "
                "slows the host down."
            ),
            Table(("model, mode, streams", *TRACE_COLUMNS), rows),
            *_kernels(traces),
        ]
    bandwidth = _bandwidth(steady(pairs))
    if bandwidth:
        parts += bandwidth
    if not parts and pairs:
        parts.append(Paragraph("No traces were asked for."))
    return parts


TRACE_COLUMNS = (
    "gap p50, µs",
    "p90",
    "GPU busy",
    "busy a step, µs",
    "kernels a token",
    "a step",
    "launches a step",
    "graph launches",
)


def _trace_cells(sides: dict[str, Row]) -> list[str]:
    def both(*path: str, unit: str = "", scale: float = 1.0) -> str:
        return pair_text(
            dig(sides.get(STOCK), *path), dig(sides.get(OURS), *path), unit=unit, scale=scale
        )

    return [
        both("gap_us", "p50"),
        both("gap_us", "p90"),
        both("gpu_busy_share", unit=" %", scale=100),
        both("gpu_busy_us", "p50"),
        both("kernels_per_token"),
        both("kernels_per_step"),
        both("launches_per_step"),
        both("graph_launches_per_step"),
    ]


def _kernels(traces: dict[Any, dict[str, Row]]) -> list[Part]:
    shares = [
        [
            marked(key.label, are_of_separate_runs(sides)),
            *(
                pair_text(
                    dig(sides.get(STOCK), "shares", it),
                    dig(sides.get(OURS), "shares", it),
                    " %",
                    100,
                )
                for it in KERNEL_CLASSES
            ),
        ]
        for key, sides in traces.items()
    ]
    parts: list[Part] = [
        Paragraph("Share of the time that kernels and copies take, by their names:"),
        Table(("model, mode, streams", *KERNEL_CLASSES), shares),
    ]
    # One of each model and mode is enough: the one with the most streams.
    last = {(key.model, key.mode): (key, sides) for key, sides in traces.items()}
    for key, sides in last.values():
        top = dig(sides.get(STOCK), "top_kernels") or dig(sides.get(OURS), "top_kernels")
        if isinstance(top, list):
            rows = [
                [
                    f"`{dig(it, 'name')}`",
                    str(dig(it, "class")),
                    text_of(dig(it, "share"), " %", 100),
                ]
                for it in top[:NUM_KERNELS]
            ]
            parts += [
                Paragraph(f"The kernels that take most, {key.label}:"),
                Table(("kernel", "class", "share"), rows),
            ]
    return parts


def _bandwidth(pairs: Sequence[Pair]) -> list[Part]:
    rows = []
    for pair in pairs:
        if pair.stock.error and pair.ours.error:
            continue
        rows.append(
            [
                pair.label,
                *(
                    pair_text(*pair.both("memory", it))
                    for it in ("least_gb", "even_gb", "least_gb_s", "even_gb_s", "peak_gb_s")
                ),
                pair_text(*pair.both("memory", "least_share"), " %", 100),
                pair_text(*pair.both("memory", "even_share"), " %", 100),
            ]
        )
    if not rows:
        return []
    columns = ("GB a step, least", "even", "GB/s, least", "even", "peak", "of peak, least", "even")
    return [
        Paragraph(
            "Memory bandwidth, computed from model, batch and tokens a second (weights and KV "
            "cache that a step must read). Least: all tokens choose the same experts, as with "
            "random weights; even: they choose evenly, as trained routers are meant to. More than "
            "the peak means that they don't."
        ),
        Table((CASE, *columns), rows),
    ]
