"""How long does a GPU stand idle between its kernels? By a trace of vLLM's own profiler.

Only the GPU's work is recorded, not the host's calls: that costs the host little.
"""

import gzip
import json
import time
import urllib.request
from pathlib import Path
from threading import Thread
from typing import Any

from bench.serving.evaluate import missing, summary

Row = dict[str, Any]

TRACED_S = 1.5
EDGE = 0.1
"""The share of a trace that is left out at each end, where the profiler itself is at work."""
SHORTEST_GAP_US = 50.0
"""What is longer isn't a gap between the kernels of one step."""
GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
JSON = {"Content-Type": "application/json"}
LIMIT_S = 120.0
"""For a request to the server, which writes the trace before it answers."""


def arguments_of(directory: Path) -> str:
    """Return what `vllm serve` needs, so that traces can be written to a directory."""
    config = {
        "profiler": "torch",
        "torch_profiler_dir": str(directory),
        "torch_profiler_activities": ["CUDA"],
        "torch_profiler_with_stack": False,
        "torch_profiler_dump_cuda_time_total": False,
        "ignore_frontend": True,
    }
    return f"--profiler-config='{json.dumps(config)}'"


class GpuTrace(Thread):
    """Takes a trace while others go on."""

    def __init__(self, port: int, directory: Path) -> None:
        """Prepare it, of a server that was started with `arguments_of(directory)`."""
        super().__init__(daemon=True)
        self._port = port
        self._directory = directory
        self._before = set(directory.glob("*"))
        self._error: OSError | None = None

    def run(self) -> None:
        """Start the profiler, and stop it after a while."""
        try:
            self._post("start_profile")
            time.sleep(TRACED_S)
            self._post("stop_profile")
        except OSError as error:
            self._error = error

    def _post(self, name: str) -> None:
        url = f"http://127.0.0.1:{self._port}/{name}"
        with urllib.request.urlopen(urllib.request.Request(url, b"{}", JSON), timeout=LIMIT_S):
            pass

    def evaluate(self) -> Row:
        """Wait for the trace; return how idle the GPU was, or why nobody knows."""
        self.join()
        if self._error is not None:
            return missing(f"the server can't be profiled: {self._error}")
        paths = sorted(set(self._directory.glob("*.trace.json*")) - self._before)
        if not paths:
            return missing("the profiler has written no trace")
        is_packed = paths[0].suffix == ".gz"
        data = paths[0].read_bytes()
        return idle_time(json.loads(gzip.decompress(data) if is_packed else data)["traceEvents"])


def idle_time(events: list[Row]) -> Row:
    """Return for what share of a trace no kernel and no copy ran, and the gaps between steps.

    Args:
        events: As of a Chrome trace: `ts` and `dur` in microseconds.

    """
    work = sorted((it["ts"], it["ts"] + it["dur"]) for it in events if it.get("cat") in GPU_WORK)
    if not work:
        return missing("the trace has no GPU's work in it")
    first, last = work[0][0], max(end for _, end in work)
    start, end = first + EDGE * (last - first), last - EDGE * (last - first)
    gaps, busy_until = [], start
    for begin, until in [*work, (end, end)]:
        gap = min(begin, end) - busy_until
        if gap > 0:
            gaps.append(gap)
        busy_until = max(busy_until, until)
    long_gaps_ms = [gap / 1e3 for gap in gaps if gap >= SHORTEST_GAP_US]
    return {
        "idle_percent": 100 * sum(gaps) / (end - start),
        "traced_s": (end - start) / 1e6,
        "gap_ms": summary(long_gaps_ms) if long_gaps_ms else None,
    }
