"""From logs of streams to figures: rates and times between outputs."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.serving.streams import StreamLog

Row = dict[str, Any]
Floats = npt.NDArray[np.float64]


class NothingMeasuredError(RuntimeError):
    """A round has brought nothing that could be evaluated."""


def missing(reason: str) -> Row:
    """Return what stands in results for a figure that there is not."""
    return {"missing": reason}


def summary(values: Sequence[float] | Floats) -> Row:
    """Return percentiles, extremes and count of some values; or why there are none."""
    found = np.asarray(values, dtype=np.float64)
    if not found.size:
        return missing("nothing was recorded")
    p10, p50, p90, p99 = np.percentile(found, (10, 50, 90, 99))
    return {
        "p10": float(p10),
        "p50": float(p50),
        "p90": float(p90),
        "p99": float(p99),
        "max": float(found.max()),
        "count": int(found.size),
    }


def evaluate(logs: Sequence[StreamLog]) -> Row:
    """Return the figures of a round, of the time in which all of its streams decode.

    That is from the moment when the last one has its first token until the first one has its last.

    Raises:
        NothingMeasuredError: if there is no such time, or a stream has got nothing.

    """
    if not logs or any(not log.times.size for log in logs):
        raise NothingMeasuredError("a stream has got nothing")
    start, end = window_of(logs)
    between_ms, num_tokens, num_outputs = _outputs_between(logs, start, end)
    if not num_tokens or end <= start:
        raise NothingMeasuredError("no token came while all streams ran")
    return {
        "start_s": start,
        "end_s": end,
        "tokens": num_tokens,
        "tokens_per_s": num_tokens / (end - start),
        "merged_share": 1 - num_outputs / num_tokens,
        "output_gap_ms": summary(between_ms),
    }


def window_of(logs: Sequence[StreamLog]) -> tuple[float, float]:
    """Return from when until when all streams decode, in seconds."""
    start = max(float(log.times[0]) for log in logs)
    end = min(float(log.times[-1]) for log in logs)
    if end <= start:
        raise NothingMeasuredError(
            "the first stream had ended before the last one began; streams of more tokens would "
            "be side by side for longer"
        )
    return start, end


def tokens_between(logs: Sequence[StreamLog], start: float, end: float) -> int:
    """Count tokens that came after one moment and not after another."""
    return sum(int(log.num_tokens[(log.times > start) & (log.times <= end)].sum()) for log in logs)


def _outputs_between(
    logs: Sequence[StreamLog], start: float, end: float
) -> tuple[Floats, int, int]:
    """Return the times between outputs in ms, and tokens and outputs, within a window."""
    gaps: list[Floats] = []
    num_tokens = num_outputs = 0
    for log in logs:
        is_inside = (log.times > start) & (log.times <= end)
        num_tokens += int(log.num_tokens[is_inside].sum())
        num_outputs += int(is_inside.sum())
        has_both = (log.times[:-1] >= start) & (log.times[1:] <= end)
        gaps.append(1e3 * np.diff(log.times)[has_both])
    return np.concatenate(gaps), num_tokens, num_outputs
