"""The tables of README.md and docs/results.md about real servers: their rows, and what cells say.

Those about benchmarks that start no server are in `page_hosts.py`.

A table's heading tells which one of its page it is. Those of README.md are selections: the page
says which rows it has, and in which order.
"""

import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from bench.reporting.cells import (
    ALL,
    ASYNC,
    ASYNCLLM,
    DECODE,
    HTTP,
    LABELS,
    SYNC,
    Pair,
    Row,
    Side,
    counted,
    marked,
    pairs_of,
    rows_of,
)
from bench.reporting.decode_rates import LEAST_MERGED_SHARE, tokens_per_output, ttft_text
from bench.reporting.engine import ROLES, engine_rate
from bench.reporting.values import (
    ARROW,
    MISSING,
    as_number,
    count_text,
    dig,
    joined,
    listed,
    numbers,
    pair_text,
    text_of,
)
from bench.serving.store import CELL_KEYS

README, RESULTS = "README.md", "docs/results.md"
AGAIN = "again"
"""The folder in bench/results of what was measured again, to show what runs differ by."""
CAUGHT_UP = r"\*"
"""Marks latencies of streams that get several tokens at once."""
MODELS = ("Qwen2-1.5B", "gpt-oss-20b", "gpt-oss-120b")
LAYOUTS = ("", "TP", "PP", "DP")
WAYS = ((ASYNC, ASYNCLLM), (SYNC, ASYNCLLM), (ASYNC, HTTP), (SYNC, HTTP))
"""In the order of rows, and so are models and layouts."""
DRIVERS = {ASYNCLLM: "AsyncLLM", HTTP: "HTTP"}
WORKLOADS = {"mixed": "mixed", "prefix": "shared"}
PERCENTILES = ("p50", "p99")
CALLS = ("schedule_us", "update_us")
OF_ONE_RUN = ("--json", "--work-dir", "--minutes")
"""Options that don't change what is measured."""

Results = dict[str, Row]
"""By the name of their file."""
Rows = Iterator[list[str]]
"""Cells of each row; the first is its name."""


@dataclass(frozen=True)
class PageTable:
    """A table of a page."""

    page: str
    heading: str
    rows: Callable[[Results], Rows]
    is_selection: bool = False
    folder: str = ""
    """In bench/results: where its results are."""


# ---- one GPU ----


def servers(results: Results) -> Rows:
    """Yield streams of equal lengths on all processors."""
    for pair in _sorted(results, _is_on_one_gpu):
        yield [
            _name(pair, pair.key.size),
            _rates(pair),
            _rates_by_steps(pair),
            *_latencies(pair),
            _scheduling(pair),
            *_costs(pair),
            _rounds(pair),
        ]


def servers_in_short(results: Results) -> Rows:
    """Yield the same for users, by streams alone, and with times as they see them."""
    for pair in _sorted(results, _is_on_one_gpu):
        name = _name(pair, f"{pair.key.concurrency:,}")
        times = _marked(pair, _gaps(pair)) if _is_merged(pair) else _latencies(pair)
        yield [name, _rates(pair), *times, *_costs(pair)]


def merged_outputs(results: Results) -> Rows:
    """Yield where streams get several tokens at once, and what that means for them."""
    for are_told in (_is_on_one_gpu, _is_confined):
        for pair in filter(_is_merged, _sorted(results, are_told)):
            an_output = joined(*map(tokens_per_output, pair.figures("merged_share")))
            name = _name(pair, _size_and_cores(pair))
            yield [name, an_output, *_gaps(pair), *_times_to_first(pair)]


def few_processors(results: Results) -> Rows:
    """Yield servers that are confined to a number of processors."""
    for pair in _sorted(results, _is_confined):
        times = (*_latencies(pair), *_times_to_first(pair))
        yield [
            _name(pair, _size_and_cores(pair)),
            _rates(pair),
            _rates_by_steps(pair),
            *times,
            *_costs(pair),
            _rounds(pair),
        ]


def workloads(results: Results) -> Rows:
    """Yield requests of mixed lengths, and such that share a prefix."""
    for pair in _sorted(results, _is_of_mixed_lengths):
        name = marked(WORKLOADS[pair.key.workload], pair.is_of_separate_runs)
        times = (*_latencies(pair), _times_to_first(pair)[0])
        yield [name, _rates(pair), *times, _rounds(pair)]


def compilations(results: Results) -> Rows:
    """Yield times to the first token by round, of models whose kernels are compiled at times."""
    pairs = _sorted(results, _tells_of_kernels)
    compiling = {it.key.model for it in pairs if any(side.has_compiled for _, side in it.sides())}
    for pair in pairs:
        if pair.key.model in compiling:
            name = _name(pair, _size_and_cores(pair))
            yield [name, *(", ".join(_by_round(side)) for _, side in pair.sides())]


def _by_round(side: Side) -> Iterator[str]:
    """Yield the latest first token of each round in ms, and how many of them were compiling."""
    for entry in side.rounds():
        compiling = text_of(dig(entry, "compiled", "seconds"), "", 1_000)
        after = f" ({compiling})" if as_number(dig(entry, "compiled", "count")) else ""
        yield f"{text_of(dig(entry, 'ttft_ms', 'p99'))}{after}"


# ---- measured again ----


def servers_again(results: Results) -> Rows:
    """Yield servers that were started in this order and that, with what tells them apart."""
    found = [it for result in results.values() for it in _by_order(result)]
    for pair, first in sorted(found, key=lambda it: (_place(it[0]), it[1])):
        yield [
            f"{_name(pair, pair.key.size)}; {first} first",
            joined(*(_rates_by_round(side) for _, side in pair.sides())),
            _rates_by_steps(pair),
            *_latencies(pair),
            _scheduling(pair),
            pair_text(*pair.both("phases", "execute_us", "p50")),
            *_costs(pair),
        ]


def _by_order(result: Row) -> Iterator[tuple[Pair, str]]:
    """Yield a result's pairs apart by visits, and whose server was the first of the visit's."""
    first: dict[tuple[Any, ...], str] = {}
    for server in rows_of(result, "servers"):
        first.setdefault(_visit_of(server), LABELS.get(server.get("scheduler"), MISSING))
    cells = rows_of(result, "cells")
    for visit in dict.fromkeys(map(_visit_of, cells)):
        of_visit = [cell for cell in cells if _visit_of(cell) == visit]
        for pair in pairs_of([result | {"cells": of_visit}]):
            yield pair, first.get(visit, MISSING)


def _visit_of(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(it) for it in ("model", "mode", "visit"))


def _rates_by_round(side: Side) -> str:
    """Return the median, and the least and most, with enough digits for small differences."""
    rates = side.each("tokens_per_s")
    if not rates:
        return text_of(side.figure("tokens_per_s"))
    middle, least, most = map(_rate, (side.figure("tokens_per_s"), min(rates), max(rates)))
    return f"{middle} ({least} to {most})"


def _rate(number: float) -> str:
    return f"{number:,.{1 if number < 1_000 else 0}f}"


# ---- several GPUs ----


def layouts(results: Results) -> Rows:
    """Yield models that are spread over GPUs."""
    for pair in _sorted(results, _is_spread):
        name = marked(f"{pair.key.model}, {pair.key.size}", pair.is_of_separate_runs)
        costs = _costs_without_waiting(pair)
        yield [
            name,
            _rates(pair),
            *_latencies(pair),
            _scheduling(pair),
            *costs,
            _rounds(pair),
        ]


def layouts_in_short(results: Results) -> Rows:
    """Yield the same for users, by streams alone."""
    for pair in _sorted(results, _is_spread):
        name = f"{pair.key.model}, {pair.key.concurrency:,}"
        _, slowest = _latencies(pair)
        costs = _costs_without_waiting(pair)
        yield [marked(name, pair.is_of_separate_runs), _rates(pair), slowest, *costs]


# ---- where it all comes from ----


def sources(results: Results) -> Rows:
    """Yield what each file has, of which commits and days, and the options it was measured with."""
    for name, result in results.items():
        if not (runs := rows_of(result, "runs")):
            continue  # of a benchmark that starts no server
        commits = (str(run.get("commit", MISSING)) for run in runs)
        days = (str(run.get("date", MISSING)).partition(" ")[0] for run in runs)
        options = (f"`{_lasting(str(run.get('options', MISSING)))}`" for run in runs)
        yield [f"`{name}`", _contents(result), *map(_each_once, (commits, days, options))]


def _contents(result: Row) -> str:
    """Return how many streams a file has, by driver; what else tells them apart, options say."""
    streams: dict[str, dict[str, None]] = {}
    for pair in pairs_of([result]):
        streams.setdefault(DRIVERS[pair.key.driver], {})[f"{pair.key.concurrency:,}"] = None
    return "; ".join(f"{driver}: {', '.join(counts)}" for driver, counts in streams.items())


def _each_once(words: Iterable[str]) -> str:
    return listed(list(dict.fromkeys(words)) or [MISSING])


def _lasting(options: str) -> str:
    """Return options without those that concern a single run."""
    words = iter(shlex.split(options))
    return shlex.join(_without_those_of_one_run(words))


def _without_those_of_one_run(words: Iterator[str]) -> Iterator[str]:
    for word in words:
        if word in OF_ONE_RUN:
            next(words, None)
        else:
            yield word


# ---- rows ----


def _is_on_one_gpu(pair: Pair) -> bool:
    return not pair.key.layout and (pair.key.workload, pair.key.cores) == (DECODE, ALL)


def _is_spread(pair: Pair) -> bool:
    key = pair.key
    as_said = (key.workload, key.cores, key.mode, key.driver) == (DECODE, ALL, ASYNC, ASYNCLLM)
    return bool(key.layout) and as_said


def _is_confined(pair: Pair) -> bool:
    key = pair.key
    as_said = (key.workload, key.driver) == (DECODE, HTTP)
    return not key.layout and key.cores != ALL and as_said


def _is_of_mixed_lengths(pair: Pair) -> bool:
    key = pair.key
    as_said = (key.model, key.cores, key.mode, key.driver) == ("gpt-oss-20b", ALL, ASYNC, ASYNCLLM)
    return key.workload in WORKLOADS and as_said


def _tells_of_kernels(pair: Pair) -> bool:
    key = pair.key
    rounds = [entry for _, side in pair.sides() for entry in side.rounds()]
    is_told = all(as_number(dig(it, "compiled", "count")) is not None for it in rounds)
    return not key.layout and key.workload == DECODE and key.concurrency > 1 and is_told


PLACES = {
    "": (_is_on_one_gpu, _is_spread, _is_confined, _is_of_mixed_lengths),
    AGAIN: (_is_on_one_gpu,),
}
"""Which of the tables of docs/results.md is to have a pair, as the text above them says.

By the folder of its result.
"""


def without_a_table(results: Results, folder: str) -> list[str]:
    """Return what was measured, but is in no table of results in this folder."""
    pairs = pairs_of(results.values())
    return [pair.label for pair in pairs if not any(belongs(pair) for belongs in PLACES[folder])]


def measured_twice(results: Results) -> list[str]:
    """Return what is in two files, which would make one figure of two measurements."""
    seen: dict[tuple[str, ...], str] = {}
    found = []
    for name, result in results.items():
        for cell in rows_of(result, "cells"):
            key = tuple(str(cell.get(it)) for it in (*CELL_KEYS, "output_tokens"))
            if "error" not in cell and seen.setdefault(key, name) != name:
                found.append(f"{', '.join(key)} in {seen[key]} and {name}")
    return found


def _sorted(results: Results, is_chosen: Callable[[Pair], bool]) -> list[Pair]:
    return sorted(filter(is_chosen, pairs_of(results.values())), key=_place)


def _place(pair: Pair) -> tuple[Any, ...]:
    """Return what to sort by: small models first, `AsyncLLM` before HTTP, fewer streams first."""
    key = pair.key
    name = key.model.partition(", ")[0]
    model = MODELS.index(name) if name in MODELS else len(MODELS)
    cores = float("inf") if key.cores == ALL else float(key.cores)
    layout = LAYOUTS.index(key.layout[:2])
    return (model, layout, key.model, WAYS.index((key.mode, key.driver)), cores, key.concurrency)


def _name(pair: Pair, size: str) -> str:
    key = pair.key
    mode = "" if key.mode == ASYNC else f", {key.mode}"
    name = f"{key.model}{mode}, {DRIVERS[key.driver]}, {size}"
    return marked(name, pair.is_of_separate_runs)


def _size_and_cores(pair: Pair) -> str:
    cores = "" if pair.key.cores == ALL else f", {counted(pair.key.cores, 'processor')}"
    return f"{pair.key.size}{cores}"


# ---- cells ----


def _rates(pair: Pair) -> str:
    return joined(*map(count_text, pair.figures("tokens_per_s")))


def _rates_by_steps(pair: Pair) -> str:
    """Return streams by what a step takes in the round in which the engine is timed."""
    return pair_text(*(engine_rate(side, pair.key.concurrency) for _, side in pair.sides()))


def _rounds(pair: Pair) -> str:
    counts = {str(len(side.rounds())): None for _, side in pair.sides()}
    return ARROW.join(counts)


def _latencies(pair: Pair) -> list[str]:
    return _marked(pair, [pair_text(*pair.figures("itl_ms", it)) for it in PERCENTILES])


def _gaps(pair: Pair) -> list[str]:
    return [pair_text(*pair.figures("output_gap_ms", it)) for it in PERCENTILES]


def _marked(pair: Pair, texts: list[str]) -> list[str]:
    return [f"{it} {CAUGHT_UP}" for it in texts] if _is_merged(pair) else texts


def _is_merged(pair: Pair) -> bool:
    """Whether streams got several tokens at once, so often that latencies are told differently."""
    return max(numbers(pair.figures("merged_share")), default=0.0) >= LEAST_MERGED_SHARE


def _times_to_first(pair: Pair) -> list[str]:
    both = (map(text_of, pair.figures("ttft_ms", it)) for it in PERCENTILES)
    return [ttft_text(pair, *texts) for texts in both]


def _scheduling(pair: Pair) -> str:
    """Return the median times of both of the scheduler's calls, added up."""
    return pair_text(
        *(_sum(*(side.get("phases", it, "p50") for it in CALLS)) for _, side in pair.sides())
    )


def _sum(*values: Any) -> Any:
    """Return the sum, or the first that is no number."""
    unknown = [it for it in values if as_number(it) is None]
    return unknown[0] if unknown else sum(values)


def _costs(pair: Pair) -> list[str]:
    return [_cost(*pair.figures("cpu", "us_per_token", it)) for it in ROLES]


def _costs_without_waiting(pair: Pair) -> list[str]:
    _, api_server = _costs(pair)
    return [_cost(*pair.both("engine_cpu", "without_waiting_us_per_token")), api_server]


def _cost(stock: Any, ours: Any) -> str:
    return joined(_tenths(stock), _tenths(ours))


def _tenths(value: Any) -> str:
    """Return three significant digits, but no more than one behind the point."""
    number = as_number(value)
    return text_of(value) if number is None or number >= 10 else f"{number:.1f}"


TABLES = (
    PageTable(
        RESULTS,
        "| model, driver, streams x tokens | tokens/s | by the engine's steps | ITL p50, ms | "
        "p99 | schedule + update, µs | CPU a token, µs: engine | API server | rounds |",
        servers,
    ),
    PageTable(
        RESULTS,
        "| streams x tokens | tokens an output | between outputs p50, ms | p99 | TTFT p50, ms | "
        "p99 |",
        merged_outputs,
    ),
    PageTable(
        RESULTS,
        "| model, layout, streams x tokens | tokens/s | ITL p50, ms | p99 | "
        "schedule + update, µs | CPU a token, µs: engine | API server | rounds |",
        layouts,
    ),
    PageTable(
        RESULTS,
        "| model, driver, streams x tokens, processors | tokens/s | by the engine's steps | "
        "ITL p50, ms | p99 | TTFT p50, ms | p99 | CPU a token, µs: engine | API server | rounds |",
        few_processors,
    ),
    PageTable(
        RESULTS,
        "| prompts | tokens/s | ITL p50, ms | p99 | TTFT p50, ms | rounds |",
        workloads,
    ),
    PageTable(
        RESULTS,
        "| model, driver, streams x tokens | vLLM: TTFT p99 by round, ms | sparksched's |",
        compilations,
    ),
    PageTable(
        RESULTS,
        "| model, driver, streams x tokens; order | tokens/s (least to most) | "
        "by the engine's steps | ITL p50, ms | p99 | schedule + update, µs | execute, µs | "
        "CPU a token, µs: engine | API server |",
        servers_again,
        folder=AGAIN,
    ),
    PageTable(RESULTS, "| file | streams | commit | day | options |", sources),
    PageTable(
        RESULTS, "| file in `again` | streams | commit | day | options |", sources, folder=AGAIN
    ),
    PageTable(
        README,
        "| model, driver, streams | tokens/s | ITL p50, ms | p99 | engine | API server |",
        servers_in_short,
        is_selection=True,
    ),
    PageTable(
        README,
        "| model, layout, streams | tokens/s | ITL p99 | engine | API server |",
        layouts_in_short,
        is_selection=True,
    ),
)
