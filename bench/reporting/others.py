"""The parts of the report about `bench.step_cost`, `bench.ipc` and `bench.host_path`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from bench.reporting.cells import rows_of
from bench.reporting.document import Paragraph, Part, Section, Table
from bench.reporting.values import dig, numbers, pair_text, ratio_text, text_of

STEP_COST, IPC, HOST_PATH, DECODE = KINDS = ("step_cost", "ipc", "host_path", "decode")

Row = dict[str, Any]


def kind_of(result: Any) -> str | None:
    """Return which benchmark a result is from, or None."""
    if not isinstance(result, dict):
        return None
    if result.get("kind") in KINDS:
        return str(result["kind"])
    if "prefill" in result or "blocks" in result:
        return STEP_COST
    if "sides" in result or "own_cost" in result:
        return HOST_PATH
    if "messages_per_s" in result or isinstance(result.get("cases"), list):
        return IPC
    return None


# ---- step_cost ----


def step_cost(result: Row) -> list[Section]:
    """Return what a step costs the scheduler."""
    parts: list[Part] = []
    decode = rows_of(result, "decode")
    if decode:
        columns = ("requests", "vLLM", "p90", "sparksched", "p90", "ratio")
        parts += [
            Paragraph(
                "Host time of a decode step in µs: `schedule()`, `update_from_output()` and the "
                "message to the client; median and p90, without a model."
            ),
            Table(columns, [_spread_row(row, "requests", "step_us") for row in decode]),
            Paragraph("Its parts, vLLM → sparksched:"),
            Table(
                ("requests", "schedule", "update", "message"),
                [
                    [
                        text_of(row.get("requests")),
                        *(_both(row, f"{it}_us", "median") for it in ("schedule", "update")),
                        _both(row, "message_us", "median"),
                    ]
                    for row in decode
                ],
            ),
        ]
    features = rows_of(result, "features")
    if features:
        columns = ("all requests have", "requests", "vLLM", "p90", "sparksched", "p90", "ratio")
        rows = [
            [str(row.get("feature")), *_spread_row(row, "requests", "step_us")] for row in features
        ]
        parts += [Paragraph("The same, in µs, with what all requests have:"), Table(columns, rows)]
    prefill = rows_of(result, "prefill")
    if prefill:
        columns = ("prompt tokens", "vLLM", "p90", "sparksched", "p90", "ratio")
        parts += [
            Paragraph("One request from its arrival to its first token, in µs, without a model:"),
            Table(columns, [_spread_row(row, "tokens", None) for row in prefill]),
        ]
    blocks = result.get("blocks")
    if isinstance(blocks, dict):
        parts += [
            Paragraph(f"Bookkeeping of {text_of(blocks.get('blocks'))} KV blocks:"),
            Table(
                ("", "vLLM", "sparksched"),
                [
                    ["time to build, ms", *_sides(blocks, "build_ms")],
                    ["memory, MiB", *_sides(blocks, "memory_mib")],
                ],
            ),
        ]
    return [Section("A step", parts)] if parts else []


def _spread_row(row: Row, label: str, what: str | None) -> list[str]:
    at = (what,) if what else ()
    stock, ours = (dig(row, side, *at) for side in ("stock", "sparksched"))
    cached = ", prefix cached" if row.get("prefix_cached") else ""
    return [
        text_of(row.get(label)) + cached,
        text_of(dig(stock, "median")),
        text_of(dig(stock, "p90")),
        text_of(dig(ours, "median")),
        text_of(dig(ours, "p90")),
        ratio_of_costs(dig(stock, "median"), dig(ours, "median")),
    ]


def ratio_of_costs(stock: Any, ours: Any) -> str:
    """Return how many times less ours costs."""
    return ratio_text(ours, stock)


def _both(row: Row, *path: str) -> str:
    return pair_text(dig(row, "stock", *path), dig(row, "sparksched", *path))


def _sides(row: Row, *path: str) -> list[str]:
    return [text_of(dig(row, side, *path)) for side in ("stock", "sparksched")]


# ---- ipc ----


def ipc(result: Row) -> list[Section]:
    """Return what a message costs."""
    rows = []
    for case in rows_of(result, "cases"):
        both = functools.partial(_both_of, case)
        rows.append(
            [
                f"{case.get('group', '')}: {case.get('message', '')}",
                *(
                    both(f"{what}_{it}_us")
                    for what in ("arrived", "ready")
                    for it in ("p50", "p99")
                ),
                *(_cpu_text(case, side) for side in ("engine", "client")),
            ]
        )
    if not rows:
        return []
    columns = ("arrived p50", "p99", "ready p50", "p99", "engine CPU", "client CPU")
    parts: list[Part] = [
        Paragraph(
            "Messages between engine and client in µs, vLLM's sockets → sparksched's rings: until "
            "a message has arrived, until it is decoded, and CPU time of each process (none: not "
            "measured in this case, where the process does something else besides)."
        ),
        Table(("message", *columns), rows),
    ]
    rates = pair_text(*(dig(result, "messages_per_s", it) for it in ("vLLM", "sparksched")))
    ring = text_of(dig(result, "ring_ns", "stream"), " ns")
    parts.append(
        Paragraph(f"Back to back, messages a second: {rates}. The ring alone: {ring} a message.")
    )
    return [Section("A message", parts)]


def _cpu_text(case: Row, process: str) -> str:
    name = f"{process}_cpu_us"
    is_measured = any(dig(case, side, name) is not None for side in ("vLLM", "sparksched"))
    return _both_of(case, name) if is_measured else "none"


def _both_of(case: Row, name: str) -> str:
    return pair_text(dig(case, "vLLM", name), dig(case, "sparksched", name))


# ---- host_path ----


def host_path(result: Row) -> list[Section]:
    """Return what a token costs with a GPU that is only a timer."""
    rows = []
    for row in rows_of(result, "decode"):
        stock, ours = row.get("vLLM"), row.get("sparksched")
        rows.append(
            [
                f"{text_of(row.get('streams'))}, {text_of(row.get('step_ms'))} ms",
                pair_text(dig(stock, "tokens_per_s"), dig(ours, "tokens_per_s")),
                ratio_text(dig(stock, "tokens_per_s"), dig(ours, "tokens_per_s")),
                *(
                    pair_text(dig(stock, "itl_ms", it), dig(ours, "itl_ms", it))
                    for it in ("p50", "p90", "p99")
                ),
                pair_text(dig(stock, "launch_us", "p50"), dig(ours, "launch_us", "p50")),
                *(pair_text(_total(stock, it), _total(ours, it)) for it in ("engine", "client")),
            ]
        )
    if not rows:
        return []
    columns = (
        "tokens/s",
        "ratio",
        "ITL p50, ms",
        "p90",
        "p99",
        "to launch, µs",
        "engine CPU, µs a token",
        "client CPU",
    )
    parts: list[Part] = [
        Paragraph(
            "vLLM's engine and `AsyncLLM` over an executor whose GPU is only a timer, one "
            "processor each, vLLM → sparksched:"
        ),
        Table(("streams, GPU step", *columns), rows),
    ]
    short = result.get("short")
    if isinstance(short, dict):
        stock, ours = (dig(short, it, "requests_per_s") for it in ("vLLM", "sparksched"))
        ratio = ratio_text(stock, ours)
        parts.append(Paragraph(f"Short requests a second: {pair_text(stock, ours)} ({ratio})."))
    return [Section("From sampled tokens to the client", parts)]


def _total(side: Any, process: str) -> Any:
    threads = dig(side, f"{process}_us")
    if not isinstance(threads, dict):
        return None
    spent = numbers(threads.values())
    return sum(spent) if spent and len(spent) == len(threads) else None


READERS: dict[str, Callable[[Row], Sequence[Section]]] = {
    STEP_COST: step_cost,
    IPC: ipc,
    HOST_PATH: host_path,
}
