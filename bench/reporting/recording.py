"""The part of the report about `bench.recording`: what a recorder costs."""

from typing import Any

from bench.reporting.cells import OURS, STOCK, Row, rows_of
from bench.reporting.document import Paragraph, Section, Table
from bench.reporting.values import MISSING, dig, pair_text, text_of

COLUMNS = (
    "requests",
    "recording",
    "schedule",
    "update",
    "p99 of both",
    "processor",
    "bytes a step",
)


def recording(result: Row) -> list[Section]:
    """Return what steps cost with and without a recorder."""
    cases: dict[tuple[str, str], dict[Any, Row]] = {}
    for row in rows_of(result, "recording"):
        kind = row.get("kind")
        case = (text_of(row.get("requests")), kind if isinstance(kind, str) else MISSING)
        cases.setdefault(case, {})[str(row.get("side"))] = row
    if not cases:
        return []
    rows = [
        [
            *case,
            _both(sides, "schedule_us", "median"),
            _both(sides, "update_us", "median"),
            *(_both(sides, it) for it in ("step_p99_us", "processor_us", "bytes_a_step")),
        ]
        for case, sides in cases.items()
    ]
    text = (
        "Steps of generating requests with and without a recorder, vLLM → sparksched: medians of "
        "`schedule()` and `update_from_output()`, the 99th percentile of both together, and the "
        "processor time of all threads a step, all in µs; and what the recording grows by. A "
        "pause follows each step in the place of the GPU's work: then the recorder writes."
    )
    return [Section("A recording", [Paragraph(text), Table(COLUMNS, rows)])]


def _both(sides: dict[Any, Row], *path: str) -> str:
    return pair_text(*(dig(sides.get(side), *path) for side in (STOCK, OURS)))
