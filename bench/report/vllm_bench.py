"""Rows of the tables about `vllm bench`: on servers, for embeddings, and without a server."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.report.pairs import (
    ALL,
    MODELS,
    PYTHON,
    RUST,
    STOCK,
    VLLM_BENCH,
    Row,
    Side,
    gpu_of,
    rows_of,
)
from bench.report.values import MISSING, count_text, dig, joined, pair_text, range_text

Results = Mapping[str, Row]

ROLES = ("engine", "API server")
SERVE, THROUGHPUT, LATENCY = "serve", "throughput", "latency"
EMBED = "+embed"
NEAR_THE_LIMIT = "Many users, small model"
EMBEDDINGS = "Embeddings"
USUAL = "1024/128"
"""Tokens in and out of most cases."""
NEAR_CASE: Row = {
    "model": "Qwen3-0.6B",
    "lengths": USUAL,
    "front_end": RUST,
    "client": RUST,
    "cores": ALL,
    "rate_percent": 95,
}
EMBEDDING_CASE: Row = {
    "model": f"Qwen3-0.6B{EMBED}",
    "lengths": "512/1",
    "front_end": PYTHON,
    "client": PYTHON,
    "cores": ALL,
    "concurrency": 256,
}
GAINS: tuple[tuple[str, Row, str, tuple[str, ...]], ...] = (
    (NEAR_THE_LIMIT, NEAR_CASE, "ms to first token, p99", ("ttft_ms", "p99")),
    (EMBEDDINGS, EMBEDDING_CASE, "requests/s", ("requests_per_s",)),
)
"""What the README has rows of: a situation, its case, what changes, and the figure of that."""
FEW: Row = {"lengths": USUAL, "concurrency": 256}
"""What is compared on few processors."""
OTHER_RELEASE = "(vLLM "
"""In the name of a model, as `bench.report.pages` writes it."""
ABOUT_GPU = re.compile(r"^NVIDIA | \d+GB.*$")
"""What needn't be told of one: `NVIDIA H100 80GB HBM3` is an H100."""


@dataclass
class Compared:
    """One case with vLLM's scheduler and ours."""

    case: Row
    gpu: str = ""
    """What kind it was measured on; empty: none, or not told."""
    stock: Side = field(default_factory=Side)
    ours: Side = field(default_factory=Side)

    def each(self, text: Callable[[Any], str], *path: str) -> str:
        """Return a figure of both sides in one cell."""
        return joined(*(text(side.figure(*path)) for side in (self.stock, self.ours)))

    def pair(self, *path: str) -> str:
        """Return a figure of both sides in one cell, with three digits."""
        return pair_text(*(side.figure(*path) for side in (self.stock, self.ours)))

    @property
    def held_up_by(self) -> str:
        """What else took time on each side: the times are then not the server's alone."""
        # A front end in Rust doesn't tell whether kernels were compiled.
        nothing = "nothing known" if self.case.get("front_end") == RUST else "nothing"
        return joined(*(_held_up_by(side, nothing) for side in (self.stock, self.ours)))

    @property
    def name(self) -> str:
        """Return what to call it in a table: the case, and the GPU."""
        return _listed(self.label, self.short_gpu)

    @property
    def short_gpu(self) -> str:
        """What tells the GPU from others, for a table."""
        return ABOUT_GPU.sub("", self.gpu)

    @property
    def label(self) -> str:
        """Return what to call the case, on whatever GPU."""
        case = self.case
        rust = ", Rust front end" if case.get("front_end") == RUST else ""
        client = ", Rust client" if case.get("client") == RUST else ""
        count = case.get("cores")
        cores = "" if count == ALL else f", {count} processor{'' if count == '1' else 's'}"
        tokens_in, _, tokens_out = str(case.get("lengths")).partition("/")
        tokens = " + ".join(count_text(int(it)) for it in tokens_in.split("+"))
        if not self.is_embedding:
            tokens += f" in, {count_text(int(tokens_out))} out"
        return f"{case.get('model')}{rust}{client}{cores}, {tokens}{self._load}"

    @property
    def _load(self) -> str:
        percent, count = self.case.get("rate_percent"), self.case.get("concurrency")
        if percent is not None:
            return f", {percent} % of vLLM's rate"
        if count is None:
            return ""
        kind = "a batch of " if self.case.get("command") == LATENCY else ""
        return f", {kind}{count_text(count)}{'' if kind else ' at once'}"

    @property
    def on_all(self) -> Row:
        """The same case on all processors."""
        return self.case | {"cores": ALL}

    @property
    def is_embedding(self) -> bool:
        """Whether it is about embeddings."""
        return EMBED in str(self.case.get("model"))

    @property
    def place(self) -> tuple[Any, ...]:
        """What to sort by: small models first, then small loads, then as it was measured."""
        model = str(self.case.get("model"))
        known = [index for index, name in enumerate(MODELS) if model.startswith(name)]
        load = (self.case.get(name) or 0 for name in ("rate_percent", "concurrency"))
        return (min(known, default=len(MODELS)), model, *load, self.gpu)


def _held_up_by(side: Side, nothing: str) -> str:
    limits = [dig(entry, "client", "is_limit") for entry in side.rounds()]
    compiled = [dig(entry, "has_compiled") for entry in side.rounds()]
    preempted = [bool(dig(entry, "preempted")) for entry in side.rounds()]
    told = {"client": limits, "compiler": compiled, "KV cache": preempted}
    names = [name for name, values in told.items() if True in values]
    if not names and not any(isinstance(it, bool) for it in limits):
        return MISSING
    return ", ".join(names) or nothing


def compared(results: Results, *commands: str) -> list[Compared]:
    """Return the cases of some commands that were measured with both schedulers, or one."""
    keys = ("model", "mode", "front_end", "command", "lengths", "cores", "client")
    found: dict[tuple[Any, ...], Compared] = {}
    for result in results.values():
        if result.get("kind") != VLLM_BENCH:
            continue
        gpu = gpu_of(result)
        for cell in rows_of(result, "cells"):
            if cell.get("command") in commands and "error" not in cell:
                names = (*keys, "concurrency", "rate_percent")
                case = {name: cell.get(name) for name in names}
                both = found.setdefault((gpu, *case.values()), Compared(case, gpu))
                (both.stock if cell.get("scheduler") == STOCK else both.ours).cells.append(cell)
    return sorted(found.values(), key=lambda it: it.place)


def served(results: Results) -> Iterator[list[str]]:
    """Yield all cases of `vllm bench serve` that bring tokens."""
    yield from map(_row, _served(results))


def on_few_processors(results: Results) -> Iterator[list[str]]:
    """Yield those measured on few processors, each beside the same on all, of the same GPU."""
    found = [it for it in _served(results) if FEW.items() <= it.case.items()]
    confined = [(it.gpu, it.on_all) for it in found if it.case["cores"] != ALL]
    yield from (_row(it) for it in found if (it.gpu, it.on_all) in confined)


def long_prompts(results: Results) -> Iterator[list[str]]:
    """Yield those with other prompts than the usual ones; they may share a part of them."""
    yield from (_row(it) for it in _served(results) if it.case["lengths"] != USUAL)


def other_releases(results: Results) -> Iterator[list[str]]:
    """Yield those of another release of vLLM than the usual one."""
    yield from (_row(it) for it in _served(results) if OTHER_RELEASE in str(it.case["model"]))


def _served(results: Results) -> list[Compared]:
    return [it for it in compared(results, SERVE) if not it.is_embedding]


def _row(it: Compared) -> list[str]:
    return [
        it.name,
        it.pair("requests_per_s"),
        *(it.pair("ttft_ms", at) for at in ("p50", "p99")),
        it.pair("tpot_ms", "p50"),
        it.pair("itl_ms", "p99"),
        it.pair("tokens_per_output"),
        *(it.pair("cpu", "us_per_token", role) for role in ROLES),
        it.held_up_by,
    ]


def embeddings(results: Results) -> Iterator[list[str]]:
    """Yield all cases of `vllm bench serve` that bring embeddings."""
    for it in compared(results, SERVE):
        if it.is_embedding:
            yield [
                it.name,
                it.pair("requests_per_s"),
                *(it.pair("e2el_ms", at) for at in ("p50", "p99")),
                *(it.pair("cpu", "us_per_request", role) for role in ROLES),
                it.held_up_by,
            ]


def throughput(results: Results) -> Iterator[list[str]]:
    """Yield all cases of `vllm bench throughput`."""
    for it in compared(results, THROUGHPUT):
        rates = it.each(count_text, "all_tokens_per_s")
        yield [it.name, it.pair("requests_per_s"), rates]


def latency(results: Results) -> Iterator[list[str]]:
    """Yield all cases of `vllm bench latency`."""
    for it in compared(results, LATENCY):
        yield [it.name, *(it.pair("batch_ms", at) for at in ("mean", "p50", "p99"))]


def gain(results: Results) -> Iterator[list[str]]:
    """Yield a figure of a small model whose load is near vLLM's limit, and one of embeddings.

    Each has its range, if several kinds of GPU were measured.
    """
    measured = compared(results, SERVE)
    for situation, case, change, path in GAINS:
        found = [it for it in measured if case.items() <= it.case.items()]
        if found:
            figures = ((it.stock.figure(*path), it.ours.figure(*path)) for it in found)
            changed = joined(*map(range_text, zip(*figures, strict=True)))
            gpus = " and ".join(it.short_gpu for it in found if it.gpu)
            yield [situation, _listed(found[0].label, gpus), change, changed]


def _listed(*parts: str) -> str:
    return ", ".join(filter(None, parts))
