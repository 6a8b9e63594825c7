"""Which benchmark a result is from, and the parts about those that start no server."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from bench.reporting.cells import rows_of
from bench.reporting.document import Paragraph, Part, Section, Table
from bench.reporting.recording import recording
from bench.reporting.step_cost import step_cost
from bench.reporting.values import NONE, dig, numbers, pair_text, ratio_text, text_of

STEP_COST, IPC, HOST_PATH, RECORDING, DECODE = KINDS = (
    "step_cost",
    "ipc",
    "host_path",
    "recording",
    "decode",
)

TOLD_BY = {
    STEP_COST: ("prefill", "blocks"),
    HOST_PATH: ("sides", "own_cost"),
    IPC: ("messages_per_s",),
    RECORDING: ("recording",),
}
"""Tables that only one benchmark has; results of `bench.decode` say what they are."""

Row = dict[str, Any]


def kind_of(result: Any) -> str | None:
    """Return which benchmark a result is from, or None."""
    if not isinstance(result, dict):
        return None
    if result.get("kind") in KINDS:
        return str(result["kind"])
    for kind, names in TOLD_BY.items():
        if any(name in result for name in names):
            return kind
    return IPC if isinstance(result.get("cases"), list) else None


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
    return _both_of(case, name) if is_measured else NONE


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
                *(
                    pair_text(thread_time(stock, it), thread_time(ours, it))
                    for it in ("engine", "client")
                ),
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


def thread_time(side: Any, process: str) -> Any:
    """Return the CPU time of all threads of a process, or nothing if one's isn't known."""
    threads = dig(side, f"{process}_us")
    if not isinstance(threads, dict):
        return None
    spent = numbers(threads.values())
    return sum(spent) if spent and len(spent) == len(threads) else None


READERS: dict[str, Callable[[Row], Sequence[Section]]] = {
    STEP_COST: step_cost,
    IPC: ipc,
    HOST_PATH: host_path,
    RECORDING: recording,
}
