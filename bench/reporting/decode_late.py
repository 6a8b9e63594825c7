"""Tables about `bench.decode`: messages that took the API server much longer than most, and why."""

from collections.abc import Sequence

from bench.reporting.cells import CASE, Pair, Side
from bench.reporting.document import Paragraph, Part, Table
from bench.reporting.values import (
    MISSING,
    NONE,
    as_number,
    count_text,
    dig,
    joined,
    names_of,
    pair_text,
    text_of,
)

CALLS = ("decode", "process")
REASONS = ("collecting", "stopped", "working")
NOBODY = "none late"


def late(pairs: Sequence[Pair]) -> list[Part]:
    """Return who was late and why, where that was measured: older results don't have it."""
    measured = [it for it in pairs if any(map(_is_measured, (it.stock, it.ours)))]
    if not measured:
        return []
    return [
        Paragraph(
            "The slowest messages, in µs, vLLM → sparksched, in the round with the probe. Late is "
            "a call that took at least twice the median, of how many; vLLM's output processor gets "
            "up to 128 outputs in a call, with sparksched's rings all of a message. Of the time "
            "beyond the median that late calls took together: while any thread of the process "
            "collected garbage (collecting), while the thread didn't run for another reason "
            "(stopped), and the rest, in which it ran (working). A hypervisor's pauses are known "
            "as such only where it tells of them, and page faults that need no disk are work."
        ),
        Table(
            (CASE, "call", "p50", "p99", "longest", "late", *REASONS),
            [_late_row(pair, call) for pair in measured for call in CALLS],
        ),
        Paragraph(
            "Garbage collections in the API server's process meanwhile, by generation (2: full "
            "ones), and how many of them held up a message that was decoded or processed:"
        ),
        Table(
            (CASE, "generation", "collections", "during messages", "total, ms", "longest, ms"),
            [
                _collections_row(pair, generation)
                for pair in measured
                for generation in _generations(pair)
            ],
        ),
    ]


def _is_measured(side: Side) -> bool:
    return any(as_number(side.get("messages", "late", it, "count")) is not None for it in CALLS)


def _late_row(pair: Pair, call: str) -> list[str]:
    return [
        pair.label,
        call,
        *(pair_text(*pair.both("messages", f"{call}_us", it)) for it in ("p50", "p99", "max")),
        joined(*(_counts(side, call) for side in (pair.stock, pair.ours))),
        *(
            joined(*(_share(side, call, reason) for side in (pair.stock, pair.ours)))
            for reason in REASONS
        ),
    ]


def _counts(side: Side, call: str) -> str:
    count, calls = (
        as_number(side.get("messages", "late", call, name)) for name in ("count", "calls")
    )
    return MISSING if count is None or calls is None else f"{count:,.0f} of {calls:,.0f}"


def _share(side: Side, call: str, reason: str) -> str:
    if as_number(side.get("messages", "late", call, "count")) == 0:
        return NOBODY
    return text_of(side.get("messages", "late", call, f"{reason}_share"), " %", 100)


def _generations(pair: Pair) -> list[str]:
    found = [
        name
        for side in (pair.stock, pair.ours)
        for name in names_of(side.get("messages", "collections"))
    ]
    return sorted({it for it in found if it.isdigit()})


def _collections_row(pair: Pair, generation: str) -> list[str]:
    path = ("messages", "collections", generation)
    return [
        pair.label,
        generation,
        *(
            joined(*(count_text(side.get(*path, name)) for side in (pair.stock, pair.ours)))
            for name in ("count", "within_calls")
        ),
        pair_text(*pair.both(*path, "total_ms")),
        joined(*(_longest(side, path) for side in (pair.stock, pair.ours))),
    ]


def _longest(side: Side, path: tuple[str, ...]) -> str:
    if as_number(side.get(*path, "count")) == 0:
        return NONE
    return text_of(dig(side.get(*path), "longest_ms"))
