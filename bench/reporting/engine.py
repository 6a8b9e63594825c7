"""What an engine's own times say: how fast its steps are, and whether the GPU stood still."""

from dataclasses import dataclass
from typing import Any

from bench.reporting.cells import Row, Side
from bench.reporting.values import as_number, dig, median, names_of, numbers, text_of
from bench.serving.phases import ready_us

SPINNING = 0.8
"""Of the time of waits: a thread that takes more CPU time than this spins."""
ROLES = ("engine", "API server")
"""The processes that every server has."""
BUSY_THREAD = 90.0
"""Percent of a processor: a thread that takes more than this is the limit."""
NOT_TOLD = "not told"
LATE_SHARE = 0.5
"""Of the steps: a host that is late in fewer than that is in time in the median."""
QUANTILES = (("p10", 0.1), ("p50", 0.5), ("p90", 0.9), ("p99", 0.99))


def step_us(side: Side, streams: int) -> Any:
    """Return what a step takes in the round with the probe: the mean, or else the median."""
    requests = as_number(side.get("phases", "requests"))
    if requests is not None and requests != streams:
        return {"missing": "several engines share the streams"}
    mean = side.get("phases", "mean_period_us")
    return mean if as_number(mean) is not None else side.get("phases", "period_us", "p50")


def engine_rate(side: Side, streams: int) -> Any:
    """Return tokens a second by the engine's steps, in the round with the probe."""
    step = step_us(side, streams)
    found = as_number(step)
    return 1e6 * streams / found if found else step


def busiest_thread(side: Side, process: str) -> float | None:
    """Return the share of a processor of a process's busiest thread, in percent.

    None if it isn't known: what is listed leaves room for another thread.
    """
    return median(_busiest(entry, process) for entry in side.rounds())


def spun_share(side: Side) -> float:
    """Return the share of a processor that the engine's thread waits with, in percent."""
    spins = as_number(side.get("phases", "wait_spins"))
    medians = (as_number(side.get("phases", it, "p50")) for it in ("wait_us", "period_us"))
    wait_us, period_us = medians
    return 100 * spins * wait_us / period_us if spins and wait_us and period_us else 0.0


def processors(side: Side, process: str) -> float | None:
    """Return what all threads of a process take together, in percent of a processor."""
    return median(dig(entry, "cpu", "share", process, "percent") for entry in side.rounds())


def is_busy(side: Side, process: str) -> bool | None:
    """Return whether a thread of a process has all but a processor to itself; None if unknown."""
    total = processors(side, process)
    if total is not None and total <= BUSY_THREAD:
        return False
    share = busiest_thread(side, process)
    return None if share is None else share > BUSY_THREAD


def _busiest(entry: Row, role: str) -> float | None:
    process = dig(entry, "cpu", "share", role)
    known = as_number(dig(process, "busiest"))
    if known is not None:
        return known
    engines = dig(entry, "counters", "requests_by_engine")
    if isinstance(engines, dict) and len(engines) > 1:
        return None  # older results have threads of several processes added up alone
    threads = dig(process, "threads")
    listed = numbers(dig(threads, name) for name in names_of(threads))
    rest = unlisted_share(process)
    return None if rest is None or not listed or rest > max(listed) else max(listed)


def unlisted_share(process: Any) -> float | None:
    """Return what a process takes beside the threads that are listed, or None if unknown."""
    total = as_number(dig(process, "percent"))
    threads = dig(process, "threads")
    if total is None or not isinstance(threads, dict):
        return None
    return max(0.0, total - sum(numbers(threads.values())))


# ---- between steps ----


@dataclass(frozen=True)
class Gap:
    """For how long the GPU had nothing to do between two steps, by the host's times."""

    us: Any
    """Median, or why there is none."""
    late: tuple[float, float] | None
    """Which share of the steps found the result there already: at least, at most. None: unknown."""
    is_told: bool = True
    """Whether the host's times tell."""

    @property
    def text(self) -> str:
        """The gap in µs, as in tables."""
        return text_of(self.us) if self.is_told else NOT_TOLD

    @property
    def late_text(self) -> str:
        """The share of late steps, as in tables."""
        if self.late is None:
            return text_of(None) if self.is_told else NOT_TOLD
        least, most = self.late
        if least == most:
            return text_of(most, " %", 100)
        return f"{100 * least:.0f} to {100 * most:.0f} %" if least else f"under {100 * most:.0f} %"


UNTOLD = Gap(None, None, is_told=False)


def gap_of(side: Side, streams: int) -> Gap:
    """Return the estimate of the gap.

    Results without `untold_share` took a wait of 20 µs for proof that the host was in time, but a
    result that is there already takes as long. Of these only what the quantiles of waits say for
    sure is used.
    """
    estimate = side.get("phases", "gap_estimate")
    late = as_number(dig(estimate, "host_late_share"))
    us = dig(estimate, "us", "p50")
    untold = dig(estimate, "untold_share")
    if as_number(untold) is not None and as_number(us) is None:
        return UNTOLD
    if as_number(untold) is not None or dig(estimate, "is_bound") is not True:
        return Gap(us, None if late is None else (late, late))
    return _gap_by_quantiles(side, streams)


def _gap_by_quantiles(side: Side, streams: int) -> Gap:
    spins = as_number(side.get("phases", "wait_spins"))
    waits = [(share, as_number(side.get("phases", "wait_us", it))) for it, share in QUANTILES]
    if spins is None or any(wait is None for _, wait in waits):
        return Gap(None, None)
    short = [share for share, wait in waits if wait is not None and wait <= ready_us(streams)]
    least = max(short, default=0.0)
    if spins >= SPINNING or least >= LATE_SHARE:
        return UNTOLD
    return Gap(0.0, (least, min(share for share, _ in waits if share > least)))
