"""The cells of serving benchmarks in pairs: vLLM's scheduler and ours, in the same case."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from bench.header import NO_GPU
from bench.report.values import as_number, dig, median, numbers

STOCK, OURS = "stock", "sparksched"
LABELS = {STOCK: "vLLM", OURS: "sparksched"}
ALL = "all"
ASYNC, SYNC = "async", "sync"
ASYNCLLM, HTTP = "asyncllm", "http"
PYTHON, RUST = "python", "rust"
VLLM_BENCH = "vllm_bench"
"""The kind of results of `bench.serving.vllm_bench`."""
PROFILE, PROFILES = "profile", "profiles"
"""The kind of results of `bench.serving.profile`, and its rows in them."""
DRIVERS = {ASYNCLLM: "AsyncLLM", HTTP: "HTTP"}
MODELS = ("Qwen3-0.6B", "Qwen2-1.5B", "Qwen3-Next-quarter", "gpt-oss-20b", "gpt-oss-120b")
LEAST_MERGED_SHARE = 0.01
"""Of the tokens: fewer that came with another one are no matter."""
BUSY_PERCENT = 90.0
"""Of a processor: a thread that takes more than this is the limit."""
LEAST_WAIT_SHARE = 0.05
"""Of a step: an engine that waits for less than this isn't waiting for the GPU."""

Row = dict[str, Any]


@dataclass(frozen=True, order=True)
class Case:
    """What the two sides of a pair have in common."""

    model: str
    """With its layout over several GPUs, as in `gpt-oss-120b, TP 2`."""
    mode: str
    cores: str
    driver: str
    concurrency: int
    front_end: str = PYTHON
    output_tokens: tuple[int, ...] = ()
    """Least and most of a stream; empty if that isn't known."""

    @property
    def layout(self) -> str:
        """How the model is spread over GPUs; empty: one GPU."""
        return self.model.partition(", ")[2]

    @property
    def speculates(self) -> bool:
        """Whether it is of `bench.serving.decode --model NAME+METHOD`."""
        return "+" in self.model

    @property
    def place(self) -> tuple[Any, ...]:
        """What to sort by: small models first, fewer streams first."""
        name = re.split(r"[+, ]", self.model)[0]
        size = MODELS.index(name) if name in MODELS else len(MODELS)
        how = (self.mode, self.driver, self.front_end, self.cores)
        return (size, self.model, *how, self.concurrency, self.output_tokens)

    @property
    def label(self) -> str:
        """Its name in a table of like cases."""
        tokens = " to ".join(f"{it:,}" for it in dict.fromkeys(self.output_tokens))
        rust = ", Rust front end" if self.front_end == RUST else ""
        return f"{self.model}{rust}, {self.concurrency:,}" + (f" x {tokens}" if tokens else "")


@dataclass
class Side:
    """What was measured with one scheduler."""

    cells: list[Row] = field(default_factory=list)

    def rounds(self) -> list[Row]:
        """Return all rounds."""
        return [entry for cell in self.cells for entry in rows_of(cell, "rounds")]

    def each(self, *path: str) -> list[float]:
        """Return a figure of each round that has it."""
        return numbers(dig(entry, *path) for entry in self.rounds())

    def figure(self, *path: str) -> float | None:
        """Return the median over the rounds."""
        return median(self.each(*path))

    def get(self, *path: str) -> float | None:
        """Return a figure of the cell, the first that has it."""
        return next(iter(numbers(dig(cell, *path) for cell in self.cells)), None)

    def gaps(self, percentile: str) -> list[float]:
        """Return the time between outputs of each round, in ms.

        Older results have that between tokens alone, which is the same where none came together.
        """
        found = [dig(it, "output_gap_ms") or dig(it, "itl_ms") for it in self.rounds()]
        return numbers(dig(it, percentile) for it in found)

    @property
    def tokens_per_output(self) -> float | None:
        """How many tokens an output has."""
        share = self.figure("merged_share")
        return None if share is None else 1 / (1 - share)

    @property
    def has_merged(self) -> bool:
        """Whether outputs had several tokens so often that it is to be told."""
        return (self.figure("merged_share") or 0.0) >= LEAST_MERGED_SHARE

    @property
    def limit(self) -> str:
        """Who limits: the KV cache, the API server's thread, the engine's host, or the GPU."""
        if any(self.each("preempted")):
            return "KV cache"
        if {cell.get("cores") for cell in self.cells} == {"1"}:
            return "processor"
        if (median(map(_busiest_thread, self.rounds())) or 0.0) > BUSY_PERCENT:
            return "API server"
        waited = self.get("phases", "wait_us", "p50")
        period = self.get("phases", "mean_period_us") or self.get("phases", "period_us", "p50")
        if waited is None or not period:
            return "not known"
        late = self.get("phases", "gap_estimate", "host_late_share") or 0.0
        return "engine" if late >= 0.5 or waited < LEAST_WAIT_SHARE * period else "GPU"


@dataclass
class Pair:
    """Both schedulers in the same case."""

    case: Case
    gpu: str = ""
    """What kind it was measured on."""
    stock: Side = field(default_factory=Side)
    ours: Side = field(default_factory=Side)
    runs: list["Pair"] = field(default_factory=list)
    """Each run of the case on this kind of GPU by itself, on whatever host."""

    def sides(self) -> tuple[Side, Side]:
        """Return vLLM's side and ours."""
        return self.stock, self.ours


def _busiest_thread(entry: Row) -> float | None:
    """Return the share of a processor of an API server's busiest thread, in percent."""
    process = dig(entry, "cpu", "share", "API server")
    threads = numbers((dig(process, "threads") or {}).values())
    return as_number(dig(process, "busiest")) or max(threads, default=None)


def pairs_of(results: Iterable[Row]) -> list[Pair]:
    """Return the cells of some results in pairs, in the order of tables; failures are left out."""
    found: dict[Case, Pair] = {}
    for result in results:
        gpu = gpu_of(result)
        for cell in rows_of(result, "cells"):
            case = _case(cell)
            if case is not None and "error" not in cell:
                pair = found.setdefault(case, Pair(case, gpu))
                (pair.stock if cell.get("scheduler") == STOCK else pair.ours).cells.append(cell)
    return sorted(found.values(), key=lambda it: it.case.place)


def _case(cell: Row) -> Case | None:
    """Return a cell's case, or None if it doesn't say it."""
    names = ("model", "mode", "cores", "driver")
    texts = {name: cell[name] for name in names if isinstance(cell.get(name), str)}
    count = cell.get("concurrency")
    if len(texts) < len(names) or not isinstance(count, int):
        return None
    tokens = tuple(numbers(cell.get("output_tokens") or ()))
    front_end = str(cell.get("front_end", PYTHON))
    counts = tuple(int(it) for it in tokens)
    return Case(**texts, concurrency=count, front_end=front_end, output_tokens=counts)


def gpu_of(result: Row) -> str:
    """Return the kind of GPU that a result is of; empty: none, or it isn't told."""
    kind = str(dig(result, "run", "gpu") or NO_GPU).partition(",")[0]
    return "" if kind == NO_GPU else kind


def visits_of(result: Row) -> Iterator[Row]:
    """Yield a result's parts by which time its servers were started: several, in some results."""
    cells = rows_of(result, "cells")
    for visit in sorted({as_number(cell.get("visit")) or 0.0 for cell in cells}):
        of_visit = [it for it in cells if (as_number(it.get("visit")) or 0.0) == visit]
        yield {"run": result.get("run"), "cells": of_visit}


def rows_of(result: Any, table: str) -> list[Row]:
    """Return the rows of a table, as far as they are some."""
    rows = dig(result, table)
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
