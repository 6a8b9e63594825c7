"""The tables of docs/results.md about benchmarks that start no server: a step, a message, a token.

Read `page_tables.py` first, which has those of real servers.
"""

from collections.abc import Iterator

from bench.reporting.cells import OURS, STOCK, Row, rows_of
from bench.reporting.others import HOST_PATH, IPC, STEP_COST, kind_of, thread_time
from bench.reporting.page_tables import RESULTS, PageTable, Results, Rows
from bench.reporting.values import (
    MISSING,
    as_number,
    count_text,
    dig,
    joined,
    pair_text,
    text_of,
)

CALLS = ("schedule_us", "update_us", "message_us")
SITUATIONS = {
    "Engine to client, asleep": "",
    "Engine to client, its event loop busy with callbacks of 200 µs": ", client busy",
    "Engine to client, asleep; the engine goes on with 1 ms of Python, as with its next step": (
        ", engine at work"
    ),
    "Client to engine, asleep": "",
}
"""What `bench.ipc` calls them, and the page."""


def _rows(results: Results, kind: str, table: str) -> Iterator[Row]:
    for result in results.values():
        if kind_of(result) == kind:
            yield from rows_of(result, table)


# ---- a step ----


def steps(results: Results) -> Rows:
    """Yield what a decode step costs, by running requests."""
    for row in _rows(results, STEP_COST, "decode"):
        yield [
            count_text(row.get("requests")),
            *_compared(*(dig(row, side, "step_us") for side in (STOCK, OURS))),
            *(" / ".join(_calls(row, side)) for side in (STOCK, OURS)),
        ]


def features(results: Results) -> Rows:
    """Yield the same where all requests have something more."""
    for row in _rows(results, STEP_COST, "features"):
        name = f"{row.get('feature', MISSING)}: {count_text(row.get('requests'))}"
        yield [name, *_compared(*(dig(row, side, "step_us") for side in (STOCK, OURS)))]


def prefills(results: Results) -> Rows:
    """Yield what a request costs until its first token, by the length of its prompt."""
    for row in _rows(results, STEP_COST, "prefill"):
        cached = ", prefix cached" if row.get("prefix_cached") else ""
        stock, ours = (dig(row, side, "median") for side in (STOCK, OURS))
        texts = (text_of(stock), text_of(ours), _times(stock, ours))
        yield [f"{count_text(row.get('tokens'))}{cached}", *texts]


def _compared(stock: Row | None, ours: Row | None) -> list[str]:
    """Return both sides of a cost, and how many times ours vLLM's is."""
    return [_spread(stock), _spread(ours), _times(dig(stock, "median"), dig(ours, "median"))]


def _spread(found: Row | None) -> str:
    middle, *ends = (dig(found, it) for it in ("median", "p10", "p90"))
    least, most = map(text_of, ends)
    return f"{text_of(middle)} ({least} to {most})"


def _calls(row: Row, side: str) -> Iterator[str]:
    return (text_of(dig(row, side, it, "median")) for it in CALLS)


def _times(stock: float | None, ours: float | None) -> str:
    base, number = as_number(stock), as_number(ours)
    if not base or not number:
        return MISSING
    ratio = base / number
    return f"{ratio:.1f}x" if ratio < 10 else f"{ratio:.0f}x"


# ---- a message ----


def latencies(results: Results) -> Rows:
    """Yield how long messages take, until they have arrived and until they are decoded."""
    for row in _rows(results, IPC, "cases"):
        figures = (f"{what}_{it}_us" for what in ("arrived", "ready") for it in ("p50", "p99"))
        yield [_message(row), *(_against(row, it) for it in figures)]


def message_costs(results: Results) -> Rows:
    """Yield messages' CPU time, where a process does nothing else meanwhile."""
    figures = [f"{who}_{it}_us" for it in ("transport", "cpu") for who in ("engine", "client")]
    for row in _rows(results, IPC, "cases"):
        if all(dig(row, "vLLM", it) is not None for it in figures):
            yield [_message(row), *(_against(row, it) for it in figures)]


def _message(row: Row) -> str:
    group = str(row.get("group", MISSING))
    return f"{row.get('message', MISSING)}{SITUATIONS.get(group, f', {group}')}"


def _against(row: Row, name: str) -> str:
    """Return both sides, and what part of vLLM's ours is."""
    stock, ours = dig(row, "vLLM", name), dig(row, "sparksched", name)
    base, number = as_number(stock), as_number(ours)
    both = pair_text(stock, ours)
    return f"{both} ({number / base:.2f})" if base and number is not None else both


# ---- a token ----


def tokens(results: Results) -> Rows:
    """Yield what a token costs engine and client, with a GPU that is only a timer."""
    for row in _rows(results, HOST_PATH, "decode"):
        both = (row.get("vLLM"), row.get("sparksched"))
        step = as_number(row.get("step_ms"))
        yield [
            f"{count_text(row.get('streams'))}, {MISSING if step is None else f'{step:g}'} ms",
            joined(*(count_text(dig(it, "tokens_per_s")) for it in both)),
            *(pair_text(*(dig(it, "itl_ms", at) for it in both)) for at in ("p50", "p90", "p99")),
            pair_text(*(dig(it, "launch_us", "p50") for it in both)),
            *(pair_text(*(thread_time(it, who) for it in both)) for who in ("engine", "client")),
        ]


HOST_TABLES = (
    PageTable(
        RESULTS,
        "| running requests | vLLM | sparksched | ratio | "
        "vLLM: schedule / update / message | sparksched |",
        steps,
    ),
    PageTable(RESULTS, "| what: running requests | vLLM | sparksched | ratio |", features),
    PageTable(RESULTS, "| prompt tokens | vLLM | sparksched | ratio |", prefills),
    PageTable(
        RESULTS,
        "| message | arrived, p50 | arrived, p99 | ready, p50 | ready, p99 |",
        latencies,
    ),
    PageTable(
        RESULTS,
        "| message | engine | client | engine, with codec | client, with codec |",
        message_costs,
    ),
    PageTable(
        RESULTS,
        "| streams, GPU step | tokens/s | ITL p50 | p90 | p99 | to launch | engine | client |",
        tokens,
    ),
)
