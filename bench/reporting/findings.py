"""What the figures of `bench.decode` say: computed from them, and left out where they don't say."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.reporting.cells import (
    ALL,
    ASYNC,
    ASYNCLLM,
    HTTP,
    Pair,
    PairKey,
    Row,
    Side,
    TraceKey,
    by_size,
    counted,
    pairs_of,
    steady,
    traces_of,
)
from bench.reporting.engine import (
    LATE_SHARE,
    NOT_TOLD,
    ROLES,
    SPINNING,
    gap_of,
    is_busy,
)
from bench.reporting.engine_and_client import engine_against_client, keeps_up
from bench.reporting.values import as_number, dig, listed, numbers, rounded

BUSY_GPU = 0.93
"""Of the time: a GPU that is busier than this has no time to win."""
BUSY_HOST = 0.95
"""Of a step: host code that takes more than this leaves the GPU no time to be waited for."""
BUSY_LOADER = 85.0
NOTABLE_PERCENT = 2.0
MORE_PERCENT = 1.0

GPU, ENGINE, API_SERVER = "the GPU", "the engine's host code", "the API server"
FULL = "the API server's thread has all or nearly all of a processor, too, and keeps up"
MISSING_TITLE = "Serving: what is missing"


def findings(results: Sequence[Row]) -> list[str]:
    """Return sentences about these results, the most important first."""
    pairs = pairs_of(results)
    traces = traces_of(results)
    chosen = steady(pairs)
    lines = [
        *_who_limits(chosen, traces),
        *_rates(chosen),
        *engine_against_client(pairs),
        *_free_scheduler(chosen, traces),
        *_modes(chosen),
        *_cpu(chosen),
        *_http(chosen),
        *_few_cores(pairs),
        *_spinning(chosen),
        *_doubts(pairs),
    ]
    return lines or [
        "Nothing can be said: no decode with all processors has been measured with success."
    ]


# ---- who limits ----


@dataclass(frozen=True)
class Limits:
    """What one server's step consists of in the round with the probe, in µs. None: not known."""

    period: float
    host: float
    scheduler: float
    gpu: float | None
    limited_by: str
    is_api_server_full: bool = False
    """Whether a thread of the API server has all but a processor to itself; it may keep up."""


def limits_of(side: Side, streams: int, trace: Row | None, is_async: bool) -> Limits | None:
    """Return who limits a server, or None if phases were not measured."""
    period, host = (_phase(side, name) for name in ("period", "host"))
    parts = [_phase(side, name) for name in ("schedule", "update", "deliver")]
    if period is None or host is None or any(part is None for part in parts):
        return None
    scheduler = sum(part for part in parts if part is not None)
    busy_share = as_number(dig(trace, "gpu_busy_share"))
    gpu = as_number(dig(trace, "gpu_busy_us", "p50"))
    late = gap_of(side, streams).late
    is_api_server_full = is_busy(side, "API server")
    if is_api_server_full is None:
        by = NOT_TOLD
    elif is_api_server_full and not keeps_up(side, streams):
        by = API_SERVER
    elif is_async and host < BUSY_HOST * period and (late is None or late[0] < LATE_SHARE):
        by = GPU
    elif busy_share is not None:  # by a trace, which makes the host slower than it is
        by = GPU if busy_share >= BUSY_GPU else ENGINE
    else:
        by = ENGINE if is_async or host > period / 2 else GPU
    if gpu is None and by == GPU:
        gpu = period if is_async else period - host
    return Limits(period, host, scheduler, gpu, by, bool(is_api_server_full))


def _phase(side: Side, name: str) -> float | None:
    return as_number(side.get("phases", f"{name}_us", "p50"))


def _who_limits(pairs: Sequence[Pair], traces: dict[TraceKey, dict[str, Row]]) -> list[str]:
    lines = []
    for (model, mode, driver), group in _groups(pairs):
        for name, side_of in SIDES:
            by: dict[str, list[str]] = {}
            full, shares = [], []
            for pair in group:
                trace = _trace(traces, pair, name)
                limits = limits_of(side_of(pair), pair.key.concurrency, trace, mode == ASYNC)
                if limits is not None:
                    count = f"{pair.key.concurrency:,}"
                    by.setdefault(limits.limited_by, []).append(count)
                    if limits.is_api_server_full and limits.limited_by != API_SERVER:
                        full.append(count)
                    shares.append(f"{100 * limits.host / limits.period:.0f} % at {count}")
            case = f"{model}, {mode}, {driver}, {name}"
            if by and mode == ASYNC:
                said = "; ".join(f"{who} at {listed(counts)}" for who, counts in by.items())
                also = f" At {listed(full)} {FULL}." if full else ""
                lines.append(f"{case}: the limit is {said} streams.{also}")
            elif shares:
                lines.append(
                    f"{case}: the model waits for the host's code, in each step: "
                    f"{listed(shares)} streams."
                )
    return lines


def _stock(pair: Pair) -> Side:
    return pair.stock


def _ours(pair: Pair) -> Side:
    return pair.ours


SIDES: tuple[tuple[str, Callable[[Pair], Side]], ...] = (("vLLM", _stock), ("sparksched", _ours))


def _trace(traces: dict[TraceKey, dict[str, Row]], pair: Pair, name: str) -> Row | None:
    key = TraceKey(pair.key.model, pair.key.mode, pair.key.concurrency)
    return traces.get(key, {}).get("stock" if name == "vLLM" else "sparksched")


def _groups(pairs: Iterable[Pair]) -> list[tuple[tuple[str, str, str], list[Pair]]]:
    groups: dict[tuple[str, str, str], list[Pair]] = {}
    for pair in pairs:
        groups.setdefault((pair.key.model, pair.key.mode, pair.key.driver), []).append(pair)
    return list(groups.items())


# ---- rates ----


def _change(before: Any, after: Any) -> float | None:
    """Return by how many percent a figure rises."""
    base, number = as_number(before), as_number(after)
    return None if base is None or number is None or not base else 100 * (number / base - 1)


def _rates(pairs: Sequence[Pair]) -> list[str]:
    lines = []
    for (model, mode, driver), group in _groups(pairs):
        parts = []
        for pair in group:
            rate = _change(*pair.figures("tokens_per_s"))
            tail = _change(*pair.figures("itl_ms", "p99"))
            if rate is not None:
                about = _doubt(pair) + ("" if tail is None else f", ITL p99 {tail:+.0f} %")
                said = f" ({about.removeprefix(', ')})" if about else ""
                digits = 0 if abs(rate) >= 1 else 1
                parts.append(f"{rate:+.{digits}f} % at {pair.key.concurrency:,}{said}")
        if parts:
            lines.append(
                f"{model}, {mode}, {driver}: sparksched's tokens a second against vLLM's: "
                f"{', '.join(parts)} streams."
            )
    return lines


def _doubt(pair: Pair) -> str:
    """Return why a difference in rates may be none."""
    stock, ours = pair.stock.each("tokens_per_s"), pair.ours.each("tokens_per_s")
    if min(len(stock), len(ours)) < 2:
        return ", one round"
    if min(stock) <= max(ours) and min(ours) <= max(stock):
        return ", within the spread of rounds"
    return ""


def _free_scheduler(pairs: Sequence[Pair], traces: dict[TraceKey, dict[str, Row]]) -> list[str]:
    lines = []
    for (model, mode, driver), group in _groups(pairs):
        parts = [_free_scheduler_at(it, traces) for it in group] if driver == ASYNCLLM else []
        said = [part for part in parts if part]
        if said:
            lines.append(
                f"{model}, {mode}: with a scheduler that takes no time, and all else as it is, "
                f"vLLM would bring, by its own phases, {', '.join(said)} streams."
            )
    return lines


def _free_scheduler_at(pair: Pair, traces: dict[TraceKey, dict[str, Row]]) -> str | None:
    """Return what a free scheduler would bring in a cell, beside what was measured of ours."""
    is_async, streams = pair.key.mode == ASYNC, pair.key.concurrency
    stock = limits_of(pair.stock, streams, _trace(traces, pair, "vLLM"), is_async)
    rate = as_number(pair.stock.figure("tokens_per_s"))
    if stock is None or not rate or stock.limited_by == NOT_TOLD:
        return None
    if stock.is_api_server_full:
        return None  # it could not pass on what the engine would gain
    gain, is_bound = free_scheduler_gain(stock, 1e6 * streams / rate, is_async)
    text = f"{'at most ' if is_bound else ''}{gain:+.0f} % at {streams:,}"
    measured = _change(*pair.figures("tokens_per_s"))
    if measured is None:
        return text
    about = f"sparksched: {measured:+.0f} %"
    if measured > gain + MORE_PERCENT:
        ours = limits_of(pair.ours, streams, _trace(traces, pair, "sparksched"), is_async)
        about += f", more than that: {_why_more(stock, ours, is_async)}"
    return f"{text} ({about})"


def _why_more(stock: Limits, ours: Limits | None, is_async: bool) -> str:
    """Say what is known of why ours brings more than a free scheduler would."""
    rests = [
        (it.host if is_async else it.period) - it.scheduler
        for it in (stock, ours)
        if it is not None
    ]
    if len(rests) < 2 or rests[1] >= rests[0]:
        return "rounds differ"
    return f"the rest of its step takes less, too, {' → '.join(map(rounded, rests))} µs"


def free_scheduler_gain(limits: Limits, step_us: float, is_async: bool) -> tuple[float, bool]:
    """Return by how many percent the rate would rise, and whether that is only a bound.

    The engine's speed differs between rounds. So of the round with the probe only shares are taken:
    of a step that the client has seen, in `step_us`, the scheduler takes what it takes there of the
    period, or, where the host's code is the limit, of that.
    """
    if not is_async:
        return 100 * (limits.period / max(limits.period - limits.scheduler, 1e-9) - 1), False
    if limits.limited_by == GPU:
        return 0.0, False
    host = step_us * (1 - limits.scheduler / max(limits.host, 1e-9))
    least = max(host, limits.gpu or 0.0, 1e-9)
    return max(0.0, 100 * (step_us / least - 1)), limits.gpu is None


# ---- modes, CPU, HTTP, processors ----


def _modes(pairs: Sequence[Pair]) -> list[str]:
    lines = []
    for (model, driver, count, _), group in by_size(pairs, "model", "driver").items():
        modes = {pair.key.mode: pair for pair in group}
        if len(modes) < 2:
            continue
        said = []
        for name, side_of in SIDES:
            change = _change(
                *(side_of(modes[mode]).figure("tokens_per_s") for mode in ("sync", "async"))
            )
            if change is not None:
                said.append(f"{change:+.0f} % with {name}")
        if said:
            lines.append(
                f"{model}, {driver}, {counted(count, 'stream')}: asynchronous scheduling changes "
                f"tokens a second by {listed(said)}."
            )
    return lines


def _cpu(pairs: Sequence[Pair]) -> list[str]:
    lines = []
    for (model, mode, driver), group in _groups(pairs):
        pair = group[-1]
        parts = []
        for process in ROLES:
            before, after = (as_number(it) for it in pair.figures("cpu", "us_per_token", process))
            if before is not None and after is not None:
                parts.append(f"{process} {rounded(before)} → {rounded(after)} µs")
        if parts:
            lines.append(
                f"{model}, {mode}, {driver}, {counted(pair.key.concurrency, 'stream')}: CPU time "
                f"a token, vLLM → sparksched: {listed(parts)}."
            )
    return lines


def _http(pairs: Sequence[Pair]) -> list[str]:
    """Say what HTTP and text cost, beside the bare `AsyncLLM`."""
    lines = []
    for (model, mode, count, _), group in by_size(pairs, "model", "mode").items():
        drivers = {pair.key.driver: pair for pair in group}
        if not {ASYNCLLM, HTTP} <= drivers.keys():
            continue
        said = []
        for name, side_of in SIDES:
            bare, whole = (side_of(drivers[it]) for it in (ASYNCLLM, HTTP))
            change = _change(_rate(bare), _rate(whole)) if bare.sources == whole.sources else None
            if change is not None and abs(change) >= NOTABLE_PERCENT:
                said.append(f"{change:+.0f} % with {name}")
        if said:
            lines.append(
                f"{model}, {mode}, {counted(count, 'stream')}: HTTP and text change tokens a "
                f"second by {listed(said)}."
            )
    return lines


def _few_cores(pairs: Sequence[Pair]) -> list[str]:
    """Say what confining costs: over one driver, and with the most streams of each workload."""
    whole = {_but_for_cores(pair): pair for pair in pairs if pair.key.cores == ALL}
    chosen: dict[tuple[str, str, str], dict[str, Pair]] = {}
    for pair in sorted(pairs, key=lambda it: (it.key.driver == ASYNCLLM, it.key.concurrency)):
        key = pair.key
        base = whole.get(_but_for_cores(pair))
        if key.cores != ALL and base is not None and _are_of_the_same_runs(base, pair):
            chosen.setdefault((key.model, key.mode, key.cores), {})[key.workload] = pair
    lines = []
    for (model, mode, cores), workloads in sorted(chosen.items()):
        said = []
        for workload, pair in workloads.items():
            base = whole[_but_for_cores(pair)]
            changes = [
                f"{name} {change:+.0f} %"
                for name, side_of in SIDES
                if (change := _change(*map(_rate, (side_of(base), side_of(pair))))) is not None
            ]
            streams = counted(pair.key.concurrency, "stream")
            if changes:
                said.append(f"{workload}, {pair.key.driver}, {streams}: {listed(changes)}")
        if said:
            lines.append(
                f"{model}, {mode}: on {counted(cores, 'processor')} instead of all tokens a second "
                f"change, in {'; in '.join(said)}."
            )
    return lines


def _rate(side: Side) -> Any:
    return side.figure("tokens_per_s")


def _are_of_the_same_runs(first: Pair, second: Pair) -> bool:
    return all(side_of(first).sources == side_of(second).sources for _, side_of in SIDES)


def _but_for_cores(pair: Pair) -> PairKey:
    return replace(pair.key, cores=ALL)


# ---- doubts ----


def _spinning(pairs: Sequence[Pair]) -> list[str]:
    lines = []
    for (model, mode, driver), group in _groups(pairs):
        if driver != ASYNCLLM:
            continue
        for name, side_of in SIDES:
            found = numbers(side_of(pair).get("phases", "wait_spins") for pair in group)
            if found and min(found) >= SPINNING:
                lines.append(
                    f"{model}, {mode}, {name}: the engine's thread spins while it waits: "
                    f"{100 * min(found):.0f} % of that time is CPU time."
                )
    return lines


def _doubts(pairs: Sequence[Pair]) -> list[str]:
    """Say what stands in doubt, and what isn't there."""
    over_http = [it for it in pairs if it.key.driver == HTTP]
    lines = [
        *_doubt_of(
            over_http,
            ("load", "busiest_percent"),
            BUSY_LOADER,
            "The load itself may have been the limit",
            "Whether the load itself was the limit isn't told, for want of its CPU time",
        ),
        *_doubt_of(
            pairs,
            ("counters", "num_preemptions"),
            0.0,
            "Requests were preempted, for want of KV cache",
            "Whether requests were preempted isn't told, for want of a counter",
        ),
    ]
    sides = [side for pair in pairs for side in (pair.stock, pair.ours)]
    num_single = sum(len(side.rounds()) == 1 for side in sides)
    if num_single:
        lines.append(
            f"{num_single} of {len(sides)} measurements are of one round: "
            "what differs may be noise."
        )
    num_missing = sum(side.error is not None for pair in pairs for side in (pair.stock, pair.ours))
    if num_missing:
        lines.append(
            f'Missing: {num_missing} of {2 * len(pairs)} measurements: see "{MISSING_TITLE}".'
        )
    return lines


def _doubt_of(
    pairs: Sequence[Pair], path: Sequence[str], limit: float, doubt: str, unknown: str
) -> list[str]:
    """Say in which cases a figure is over a limit in a round, and where a round lacks it."""
    over: dict[str, None] = {}
    untold: dict[str, None] = {}
    for pair in pairs:
        for side in (pair.stock, pair.ours):
            found = side.each(*path)
            if any(it > limit for it in found):
                over[pair.label] = None
            if len(found) < len(side.rounds()):
                untold[pair.label] = None
    said = ((doubt, over), (unknown, untold))
    return [f"{text}: {listed(list(cases))}." for text, cases in said if cases]
