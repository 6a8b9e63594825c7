"""The part of the report about `bench.decode`: a table for each question."""

from collections.abc import Sequence
from typing import Any

from bench.reporting.cells import (
    COMPILED,
    HELD,
    OTHER_RUN,
    OURS,
    STOCK,
    Pair,
    Row,
    pairs_of,
    servers_of,
    steady,
)
from bench.reporting.decode_gpu import gpu
from bench.reporting.decode_host import cpu, messages, phases
from bench.reporting.decode_late import late
from bench.reporting.decode_rates import few_cores, latency, modes, workloads
from bench.reporting.decode_splits import splits
from bench.reporting.decode_streams import streams
from bench.reporting.document import Bullets, Paragraph, Part, Section, Table
from bench.reporting.findings import MISSING_TITLE, findings
from bench.reporting.values import MISSING, dig, text_of

MAX_REASON = 300
FOOTNOTES = {
    OTHER_RUN: (
        "from separate runs of the benchmark, one after the other, and perhaps on another machine "
        "of the same kind: see the table of runs."
    ),
    HELD: (
        "requests were held until all were there, so that this is mostly the time until the last "
        "one had come."
    ),
    COMPILED: "while requests waited, kernels were compiled in some of the rounds.",
}
ENGINE_COLUMNS = {
    "model_runner": "model runner",
    "max_concurrent_batches": "batches at once",
    "experts": "experts",
}
"""What newer results say of an engine, and its heading."""


def sections(results: Sequence[Row]) -> list[Section]:
    """Return the sections about these results; tables of what was not asked for are left out."""
    pairs = pairs_of(results)
    steady_pairs = steady(pairs)
    found = [
        Section("Serving: what it comes to", [Bullets(findings(results))]),
        Section("Serving: tokens a second and latency", latency(steady_pairs)),
        Section("Serving: the host's time in a step", phases(steady_pairs)),
        Section("Serving: the GPU", gpu(results, pairs)),
        Section("Serving: CPU time", cpu(results, pairs)),
        Section(
            "Serving: messages from engine to API server",
            messages(steady_pairs) + late(steady_pairs),
        ),
        Section("Serving: asynchronous and synchronous scheduling", modes(steady_pairs)),
        Section("Serving: mixed lengths and shared prefixes", workloads(pairs)),
        Section("Serving: few processors", few_cores(pairs)),
        Section("Serving: how requests were split", splits(pairs)),
        Section("Serving: the same tokens?", streams(results)),
        Section("Serving: servers", _servers(results)),
        Section(MISSING_TITLE, _failures(pairs)),
    ]
    for section in found:
        section.parts += _footnotes(section)
    return [section for section in found if section.parts]


def _footnotes(section: Section) -> list[Part]:
    tables = [part for part in section.parts if isinstance(part, Table)]
    cells = [cell for table in tables for row in table.rows for cell in row]
    return [
        Paragraph(f"{mark} {meaning}")
        for mark, meaning in FOOTNOTES.items()
        if any(mark in cell for cell in cells)
    ]


# ---- servers, failures ----


def _servers(results: Sequence[Row]) -> list[Part]:
    found = [
        (f"{model}, {mode}, {scheduler}", sides[scheduler])
        for (model, mode), sides in servers_of(results, "servers").items()
        for scheduler in (STOCK, OURS)
        if scheduler in sides
    ]
    if not found:
        return []
    known = [name for name in ENGINE_COLUMNS if any(_says(row, name) for _, row in found)]
    columns = (
        "scheduler class",
        "transport",
        "executor",
        *(ENGINE_COLUMNS[name] for name in known),
        "CUDA graphs",
        "tokens a batch",
        "start",
        "weights",
    )
    return [Table(("server", *columns), [_server(*it, known) for it in found])]


def _says(row: Row, name: str) -> bool:
    return dig(row, "engine", name) is not None


def _server(label: str, row: Row, known: Sequence[str]) -> list[str]:
    return [
        label,
        _last_word(dig(row, "engine", "scheduler")),
        _last_word(dig(row, "transport")),
        _last_word(dig(row, "engine", "executor")),
        *(_word(dig(row, "engine", name)) for name in known),
        _last_word(dig(row, "engine", "cudagraph_mode")),
        text_of(dig(row, "engine", "max_num_batched_tokens")),
        text_of(dig(row, "start_s"), " s"),
        "random" if dig(row, "has_dummy_weights") else "from files",
    ]


def _word(value: Any) -> str:
    """Return a text or a whole number as it is."""
    return str(value) if isinstance(value, str | int) else MISSING


def _last_word(name: Any) -> str:
    """Return a class's name without its module's."""
    return name.rpartition(".")[2] if isinstance(name, str) else MISSING


def _failures(pairs: Sequence[Pair]) -> list[Part]:
    lines = []
    for pair in pairs:
        for scheduler, side in pair.sides():
            if side.error:
                lines.append(
                    f"{pair.key.workload}: {pair.label}, {scheduler}: {_brief(side.error)}"
                )
    return [Bullets(lines)] if lines else []


def _brief(error: str) -> str:
    """Return the first and the last line of an error: what has failed, and why."""
    lines = [line.strip() for line in error.strip().splitlines() if line.strip()]
    if not lines:
        return MISSING
    return " ".join(dict.fromkeys((lines[0], lines[-1])))[:MAX_REASON]
