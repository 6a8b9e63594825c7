"""Made-up measurements whose figures are known."""

from typing import Any

import numpy as np

from bench.serving.streams import StreamLog

Row = dict[str, Any]


def stream_logs(num_streams: int, num_tokens: int, itl_ms: float) -> list[StreamLog]:
    """Return streams that get a token every `itl_ms`, sent at 0, the first one after 20 ms."""
    times = 0.020 + itl_ms / 1000 * np.arange(num_tokens)
    return [
        StreamLog(0.0, times + 1e-6 * number, np.ones(num_tokens, dtype=np.int64))
        for number in range(num_streams)
    ]


PERIOD_US = 1500.0


def noted_steps(
    sizes: list[tuple[int, int]], wait_us: float = 1000.0, wait_cpu_us: float = 0.0
) -> list[tuple[int, ...]]:
    """Return what the engine's probe would have noted of steps of these sizes, all alike.

    The loop's thread works whenever it doesn't wait.
    """
    cpu_us = PERIOD_US - wait_us + wait_cpu_us
    each_ns = [round(1000 * us) for us in (PERIOD_US, cpu_us, wait_us, wait_cpu_us)]
    return [(*size, *(number * ns for ns in each_ns)) for number, size in enumerate(sizes)]


def cell(scheduler: str, **changes: Any) -> Row:
    """Return a cell as `bench.serving.decode` keeps it; ours is twice as good as vLLM's."""
    factor = 1 if scheduler == "stock" else 2
    rounds = [
        {
            "tokens_per_s": 12_345.6 * factor * share,
            "merged_share": 0.0,
            "output_gap_ms": {"p50": 4.0 / factor, "p99": 8.0 / factor},
            "cpu": {
                "share": {"API server": {"percent": 60.0, "busiest": 55.0}},
                "us_per_token": {"engine": 50.04 / factor, "API server": 9.96 / factor},
            },
        }
        for share in (0.9, 1.0, 1.1)
    ]
    return {
        "model": "gpt-oss-20b",
        "scheduler": scheduler,
        "mode": "async",
        "visit": 0,
        "cores": "all",
        "concurrency": 64,
        "driver": "http",
        "output_tokens": [384, 384],
        "rounds": rounds,
        "phases": {"wait_us": {"p50": 500.0}, "mean_period_us": 4000.0},
    } | changes


def result(**changes: Any) -> Row:
    """Return a result with one pair of cells, which have these changes."""
    run = {"date": "2026-01-01 10:00 UTC", "commit": "0" * 12, "cpu": "a CPU", "cores": 16}
    run |= {"gpu": "a GPU", "options": "--model x --json FILE --rounds 3"}
    cells = [cell(scheduler, **changes) for scheduler in ("stock", "sparksched")]
    return {"kind": "decode", "run": run, "runs": [run], "cells": cells, "streams": []}
