"""The tables of all results, each the answer to a question: for benchmarks and for pages."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from bench.report import mixed, vllm_bench
from bench.report.pairs import (
    ALL,
    ASYNC,
    ASYNCLLM,
    DRIVERS,
    HTTP,
    LABELS,
    OURS,
    PROFILES,
    RUST,
    STOCK,
    SYNC,
    Case,
    Pair,
    Row,
    Side,
    pairs_of,
    rows_of,
    visits_of,
)
from bench.report.values import (
    ARROW,
    MISSING,
    count_text,
    dig,
    joined,
    median,
    numbers,
    pair_text,
    range_text,
    text_of,
    times_text,
)

Results = dict[str, Row]
"""By the path of their file below bench/results."""
Rows = Iterator[list[str]]
"""Cells of each row; the first is its name."""

AGAIN = "again/"
FRONT_ENDS = "front_ends/"
"""What the names of results begin with that tell only what runs differ by."""
ROLES = ("engine", "API server")
SELECTIONS = (
    *("gain", "http", "asyncllm", "sync", "speculation", "two_processors"),
    *("vllm_bench_processors", "vllm_bench_long", "vllm_bench_releases"),
)
"""Tables of pages whose rows stand in `servers` or `vllm_bench`, too."""
OF_ONE_RUN = ("--json", "--work-dir", "--minutes")
"""Options that don't change what is measured, each with a value."""
FAILED = ("model", "scheduler", "front_end", "lengths", "cores", "concurrency", "rate_percent")
"""What tells a case that has failed."""
LEAST_VARIATION = 0.05
"""Of a figure: if runs differ by more, tables have its range."""
MANY_STREAMS = 64
JOINING_SIDES = ("vLLM", "sparksched")
PARTS = ("schedule_us", "update_us", "message_us")


@dataclass(frozen=True)
class Table:
    """A question, and what answers it."""

    name: str
    """What pages call it."""
    title: str
    columns: tuple[str, ...]
    rows: Callable[[Results], Rows]


def table_lines(table: Table, results: Results, pattern: str = "") -> list[str]:
    """Return a table as Markdown: the rows whose name has this pattern; nothing without rows."""
    rows = [row for row in table.rows(results) if re.search(pattern, row[0])]
    if not rows:
        return []
    return [_line(table.columns), _line(["---"] * len(table.columns)), *map(_line, rows)]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def as_markdown(results: Results) -> str:
    """Return all tables that these results have something for, and what has failed."""
    parts: list[str] = []
    for table in TABLES:
        if table.name not in SELECTIONS and (lines := table_lines(table, results)):
            parts += [f"## {table.title}", "", *lines, ""]
    for cell in (it for result in results.values() for it in rows_of(result, "cells")):
        if "error" in cell:
            named = (cell[it] for it in FAILED if cell.get(it) is not None)
            case = ", ".join(map(str, named))
            parts.append(f"Failed: {case}: {str(cell['error']).splitlines()[0]}")
    return "\n".join(parts)


# ---- real servers ----

SERVED = (
    "tokens/s",
    "between outputs p50, ms",
    "p99",
    "tokens an output",
    "engine, µs a token",
    "API server",
    "who limits",
)
"""Columns of servers under load: tokens, then CPU time."""


def _served(pair: Pair) -> list[str]:
    sides = pair.sides()
    return [
        _over_runs(pair, _rate, count_text),
        *(pair_text(*(median(it.gaps(at)) for it in sides)) for at in ("p50", "p99")),
        _tokens_an_output(pair),
        *_costs(pair),
        joined(*(it.limit for it in sides)),
    ]


def _rate(side: Side) -> float | None:
    return side.figure("tokens_per_s")


def _over_runs(
    pair: Pair, figure: Callable[[Side], float | None], show: Callable[[Any], str]
) -> str:
    """Return a figure of both sides: its range, if runs of the case differ by LEAST_VARIATION."""
    of_runs = [numbers(map(figure, run.sides())) for run in pair.runs]
    both = list(zip(*(it for it in of_runs if len(it) == 2), strict=True))
    if any(max(it) > (1 + LEAST_VARIATION) * min(it) for it in both):
        return joined(*map(range_text, both))
    return joined(*(show(figure(it)) for it in pair.sides()))


def _tokens_an_output(pair: Pair) -> str:
    """Return both sides' tokens an output, or just 1 if all came alone."""
    if not any(side.has_merged for side in pair.sides()):
        return "1"
    return joined(*(f"{it.tokens_per_output or 0:.1f}" for it in pair.sides()))


def _costs(pair: Pair) -> list[str]:
    return [
        pair_text(*(it.figure("cpu", "us_per_token", role) for it in pair.sides()))
        for role in ROLES
    ]


def current(results: Results, *, compare_front_ends: bool = False) -> list[Row]:
    """Return results without repetitions; runs that compare front ends have tables of their own."""
    return [
        result
        for name, result in results.items()
        if not name.startswith(AGAIN) and name.startswith(FRONT_ENDS) == compare_front_ends
    ]


def _chosen(
    results: Results, is_chosen: Callable[[Case], bool], *, compare_front_ends: bool = False
) -> list[Pair]:
    found = current(results, compare_front_ends=compare_front_ends)
    runs: dict[tuple[Case, str], list[Pair]] = {}
    for visit in (it for result in results.values() for it in visits_of(result)):
        for run in pairs_of([visit]):
            runs.setdefault((run.case, run.gpu), []).append(run)
    pairs = [pair for pair in pairs_of(found) if is_chosen(pair.case)]
    return [replace(pair, runs=runs[pair.case, pair.gpu]) for pair in pairs]


def front_ends(results: Results) -> Rows:
    """Yield servers with vLLM's Python and Rust front ends: on all processors, then on few.

    On few those of many streams alone, as in `two_processors`.
    """
    pairs = _chosen(results, lambda _: True, compare_front_ends=True)
    for pair in (it for it in pairs if it.case.cores == ALL):
        yield [pair.case.label + _mode_of(pair.case), *_served(pair)]
    for pair in pairs:
        if pair.case.cores != ALL and pair.case.concurrency >= MANY_STREAMS:
            yield [f"{pair.case.label}, {pair.case.cores} processors", *_served(pair)]


def _alike(mode: str, driver: str) -> Callable[[Results], Rows]:
    """Return what yields servers on one GPU and all processors of one mode and driver."""

    def rows(results: Results) -> Rows:
        def is_chosen(case: Case) -> bool:
            wanted = (mode, driver, ALL, "", False)
            return wanted == (case.mode, case.driver, case.cores, case.layout, case.speculates)

        for pair in _chosen(results, is_chosen):
            yield [pair.case.label, *_served(pair)]

    return rows


def speculation(results: Results) -> Rows:
    """Yield servers that speculate."""
    for pair in _chosen(results, lambda it: it.speculates):
        yield [pair.case.label + _mode_of(pair.case), *_served(pair)]


def servers(results: Results) -> Rows:
    """Yield all servers on one GPU, however they were driven: pages have tables of some of them."""
    for pair in _chosen(results, lambda it: not it.layout):
        yield [_name_of(pair.case), *_served(pair)]


def _name_of(case: Case) -> str:
    """Return what to call a case among others of all kinds."""
    cores = "" if case.cores == ALL else f", {case.cores} processors"
    return f"{case.label}, {DRIVERS[case.driver]}{_mode_of(case)}{cores}"


def _mode_of(case: Case) -> str:
    return "" if case.mode == ASYNC else ", sync"


def two_processors(results: Results) -> Rows:
    """Yield those of many streams on two processors."""

    def is_chosen(case: Case) -> bool:
        return case.cores == "2" and case.concurrency >= MANY_STREAMS

    for pair in _chosen(results, is_chosen):
        yield [pair.case.label + _mode_of(pair.case), *_served(pair)]


def several_gpus(results: Results) -> Rows:
    """Yield models that are spread over GPUs; the engine's CPU time without what it spins."""
    for pair in _chosen(results, lambda it: bool(it.layout)):
        working = (it.get("engine_cpu", "without_waiting_us_per_token") for it in pair.sides())
        rates, p50, p99, together, _, api_server, _ = _served(pair)
        yield [pair.case.label, rates, p50, p99, together, pair_text(*working), api_server]


def same_streams(results: Results) -> Rows:
    """Yield how many streams were the same with both schedulers, and with vLLM's twice."""
    found: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in (it for result in results.values() for it in rows_of(result, "streams")):
        front_end = ", Rust front end" if row.get("front_end") == RUST else ""
        key = (str(row.get("model")), str(row.get("mode")), front_end)
        found.setdefault(key, {}).setdefault(str(row.get("scheduler")), row)
    for (model, mode, front_end), sides in sorted(found.items()):
        stock, ours = (dig(sides.get(it), "digests") for it in (STOCK, OURS))
        if stock and ours:
            both = (_equal(stock[0], ours[0]), _equal(stock[0], stock[-1]))
            yield [f"{model}, {mode}{front_end}", count_text(len(stock[0])), *both]


def _equal(one: list[str], other: list[str]) -> str:
    return str(sum(a == b for a, b in zip(one, other, strict=True)))


# ---- README: do I gain? ----


@dataclass(frozen=True)
class Situation:
    """What a user may be in, and the figure that tells what changes."""

    text: str
    change: str
    figure: Callable[[Side], float | None]
    case: dict[str, Any] = field(default_factory=dict)
    """What its case has that isn't usual."""


def _tail(side: Side) -> float | None:
    return median(side.gaps("p99"))


USUAL = {"mode": ASYNC, "driver": HTTP, "cores": ALL, "front_end": "python"}
MANY, TWO_PROCESSORS, IS_SYNC, GPU_LIMITS, ALONE = (
    "Many users, Rust front end",
    "Two processors",
    "Synchronous scheduling",
    "The GPU is the limit",
    "One user",
)
SITUATIONS = (
    Situation(
        MANY, "tokens/s", _rate, {"model": "Qwen2-1.5B", "front_end": RUST, "concurrency": 1024}
    ),
    Situation(
        TWO_PROCESSORS,
        "ms between outputs, p99",
        _tail,
        {"model": "gpt-oss-120b", "cores": "2", "concurrency": 64},
    ),
    Situation(
        IS_SYNC,
        "tokens/s",
        _rate,
        {"model": "gpt-oss-120b", "mode": SYNC, "driver": ASYNCLLM, "concurrency": 256},
    ),
    Situation(
        GPU_LIMITS,
        "ms between outputs, p99",
        _tail,
        {"model": "gpt-oss-120b", "concurrency": 64},
    ),
    Situation(ALONE, "tokens/s", _rate, {"model": "gpt-oss-120b", "concurrency": 1}),
)
BY_GAIN = (
    mixed.PACED,
    MANY,
    vllm_bench.NEAR_THE_LIMIT,
    TWO_PROCESSORS,
    IS_SYNC,
    GPU_LIMITS,
    vllm_bench.EMBEDDINGS,
    ALONE,
)
"""What gains most first, what gains nothing last; of a range counts the smaller gain."""


def gain(results: Results) -> Rows:
    """Yield what changes in each situation, one figure each."""
    rows = (*_gain_of_streams(results), *mixed.gain(results), *vllm_bench.gain(results))
    yield from sorted(rows, key=lambda row: BY_GAIN.index(row[0]))


def _gain_of_streams(results: Results) -> Rows:
    for situation in SITUATIONS:
        wanted = USUAL | situation.case
        found = _chosen(
            results,
            lambda it, wanted=wanted: wanted.items() <= vars(it).items(),
            compare_front_ends=wanted["front_end"] == RUST,
        )
        for pair in found:
            case = pair.case
            streams = "1 stream" if case.concurrency == 1 else f"{case.concurrency:,} streams"
            together = _tokens_an_output(pair)
            note = "" if together == "1" else f" ({together} tokens an output)"
            show = count_text if situation.figure is _rate else text_of
            changed = _over_runs(pair, situation.figure, show)
            rust = ", Rust front end" if case.front_end == RUST else ""
            measured = f"{case.model}, {DRIVERS[case.driver]}{rust}, {streams}"
            yield [situation.text, measured, situation.change, changed + note]


# ---- benchmarks that start no server ----


def _micro(results: Results, table: str, *needed: str) -> Iterator[Row]:
    """Yield the rows of a table that have what is needed."""
    for result in results.values():
        for row in rows_of(result, table):
            if all(name in row for name in needed):
                yield row


def steps(results: Results) -> Rows:
    """Yield what a decode step costs the host, and where all requests have something more."""
    for table in ("decode", "features"):
        for row in _micro(results, table, "requests", STOCK, OURS):
            feature = "" if table == "decode" else f"{row.get('feature')}: "
            sides = [row[it] for it in (STOCK, OURS)]
            yield [
                f"{feature}{count_text(row['requests'])}",
                *(_spread(dig(it, "step_us")) for it in sides),
                times_text(*(dig(it, "step_us", "median") for it in sides)),
                *(_parts(it) for it in sides),
            ]


def _spread(found: Any) -> str:
    middle, least, most = (text_of(dig(found, it)) for it in ("median", "p10", "p90"))
    return f"{middle} ({least} to {most})"


def _parts(side: Row) -> str:
    return " / ".join(text_of(dig(side, it, "median")) for it in PARTS)


def prompts(results: Results) -> Rows:
    """Yield what a request costs until its first token, by the length of its prompt."""
    for row in _micro(results, "prefill", "tokens", STOCK, OURS):
        cached = ", prefix cached" if row.get("prefix_cached") else ""
        both = [dig(row, it, "median") for it in (STOCK, OURS)]
        yield [f"{count_text(row['tokens'])}{cached}", *map(text_of, both), times_text(*both)]


def verified(results: Results) -> Rows:
    """Yield what a step costs that both schedulers decide."""
    yield from _beside(results, "verified", STOCK, "verifying")


def counted(results: Results) -> Rows:
    """Yield what a step costs with and without counting for `/metrics`."""
    yield from _beside(results, "counted", "sparksched without metrics", OURS)


def _beside(results: Results, table: str, one: str, other: str) -> Rows:
    for row in _micro(results, table, "requests", one, other):
        both = [dig(row, it, "step_us", "median") for it in (one, other)]
        longer = both[1] - both[0] if len(numbers(both)) == 2 else None
        yield [count_text(row["requests"]), *map(text_of, both), text_of(longer)]


def recorded(results: Results) -> Rows:
    """Yield what a step costs that is recorded."""
    for row in _micro(results, "recording", "side", "kind"):
        figures = (
            dig(row, "schedule_us", "median"),
            dig(row, "update_us", "median"),
            *(row.get(it) for it in ("step_p99_us", "processor_us", "bytes_a_step")),
        )
        name = f"{LABELS.get(row['side'], row['side'])}, {row.get('requests')}"
        yield [name, str(row["kind"]), *map(text_of, figures)]


MESSAGE_FIGURES = (
    "arrived_p50_us",
    "arrived_p99_us",
    "ready_p50_us",
    "ready_p99_us",
    "engine_cpu_us",
    "client_cpu_us",
)
BUSY = {"event loop busy": ", client busy", "goes on with 1 ms": ", engine at work"}
"""Words in what a group of messages is called, and what to add to its messages."""


def messages(results: Results) -> Rows:
    """Yield how long messages take between the processes, and their CPU time."""
    for row in _micro(results, "cases", "message", "vLLM", "sparksched"):
        group = str(row.get("group", ""))
        busy = next((it for words, it in BUSY.items() if words in group), "")
        sides = [row[it] for it in ("vLLM", "sparksched")]
        figures = [[dig(it, name) for it in sides] for name in MESSAGE_FIGURES]
        cells = [pair_text(*both) if numbers(both) else "not told" for both in figures]
        yield [f"{row['message']}{busy}", *cells]


def tokens(results: Results) -> Rows:
    """Yield what a token costs engine and client, with a GPU that is only a timer."""
    for row in _micro(results, "decode", "streams", "step_ms", "vLLM", "sparksched"):
        both = [row[it] for it in ("vLLM", "sparksched")]
        yield [
            f"{count_text(row['streams'])}, {row['step_ms']:g} ms",
            joined(*(count_text(dig(it, "tokens_per_s")) for it in both)),
            *(pair_text(*(_gap(it, at) for it in both)) for at in ("p50", "p99")),
            joined(*(_host_merged(it) for it in both)),
            pair_text(*(dig(it, "launch_us", "p50") for it in both)),
            *(pair_text(*(_all_threads(it, who) for it in both)) for who in ("engine", "client")),
        ]


def _gap(side: Row, percentile: str) -> Any:
    """Return the time between outputs; older results have that between tokens alone."""
    return dig(side, "output_gap_ms", percentile) or dig(side, "itl_ms", percentile)


def _host_merged(side: Row) -> str:
    share = 100 * (side.get("merged_outputs") or 0) / (side.get("outputs") or 1)
    return f"{share:.0f} %"


def _all_threads(side: Row, who: str) -> float:
    return sum(numbers((dig(side, f"{who}_us") or {}).values()))


def short_requests(results: Results) -> Rows:
    """Yield requests a second, where each brings few tokens, and how long these take."""
    for result in results.values():
        short = result.get("short")
        both = [dig(short, it) for it in ("vLLM", "sparksched")]
        rates = [dig(it, "requests_per_s") for it in both]
        if len(numbers(rates)) == 2:
            yield [
                f"{short['prompt_tokens']:,} tokens in, {short['max_tokens']} out",
                joined(*map(count_text, rates)),
                *(
                    pair_text(*(dig(it, name, at) for it in both))
                    for name in ("first_token_ms", "last_token_ms")
                    for at in ("p50", "p99")
                ),
                pair_text(*(dig(it, "tokens_per_output") for it in both)),
            ]


def joining_name(case: Row) -> str:
    """Return what to call a case that requests joined."""
    front_end = f"{case['front_end'].capitalize()} front end"
    return f"{case['streams']:,}, {case['model']}, {front_end}, {case['prompt_tokens']:,} tokens"


def first_tokens(results: Results) -> Rows:
    """Yield how long requests that join wait, with vLLM and sparksched."""
    for case in _micro(results, "joining"):
        rows = [case.get(it) for it in JOINING_SIDES]
        yield [
            joining_name(case),
            *(_of_sides(rows, "{:.1f}", "ttft_ms", at) for at in ("p50", "p99")),
            *(_of_sides(rows, "{:.2f}", "output_gap_ms", at) for at in ("p50", "p99")),
            _of_sides(rows, "{:,.0f}", "tokens_per_s"),
            _of_sides(rows, "{:,.0f}", "preempted"),
            _idle(rows),
        ]


def _idle(rows: list[Row | None]) -> str:
    """Return how idle the GPU was by a trace, if there was a GPU and a trace."""
    if any(dig(it, "gpu") for it in rows):
        return _of_sides(rows, "{:.1f}", "gpu", "idle_percent")
    return "-"


def _of_sides(rows: list[Row | None], form: str, *path: str) -> str:
    """Return a figure of each side; a run that was stopped lacks some."""
    found = (dig(it, *path) for it in rows)
    return joined(*(MISSING if it is None else form.format(it) for it in found))


# ---- where the engine's time is ----

SHARES = ("runner", "scheduler", "queues", "waiting", "rest")


def profiles(results: Results) -> Rows:
    """Yield which share of its samples the engine's loop is in what, with either scheduler."""
    cases: dict[str, dict[str, Row]] = {}
    for row in _micro(results, PROFILES, "split"):
        rust = ", Rust front end" if row.get("front_end") == RUST else ""
        number = row.get("concurrency")
        streams = "1 stream" if number == 1 else f"{number:,} streams"
        sides = cases.setdefault(f"{row.get('model')}{rust}, {streams}", {})
        sides[str(row.get("scheduler"))] = row
    for name, sides in cases.items():
        splits = [dig(sides.get(it), "split") for it in (STOCK, OURS)]
        yield [name, *(pair_text(*(dig(it, share) for it in splits)) for share in SHARES)]


# ---- where it all comes from ----


def sources(results: Results) -> Rows:
    """Yield of what commit, day and machine each file is, and with which options."""
    for name, result in results.items():
        runs = rows_of(result, "runs") or [result.get("run") or {}]
        texts = [
            _each_once(str(run.get("commit", MISSING)) for run in runs),
            _each_once(str(run.get("date", MISSING)).partition(" ")[0] for run in runs),
            _each_once(
                f"{run.get('gpu') or 'no GPU'}, {run.get('cores')} x {run.get('cpu')}"
                for run in runs
            ),
            _each_once(f"`{_lasting(str(run.get('options', '')))}`" for run in runs),
        ]
        yield [f"`{name}`", *(it.replace("``", "") for it in texts)]


def _each_once(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words))


def _lasting(options: str) -> str:
    """Return options without those that concern a single run."""
    words = options.split()
    skipped = {
        index + more for index, it in enumerate(words) if it in OF_ONE_RUN for more in (0, 1)
    }
    return " ".join(word for index, word in enumerate(words) if index not in skipped)


STEP_COLUMNS = (
    "vLLM, µs (p10 to p90)",
    "sparksched",
    "ratio",
    "vLLM: schedule / update / message",
    "sparksched",
)
STREAMS = "model, streams x tokens"
BENCH_SERVED = (
    "model, tokens, load",
    "requests/s",
    "first token p50, ms",
    "p99",
    "time per output token p50, ms",
    "between outputs p99, ms",
    "tokens an output",
    "engine, µs a token",
    "API server",
    "held up by",
)
TABLES = (
    Table(
        "gain",
        "Do I gain?",
        ("your situation", "measured", "what changes", f"vLLM{ARROW}sparksched"),
        gain,
    ),
    Table("servers", "Servers under load", (f"{STREAMS}, driver", *SERVED), servers),
    Table("http", "Over HTTP", (STREAMS, *SERVED), _alike(ASYNC, HTTP)),
    Table("front_ends", "Python and Rust front end", (STREAMS, *SERVED), front_ends),
    Table("asyncllm", "Without HTTP", (STREAMS, *SERVED), _alike(ASYNC, ASYNCLLM)),
    Table(
        "sync", "Synchronous scheduling, without HTTP", (STREAMS, *SERVED), _alike(SYNC, ASYNCLLM)
    ),
    Table("speculation", "With speculation", (STREAMS, *SERVED), speculation),
    Table("two_processors", "On two processors", (STREAMS, *SERVED), two_processors),
    Table(
        "gpus", "On several GPUs", ("model, layout, streams x tokens", *SERVED[:6]), several_gpus
    ),
    Table("vllm_bench", "`vllm bench serve`", BENCH_SERVED, vllm_bench.served),
    Table(
        "vllm_bench_processors",
        "`vllm bench serve`, few processors",
        ("on few processors: model, tokens, load", *BENCH_SERVED[1:]),
        vllm_bench.on_few_processors,
    ),
    Table(
        "vllm_bench_long",
        "`vllm bench serve`, longer prompts",
        ("longer prompts: model, tokens, load", *BENCH_SERVED[1:]),
        vllm_bench.long_prompts,
    ),
    Table(
        "vllm_bench_releases",
        "`vllm bench serve`, other releases of vLLM",
        ("another release: model, tokens, load", *BENCH_SERVED[1:]),
        vllm_bench.other_releases,
    ),
    Table(
        "vllm_bench_embeddings",
        "`vllm bench serve`, embeddings",
        (
            "model, tokens, load",
            "requests/s",
            "answer p50, ms",
            "p99",
            "engine, µs a request",
            "API server",
            "held up by",
        ),
        vllm_bench.embeddings,
    ),
    Table(
        "vllm_bench_throughput",
        "`vllm bench throughput`",
        ("`vllm bench throughput`: model, tokens", "requests/s", "tokens/s, in and out"),
        vllm_bench.throughput,
    ),
    Table(
        "vllm_bench_latency",
        "`vllm bench latency`",
        ("`vllm bench latency`: model, tokens", "mean, ms", "p50", "p99"),
        vllm_bench.latency,
    ),
    Table(
        "streams",
        "The same tokens?",
        ("model, scheduling", "streams", "the same with both schedulers", "vLLM's twice"),
        same_streams,
    ),
    Table("steps", "A step", ("running requests", *STEP_COLUMNS), steps),
    Table(
        "prompts",
        "A request until its first token, without the model",
        ("prompt tokens", "vLLM, µs", "sparksched", "ratio"),
        prompts,
    ),
    Table(
        "messages",
        "A message",
        (
            "message",
            "arrived p50, µs",
            "p99",
            "ready p50, µs",
            "p99",
            "engine, µs of CPU",
            "client",
        ),
        messages,
    ),
    Table(
        "tokens",
        "A token, with a GPU that is only a timer",
        (
            "streams, GPU step",
            "tokens/s",
            "between outputs p50, ms",
            "p99",
            "outputs with several tokens",
            "to launch, µs",
            "engine, µs a token",
            "client",
        ),
        tokens,
    ),
    Table(
        "short",
        "Short requests",
        (
            "requests",
            "a second",
            "first token p50, ms",
            "p99",
            "last token p50, ms",
            "p99",
            "tokens an output",
        ),
        short_requests,
    ),
    Table(
        "joining",
        "The first token of a request that joins",
        (
            "streams",
            "first token p50, ms",
            "p99",
            "between outputs p50, ms",
            "p99",
            "tokens/s",
            "preempted",
            "GPU idle, %",
        ),
        first_tokens,
    ),
    Table(
        "profile",
        "Where the engine's loop is, in % of its samples",
        (
            "the engine's loop, in %",
            "vLLM's model runner",
            "scheduler",
            "messages",
            "waits for the GPU",
            "rest",
        ),
        profiles,
    ),
    Table("mixed", "A long prompt beside streams", mixed.MIXED_COLUMNS, mixed.mixed),
    Table("ordinary", "An ordinary load", mixed.ORDINARY_COLUMNS, mixed.ordinary),
    Table(
        "mixed_timer",
        "A long prompt beside streams, with a GPU that is only a timer",
        mixed.TIMER_COLUMNS,
        mixed.timer,
    ),
    Table(
        "verified",
        "A verified step",
        ("running requests", "vLLM, µs", "verified", "longer by"),
        verified,
    ),
    Table(
        "counted",
        "A step with and without metrics",
        ("running requests", "without, µs", "with", "longer by"),
        counted,
    ),
    Table(
        "recorded",
        "A recorded step",
        (
            "scheduler, requests",
            "recording",
            "`schedule()`, µs",
            "`update_from_output()`, µs",
            "both, p99",
            "processor, µs a step",
            "bytes a step",
        ),
        recorded,
    ),
    Table("sources", "Sources", ("file", "commit", "day", "machine", "options"), sources),
)
