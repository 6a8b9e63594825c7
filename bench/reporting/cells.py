"""The cells of `bench.decode`'s results, each with vLLM's scheduler and with ours beside it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.reporting.values import dig, median, numbers

STOCK, OURS = "stock", "sparksched"
ALL = "all"
DECODE = "decode"
ASYNCLLM, HTTP = "asyncllm", "http"

CASE = "model, mode, driver, streams"
"""What the label of a pair says."""

Row = dict[str, Any]


@dataclass(frozen=True, order=True)
class PairKey:
    """What two cells have in common."""

    model: str
    mode: str
    cores: str
    workload: str
    driver: str
    concurrency: int

    @property
    def label(self) -> str:
        """The row's name in tables."""
        cores = "" if self.cores == ALL else f", {counted(self.cores, 'core')}"
        return f"{self.model}, {self.mode}{cores}, {self.driver}, {self.concurrency:,}"


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
    sources: set[int] = field(default_factory=set)
    """Which results its cells are from. Others may be from another machine or commit."""

    def figures(self, *path: str) -> tuple[Any, Any]:
        """Return the medians over rounds of both."""
        return self.stock.figure(*path), self.ours.figure(*path)

    def both(self, *path: str) -> tuple[Any, Any]:
        """Return what both cells have at a path."""
        return self.stock.get(*path), self.ours.get(*path)


def pairs_of(results: Iterable[Row]) -> list[Pair]:
    """Return all cells of some results in pairs, in order."""
    found: dict[PairKey, Pair] = {}
    for source, result in enumerate(results):
        for cell in rows_of(result, "cells"):
            key = _key(cell)
            if key is not None:
                pair = found.setdefault(key, Pair(key))
                side = pair.stock if cell.get("scheduler") == STOCK else pair.ours
                side.cells.append(cell)
                pair.sources.add(source)
    return [found[key] for key in sorted(found)]


def _key(cell: Row) -> PairKey | None:
    """Return a cell's key, or None if it is not all there."""
    names = ("model", "mode", "cores", "workload", "driver")
    if not _has_texts(cell, *names, "scheduler") or not _has_count(cell):
        return None
    return PairKey(**{name: cell[name] for name in (*names, "concurrency")})


def _has_texts(row: Row, *names: str) -> bool:
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
    for result in results:
        for row in rows_of(result, "traces"):
            if _has_texts(row, "model", "mode", "scheduler") and _has_count(row):
                key = TraceKey(row["model"], row["mode"], row["concurrency"])
                found.setdefault(key, {})[row["scheduler"]] = row
    return dict(sorted(found.items()))


def servers_of(results: Iterable[Row], table: str) -> dict[tuple[str, str], dict[str, Row]]:
    """Return what was kept of each server, by model and mode and by scheduler."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for result in results:
        for row in rows_of(result, table):
            if _has_texts(row, "model", "mode", "scheduler"):
                key = (row["model"], row["mode"])
                found.setdefault(key, {}).setdefault(row["scheduler"], row)
    return dict(sorted(found.items()))


def steady(pairs: Sequence[Pair]) -> list[Pair]:
    """Return those of the decode workload on all processors."""
    return [it for it in pairs if it.key.workload == DECODE and it.key.cores == ALL]
