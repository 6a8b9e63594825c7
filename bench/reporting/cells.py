"""The cells of `bench.decode`'s results, each with vLLM's scheduler and with ours beside it."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.reporting.values import dig, median, numbers

STOCK, OURS = "stock", "sparksched"
LABELS = {STOCK: "vLLM", OURS: "sparksched"}
ALL = "all"
DECODE = "decode"
ASYNC, SYNC = "async", "sync"
ASYNCLLM, HTTP = "asyncllm", "http"

CASE = "model, mode, driver, streams x tokens"
"""What the label of a pair says."""
OTHER_RUN = "†"
"""Marks what is from separate runs of the benchmark."""
HELD = "‡"
"""Marks times to the first token of requests that were held until all were there."""
COMPILED = "¶"
"""Marks times to the first token where kernels were compiled in some round."""
LAYOUT = re.compile(r"(, (TP|PP|DP) \d+)+$")
"""Ends the name of a model that is spread over several GPUs."""
SOURCE = "source"

Row = dict[str, Any]
Source = tuple[int, int]
"""Which result and which of its runs. Others may be from another machine or commit."""


@dataclass(frozen=True, order=True)
class PairKey:
    """What two cells have in common."""

    model: str
    mode: str
    cores: str
    workload: str
    driver: str
    concurrency: int
    output_tokens: tuple[int, ...] = ()
    """Least and most of a stream; empty if that isn't known."""

    @property
    def layout(self) -> str:
        """How the model is spread over several GPUs, as its name says; empty: one GPU."""
        found = LAYOUT.search(self.model)
        return found[0].removeprefix(", ") if found else ""

    @property
    def tokens(self) -> str:
        """How many tokens a stream brings."""
        return " to ".join(f"{it:,}" for it in dict.fromkeys(self.output_tokens))

    @property
    def size(self) -> str:
        """How many streams, and of how many tokens."""
        return f"{self.concurrency:,}" + (f" x {self.tokens}" if self.tokens else "")

    @property
    def label(self) -> str:
        """The row's name in tables."""
        cores = "" if self.cores == ALL else f", {counted(self.cores, 'core')}"
        return f"{self.model}, {self.mode}{cores}, {self.driver}, {self.size}"


def counted(number: int | str, noun: str) -> str:
    """Return a number and what it counts."""
    text = f"{number:,}" if isinstance(number, int) else number
    return f"{text} {noun}{'' if text == '1' else 's'}"


def by_processors(cores: str) -> float:
    """Return what to sort by, so that all processors come first, then many, then few."""
    return -float("inf") if cores == ALL else -float(cores) if cores.isdecimal() else 0.0


@dataclass
class Side:
    """What was measured with one scheduler, in all visits of its server."""

    cells: list[Row] = field(default_factory=list)
    sources: set[Source] = field(default_factory=set)

    def rounds(self) -> list[Row]:
        """Return all rounds."""
        return [entry for cell in self.cells for entry in rows_of(cell, "rounds")]

    def each(self, *path: str) -> list[float]:
        """Return a figure of each round that has it."""
        return numbers(dig(entry, *path) for entry in self.rounds())

    def figure(self, *path: str) -> Any:
        """Return the median over the rounds; or why there is none."""
        found = median(dig(entry, *path) for entry in self.rounds())
        if found is not None:
            return found
        reasons = [dig(entry, *path) for entry in self.rounds()]
        return next((it for it in reasons if isinstance(it, dict)), None)

    def get(self, *path: str) -> Any:
        """Return what lies at a path in a cell, the first that has it."""
        found = [dig(cell, *path) for cell in self.cells]
        return next((it for it in found if it is not None and not _is_missing(it)), _first(found))

    @property
    def is_held(self) -> bool:
        """Whether its rounds began once all requests were in the engines."""
        return self.get("is_held") is True

    @property
    def has_compiled(self) -> bool:
        """Whether kernels were compiled in any of its rounds."""
        return any(self.each("compiled", "count"))

    @property
    def error(self) -> str | None:
        """Why there are no rounds, if there are none."""
        if self.rounds():
            return None
        errors = [str(cell["error"]) for cell in self.cells if "error" in cell]
        return errors[0] if errors else "not measured"


def _is_missing(it: Any) -> bool:
    return isinstance(it, dict) and "missing" in it


def _first(found: list[Any]) -> Any:
    return next((it for it in found if it is not None), None)


@dataclass
class Pair:
    """Both schedulers in the same cell."""

    key: PairKey
    stock: Side = field(default_factory=Side)
    ours: Side = field(default_factory=Side)

    @property
    def label(self) -> str:
        """The row's name in tables, with a mark if the sides are from separate runs."""
        return marked(self.key.label, self.is_of_separate_runs)

    @property
    def is_of_separate_runs(self) -> bool:
        """Whether both sides are there, and not from the same runs."""
        sources = (self.stock.sources, self.ours.sources)
        return all(sources) and sources[0] != sources[1]

    def sides(self) -> tuple[tuple[str, Side], tuple[str, Side]]:
        """Return each scheduler's name and its side."""
        return (STOCK, self.stock), (OURS, self.ours)

    def figures(self, *path: str) -> tuple[Any, Any]:
        """Return the medians over rounds of both."""
        return self.stock.figure(*path), self.ours.figure(*path)

    def both(self, *path: str) -> tuple[Any, Any]:
        """Return what both cells have at a path."""
        return self.stock.get(*path), self.ours.get(*path)


def pairs_of(results: Iterable[Row]) -> list[Pair]:
    """Return all cells of some results in pairs, in order."""
    found: dict[PairKey, Pair] = {}
    for source, cell in with_sources(results, "cells"):
        key = _key(cell)
        if key is not None:
            pair = found.setdefault(key, Pair(key))
            side = pair.stock if cell.get("scheduler") == STOCK else pair.ours
            side.cells.append(cell)
            if "error" not in cell:
                side.sources.add(source)
    return [found[key] for key in sorted(found)]


def _key(cell: Row) -> PairKey | None:
    """Return a cell's key, or None if it is not all there."""
    names = ("model", "mode", "cores", "workload", "driver")
    if not has_texts(cell, *names, "scheduler") or not _has_count(cell):
        return None
    tokens = cell.get("output_tokens")
    is_known = isinstance(tokens, list | tuple) and all(isinstance(it, int) for it in tokens)
    common = {name: cell[name] for name in (*names, "concurrency")}
    return PairKey(**common, output_tokens=tuple(tokens) if is_known else ())


def with_sources(results: Iterable[Row], table: str) -> Iterator[tuple[Source, Row]]:
    """Yield the rows of a table of all results; a row that doesn't say its run has -1."""
    for number, result in enumerate(results):
        for row in rows_of(result, table):
            run = row.get("run")
            yield (number, run if isinstance(run, int) else -1), row


def marked(label: str, is_of_separate_runs: bool) -> str:
    """Return a row's name, with a mark if its two sides are from separate runs."""
    return f"{label} {OTHER_RUN}" if is_of_separate_runs else label


def by_size(pairs: Iterable[Pair], *names: str) -> dict[tuple[Any, ...], list[Pair]]:
    """Return pairs by some names of their keys, and by streams and tokens: only those compare."""
    found: dict[tuple[Any, ...], list[Pair]] = {}
    for pair in pairs:
        case = tuple(getattr(pair.key, name) for name in (*names, "concurrency", "output_tokens"))
        found.setdefault(case, []).append(pair)
    return found


def has_texts(row: Row, *names: str) -> bool:
    """Whether a row has a text by each of these names."""
    return all(isinstance(row.get(name), str) for name in names)


def _has_count(row: Row) -> bool:
    return isinstance(row.get("concurrency"), int)


def rows_of(result: Any, table: str) -> list[Row]:
    """Return the rows of a table, as far as they are some."""
    rows = dig(result, table)
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


@dataclass(frozen=True, order=True)
class TraceKey:
    """What the traces of two servers have in common."""

    model: str
    mode: str
    concurrency: int

    @property
    def label(self) -> str:
        """The row's name in tables."""
        return f"{self.model}, {self.mode}, {self.concurrency:,}"


def traces_of(results: Iterable[Row]) -> dict[TraceKey, dict[str, Row]]:
    """Return the traces by what they have in common and by scheduler."""
    found: dict[TraceKey, dict[str, Row]] = {}
    for source, row in with_sources(results, "traces"):
        if has_texts(row, "model", "mode", "scheduler") and _has_count(row):
            key = TraceKey(row["model"], row["mode"], row["concurrency"])
            found.setdefault(key, {})[row["scheduler"]] = row | {SOURCE: source}
    return dict(sorted(found.items()))


def servers_of(results: Iterable[Row], table: str) -> dict[tuple[str, str], dict[str, Row]]:
    """Return what was kept of each server, by model and mode and by scheduler."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for source, row in with_sources(results, table):
        if has_texts(row, "model", "mode", "scheduler"):
            key = (row["model"], row["mode"])
            found.setdefault(key, {}).setdefault(row["scheduler"], row | {SOURCE: source})
    return dict(sorted(found.items()))


def are_of_separate_runs(sides: dict[str, Row]) -> bool:
    """Whether what was kept of both schedulers is there, and not from the same run."""
    return {STOCK, OURS} <= sides.keys() and sides[STOCK][SOURCE] != sides[OURS][SOURCE]


def steady(pairs: Sequence[Pair]) -> list[Pair]:
    """Return those of the decode workload on all processors."""
    return [it for it in pairs if it.key.workload == DECODE and it.key.cores == ALL]
