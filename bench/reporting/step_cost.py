"""The part of the report about `bench.step_cost`: what a step costs the scheduler."""

from collections.abc import Sequence
from typing import Any

from bench.reporting.cells import OURS, STOCK, Row, rows_of
from bench.reporting.document import Paragraph, Part, Section, Table
from bench.reporting.values import (
    MISSING,
    as_number,
    dig,
    pair_text,
    ratio_text,
    rounded,
    text_of,
)

Sides = tuple[str, str]

BOTH: Sides = (STOCK, OURS)
VERIFIED: Sides = (STOCK, "verifying")
COUNTED: Sides = ("sparksched without metrics", OURS)
SPREADS = ("vLLM", "p90", "sparksched", "p90", "ratio")


def step_cost(result: Row) -> list[Section]:
    """Return what a step costs the scheduler, with what newer results have in addition."""
    parts = [
        *_decode(rows_of(result, "decode")),
        *_features(rows_of(result, "features")),
        *_broadcast(rows_of(result, "broadcast")),
        *_prefill(rows_of(result, "prefill")),
        *_blocks(result.get("blocks")),
        *_verified(rows_of(result, "verified")),
        *_counted(rows_of(result, "counted")),
    ]
    return [Section("A step", parts)] if parts else []


# ---- vLLM and sparksched ----


def _decode(rows: Sequence[Row]) -> list[Part]:
    if not rows:
        return []
    parts_of_a_step = [
        [
            text_of(row.get("requests")),
            *(_both(row, f"{it}_us", "median") for it in ("schedule", "update", "message")),
        ]
        for row in rows
    ]
    return [
        Paragraph(
            "Host time of a decode step in µs: `schedule()`, `update_from_output()` and the "
            "message to the client; median and p90, without a model."
        ),
        Table(("requests", *SPREADS), [_compared(row, "requests", "step_us") for row in rows]),
        Paragraph("Its parts, vLLM → sparksched:"),
        Table(("requests", "schedule", "update", "message"), parts_of_a_step),
    ]


def _features(rows: Sequence[Row]) -> list[Part]:
    if not rows:
        return []
    compared = [[str(row.get("feature")), *_compared(row, "requests", "step_us")] for row in rows]
    return [
        Paragraph("The same, in µs, with what all requests have:"),
        Table(("all requests have", "requests", *SPREADS), compared),
    ]


def _broadcast(rows: Sequence[Row]) -> list[Part]:
    if not rows:
        return []
    compared = [[*_compared(row, "requests", "us"), _both(row, "bytes")] for row in rows]
    return [
        Paragraph(
            "With several GPUs, the `SchedulerOutput` of a decode step in a message to workers: "
            "the time to pickle it in µs, median and p90, and its bytes, vLLM → sparksched."
        ),
        Table(("requests", *SPREADS, "bytes"), compared),
    ]


def _prefill(rows: Sequence[Row]) -> list[Part]:
    if not rows:
        return []
    return [
        Paragraph("One request from its arrival to its first token, in µs, without a model:"),
        Table(("prompt tokens", *SPREADS), [_compared(row, "tokens") for row in rows]),
    ]


def _blocks(blocks: Any) -> list[Part]:
    if not isinstance(blocks, dict):
        return []
    return [
        Paragraph(f"Bookkeeping of {text_of(blocks.get('blocks'))} KV blocks:"),
        Table(
            ("", "vLLM", "sparksched"),
            [
                ["time to build, ms", *_sides(blocks, "build_ms")],
                ["memory, MiB", *_sides(blocks, "memory_mib")],
            ],
        ),
    ]


# ---- one of them, and more ----


def _verified(rows: Sequence[Row]) -> list[Part]:
    if not rows:
        return []
    columns = ("requests", "vLLM", "p90", "verified", "p90", "longer by")
    return [
        Paragraph(
            "A decode step that both schedulers decide, so that sparksched is verified, beside "
            "vLLM's alone, in µs:"
        ),
        Table(columns, [_lengthened(row, VERIFIED) for row in rows]),
    ]


def _counted(rows: Sequence[Row]) -> list[Part]:
    if not rows:
        return []
    columns = ("requests", "without metrics", "p90", "with metrics", "p90", "longer by")
    return [
        Paragraph("A decode step of sparksched without and with its metrics, in µs:"),
        Table(columns, [_lengthened(row, COUNTED) for row in rows]),
    ]


def _compared(row: Row, label: str, *path: str) -> list[str]:
    """Return a row's name, both sides, and how many times less ours costs."""
    stock, ours = (dig(row, side, *path, "median") for side in BOTH)
    cached = ", prefix cached" if row.get("prefix_cached") else ""
    name = text_of(row.get(label)) + cached
    return [name, *_spreads(row, BOTH, *path), ratio_text(ours, stock)]


def _lengthened(row: Row, sides: Sides) -> list[str]:
    """Return a row's name, a step without and with something, and what that takes."""
    less, more = (as_number(dig(row, side, "step_us", "median")) for side in sides)
    longer = MISSING if less is None or more is None else rounded(more - less)
    return [text_of(row.get("requests")), *_spreads(row, sides, "step_us"), longer]


def _spreads(row: Row, sides: Sides, *path: str) -> list[str]:
    return [text_of(dig(row, side, *path, it)) for side in sides for it in ("median", "p90")]


def _both(row: Row, *path: str) -> str:
    return pair_text(*(dig(row, side, *path) for side in BOTH))


def _sides(row: Row, *path: str) -> list[str]:
    return [text_of(dig(row, side, *path)) for side in BOTH]
