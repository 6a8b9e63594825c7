"""Tables about `bench.decode`: what the host does, in phases, threads and messages."""

from collections.abc import Sequence
from typing import Any

from bench.reporting.cells import (
    CASE,
    OURS,
    STOCK,
    Pair,
    Row,
    Side,
    are_of_separate_runs,
    marked,
    servers_of,
    steady,
)
from bench.reporting.document import Bullets, Paragraph, Part, Table
from bench.reporting.engine import Gap, gap_of, unlisted_share
from bench.reporting.values import (
    MISSING,
    NONE,
    as_number,
    dig,
    joined,
    median,
    names_of,
    pair_text,
    rounded,
    text_of,
    why_missing,
)

PHASES = ("schedule", "execute", "sample", "wait", "update", "deliver", "other")
PEERS = (
    " Where engines wait for each other, that is not in `host`, and neither that nor batches of "
    "nothing are in `other`: the table of how requests were split has them."
)
PROCESSES = ("API server", "engine", "worker")
WITHOUT_WAITING = (
    ". The engine without waiting, in µs a token: without the CPU time that its loop takes to wait "
    "for workers and for other engines, where vLLM spins:"
)
NUM_THREADS = 4
NOTABLE_PERCENT = 1.0


# ---- phases ----


def phases(pairs: Sequence[Pair]) -> list[Part]:
    """Return the host's time in each phase of a step."""
    if not pairs:
        return []
    rows = [
        [
            pair.label,
            *(pair_text(*pair.both("phases", f"{it}_us", "p50")) for it in PHASES),
            pair_text(*pair.both("phases", "host_us", "p50")),
            pair_text(*pair.both("phases", "host_us", "p90")),
            pair_text(*pair.both("phases", "period_us", "p50")),
        ]
        for pair in pairs
    ]
    gaps = [
        [
            pair.label,
            joined(*(it.text for it in _gaps(pair))),
            joined(*(it.late_text for it in _gaps(pair))),
            pair_text(*pair.both("phases", "wait_spins"), " %", 100),
        ]
        for pair in pairs
    ]
    columns = (CASE, *PHASES, "host, p50", "host, p90", "step, p50")
    return [
        Paragraph(
            "Medians in µs, vLLM → sparksched, in the loop of the engine's process, in a round of "
            "its own. `host` is all of a step but `wait`. sparksched encodes outputs in `update` "
            "and sends them in `deliver`; vLLM does both in another thread, after `deliver`."
            + (PEERS if any(pair.key.layout for pair in pairs) else "")
        ),
        Table(columns, rows),
        Paragraph(
            "Between two steps, estimated from the host's times: for how long the GPU had nothing "
            "to do, in µs (asynchronous: at most, and 0 where the host had to wait for the GPU); "
            "how many steps were launched too late for that; and how much of its waiting the "
            "engine's thread takes of a processor. Not told: waits were no longer than it takes to "
            "hand over a result that is there already, or they spun. Then a trace tells; a host "
            "that waits says nothing of gaps within a step."
        ),
        Table((CASE, "gap, µs", "late steps", "spinning"), gaps),
    ]


def _gaps(pair: Pair) -> list[Gap]:
    return [gap_of(side, pair.key.concurrency) for side in (pair.stock, pair.ours)]


# ---- CPU ----


def cpu(results: Sequence[Row], pairs: Sequence[Pair]) -> list[Part]:
    """Return CPU time by process and thread, under load and idle."""
    parts: list[Part] = []
    chosen = steady(pairs)
    if chosen:
        rows = []
        # Older results don't have it.
        is_divided = any(as_number(it) is not None for pair in chosen for it in _working(pair))
        for pair in chosen:
            shares, costs = [], []
            for process in PROCESSES:
                share = pair.figures("cpu", "share", process, "percent")
                if process == "worker" and share == (None, None):
                    shares.append(NONE)
                else:
                    shares.append(pair_text(*share, " %"))
                if process != "worker":
                    costs.append(pair_text(*pair.figures("cpu", "us_per_token", process)))
            if is_divided:
                costs.append(pair_text(*_working(pair)))
            rows.append([pair.label, *shares, *costs])
        divided = ("engine without waiting",) if is_divided else ()
        columns = (*PROCESSES, "API server, µs a token", "engine, µs a token", *divided)
        parts += [
            Paragraph(
                "Share of one processor under load, all threads, vLLM → sparksched"
                + (WITHOUT_WAITING if is_divided else ":")
            ),
            Table((CASE, *columns), rows),
            Paragraph("By thread, in percent of a processor:"),
            Table((CASE, "vLLM", "sparksched"), [_threads(pair) for pair in chosen]),
        ]
        spinners = _spinners(chosen)
        if spinners:
            parts += [
                Paragraph("Threads that take more than 80 % of a processor, and what they do:"),
                Bullets(spinners),
            ]
    idle = [
        [
            marked(f"{model}, {mode}", are_of_separate_runs(sides)),
            *(_idle(sides.get(it)) for it in (STOCK, OURS)),
        ]
        for (model, mode), sides in servers_of(results, "servers").items()
    ]
    if idle:
        parts += [
            Paragraph("With nothing to do, in percent of a processor:"),
            Table(("model, mode", "vLLM", "sparksched"), idle),
        ]
    return parts


def _working(pair: Pair) -> tuple[Any, Any]:
    return pair.both("engine_cpu", "without_waiting_us_per_token")


def _threads(pair: Pair) -> list[str]:
    return [pair.label, _thread_shares(pair.stock), _thread_shares(pair.ours)]


def _thread_shares(side: Side) -> str:
    parts = []
    for process in PROCESSES:
        names: dict[str, None] = {}
        for entry in side.rounds():
            names |= dict.fromkeys(names_of(dig(entry, "cpu", "share", process, "threads")))
        found = {
            name: median(side.each("cpu", "share", process, "threads", name)) for name in names
        }
        # A thread without a figure stands first: it may be the busiest.
        order = sorted(found.items(), key=lambda it: -float("inf") if it[1] is None else -it[1])
        shown = [f"{name} {text_of(share)}" for name, share in order[:NUM_THREADS]]
        rest = median(
            unlisted_share(dig(entry, "cpu", "share", process)) for entry in side.rounds()
        )
        if rest is not None and rest >= NOTABLE_PERCENT:
            shown.append(f"not listed {rounded(rest)}")
        if shown:
            parts.append(f"{process}: {', '.join(shown)}")
    return "; ".join(parts) or MISSING


def _spinners(pairs: Sequence[Pair]) -> list[str]:
    lines = []
    for pair in pairs:
        for name, side in pair.sides():
            found = side.get("spinners")
            if isinstance(found, list):
                said = [_spinner(it) for it in found]
            else:
                said = [] if side.error else [f"{MISSING}: {dig(found, 'missing')}"]
            lines += [f"{pair.label}, {name}: {it}" for it in said]
    return lines


def _spinner(row: Any) -> str:
    """Return which thread takes a processor, and in which states it was seen."""
    who = f"{dig(row, 'process')}'s {dig(row, 'thread')} ({text_of(dig(row, 'percent'), ' %')})"
    seen = dig(row, "doing")
    doing = ", ".join(f"{what} {text_of(dig(seen, what), ' %')}" for what in names_of(seen))
    stack = dig(row, "stack")
    place = f"; in {' < '.join(map(str, stack))}" if isinstance(stack, list) and stack else ""
    return f"{who}: {doing or MISSING}{place}"


def _idle(row: Row | None) -> str:
    found = dig(row, "idle_cpu")
    if not isinstance(found, dict) or "missing" in found or not found:
        return why_missing(found)
    return ", ".join(f"{role} {text_of(dig(it, 'percent'))}" for role, it in found.items())


# ---- messages ----


def messages(pairs: Sequence[Pair]) -> list[Part]:
    """Return what messages take from engine to API server."""
    rows = []
    # Older results don't have it.
    is_handed = any(as_number(it) is not None for pair in pairs for it in _handed(pair))
    for pair in pairs:
        rows.append(
            [
                pair.label,
                _encoding(pair),
                pair_text(_travel(pair.stock), _travel(pair.ours)),
                *(
                    pair_text(*pair.both("messages", f"{what}_us", share))
                    for what, share in (
                        ("arrival", "p50"),
                        ("arrival", "p99"),
                        ("decode", "p50"),
                        ("process", "p50"),
                    )
                ),
                *([pair_text(*_handed(pair))] if is_handed else []),
                joined(*(_ipc_share(side) for side in (pair.stock, pair.ours))),
            ]
        )
    if not rows:
        return []
    handed = ("handed over",) if is_handed else ()
    columns = ("encode", "travel", "arrival p50", "p99", "decode", "process", *handed, "of ITL")
    return [
        Paragraph(
            "A step's outputs on their way, in µs, vLLM → sparksched. Arrival: from the end of "
            "`update` until the client begins to decode; travel: the same without encoding, so "
            "queues, waking of threads and processes, and the transport itself. Process: vLLM's "
            "output processor. Of ITL: arrival and decode, of ITL p50; with asynchronous "
            "scheduling the GPU works meanwhile."
        ),
        Paragraph(
            "Where the API server is the limit, arrival compares different things. What vLLM's "
            "reader has taken it decodes at once, and messages then wait in a queue for the output "
            "processor, after arrival: that wait is not in this table. sparksched leaves them in "
            "the ring until the output processor is through with what it has, so that they wait "
            "before arrival, and all of it is in the table."
            + (
                " Handed over: from the end of `update` until the output processor begins, which "
                "has both waits."
                if is_handed
                else " Results of newer runs have the time until the output processor begins, too."
            )
        ),
        Table((CASE, *columns), rows),
    ]


def _handed(pair: Pair) -> tuple[Any, Any]:
    return pair.both("messages", "handed_us", "p50")


def _encoding(pair: Pair) -> str:
    stock, ours = (side.get("messages", "encode_us") for side in (pair.stock, pair.ours))
    texts = []
    for found in (stock, ours):
        texts.append("in update" if _is_in_update(found) else text_of(_p50(found)))
    return joined(*texts)


def _travel(side: Side) -> float | None:
    """Return the median of arrival without that of encoding, if that is a part of it."""
    arrival = as_number(side.get("messages", "arrival_us", "p50"))
    found = side.get("messages", "encode_us")
    encoding = 0.0 if _is_in_update(found) else as_number(_p50(found))
    return None if arrival is None or encoding is None else max(0.0, arrival - encoding)


def _is_in_update(encoding: Any) -> bool:
    return isinstance(encoding, dict) and encoding.get("missing") == "encoded within update"


def _p50(found: Any) -> Any:
    return dig(found, "p50")


def _ipc_share(side: Side) -> str:
    arrival = as_number(side.get("messages", "arrival_us", "p50"))
    decode = as_number(side.get("messages", "decode_us", "p50"))
    itl_ms = as_number(side.figure("itl_ms", "p50"))
    if arrival is None or decode is None or itl_ms is None:
        return MISSING
    if not itl_ms:
        return "ITL is 0"
    return f"{rounded((arrival + decode) / itl_ms / 10)} %"
