"""What the GPU did in a few steps, from the trace of torch's profiler.

A step's kernels are those that were launched from the beginning of its `execute_model()` until the
next one's: vLLM marks that call in the trace. With asynchronous scheduling the host is a step
ahead, so kernels are matched with their launches and not with the time at which they ran.
"""

import bisect
import gzip
import itertools
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.serving.engine_probe import MARK
from bench.serving.evaluate import summary

Row = dict[str, Any]

STEP_MARK = "execute_"
GPU_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH_KINDS = ("cuda_runtime", "cuda_driver")
GRAPH_LAUNCH = re.compile(r"GraphLaunch")
KERNEL_LAUNCH = re.compile(r"LaunchKernel")

MOE, ATTENTION, SAMPLING, GEMM, COPIES, OTHER = CLASSES = (
    "MoE",
    "attention",
    "sampling",
    "matrix products",
    "copies",
    "other",
)
PATTERNS = (  # the first that matches
    (
        MOE,
        r"moe|expert|matmul_ogs|mxfp4|grouped_gemm|group_gemm|routing|topk_gating|swiglu"
        r"|_combined_routing|ragged|finalize_scatter|bitmatrix",
    ),
    (ATTENTION, r"attn|attention|flash|fmha|reshape_and_cache|paged|merge_states|rotary|rope"),
    (SAMPLING, r"sampl|gumbel|argmax|arg_max|logits|top_k|topk|top_p|penalt|temperature|cumsum"),
    (GEMM, r"gemm|gemv|nvjet|cutlass|cublas|splitk|matmul|wgmma|xmma|linear"),
)
NUM_TOP_KERNELS = 15
MAX_NAME = 80
NUM_TIMELINE_STEPS = 3
JOIN_US = 1.0
"""Kernels of one class that follow closer than this are one bar of the timeline."""


class NoTraceError(RuntimeError):
    """There is no trace that tells of the GPU."""


@dataclass(frozen=True)
class GpuWork:
    """A kernel or a copy."""

    name: str
    kind: str
    start: float
    """In µs, as all times here."""
    end: float
    step: int
    """The step that launched it; -1: before the first."""

    @property
    def work_class(self) -> str:
        """Return what it is for, as far as its name tells."""
        return COPIES if self.kind != "kernel" else classify(self.name)


def classify(kernel: str) -> str:
    """Return the class of a kernel by its name."""
    for name, pattern in PATTERNS:
        if re.search(pattern, kernel, re.IGNORECASE):
            return name
    return OTHER


def find_trace(directory: Path, prefix: str) -> Path:
    """Return the trace of a worker that was written last with this prefix.

    Raises:
        NoTraceError: if there is none.

    """
    found = sorted(directory.glob(f"{prefix}_*.json*"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise NoTraceError("the profiler has written no trace")
    return found[-1]


def read_events(path: Path) -> list[Row]:
    """Return the events of a trace file.

    Raises:
        NoTraceError: if it can't be read.

    """
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            events: list[Row] = json.load(file)["traceEvents"]
            return events
    except (OSError, ValueError, KeyError, TypeError, EOFError, zlib.error) as error:
        raise NoTraceError(f"the profiler's trace can't be read: {error}") from error


def evaluate_trace(events: list[Row], num_requests: int) -> Row:
    """Return what the GPU did in the trace's steps.

    Args:
        events: The `traceEvents`.
        num_requests: Requests that decode side by side: tokens a step.

    Raises:
        NoTraceError: if there are no kernels in it, or fewer than three steps.

    """
    marks = sorted(
        event["ts"]
        for event in events
        if event.get("cat") == "user_annotation" and event.get("name", "").startswith(STEP_MARK)
    )
    launches = [event for event in events if event.get("cat") in LAUNCH_KINDS]
    work = _gpu_work(events, launches, marks)
    if not any(it.kind == "kernel" for it in work):
        raise NoTraceError("there are no kernels in the profiler's trace")
    steps = _complete_steps(work, len(marks))
    if len(steps) < 3:
        raise NoTraceError(f"the profiler's trace has only {len(steps)} complete steps")
    inside = [it for it in work if it.step in steps]
    busy = [
        sum(end - start for start, end in _union(it for it in work if it.step == step))
        for step in steps
    ]
    return {
        "steps": len(steps),
        "gap_us": summary(_gaps(work, steps)),
        "gpu_busy_us": summary(busy),
        "gpu_step_us": summary(_periods(work, steps)),
        "gpu_busy_share": _busy_share(work, steps),
        "kernels_per_step": sum(it.kind == "kernel" for it in inside) / len(steps),
        "kernels_per_token": sum(it.kind == "kernel" for it in inside) / len(steps) / num_requests,
        "launches_per_step": _launches(launches, KERNEL_LAUNCH, marks, steps),
        "graph_launches_per_step": _launches(launches, GRAPH_LAUNCH, marks, steps),
        "shares": _shares(inside),
        "top_kernels": _top_kernels(inside),
        "timeline": _timeline(events, work, steps),
    }


def _gpu_work(events: list[Row], launches: list[Row], marks: list[float]) -> list[GpuWork]:
    """Return what ran on the GPU, in the order of its begin, each with the step it belongs to."""
    launched_at = {
        event["args"]["correlation"]: event["ts"]
        for event in launches
        if "correlation" in event.get("args", {})
    }
    work = []
    for event in events:
        if event.get("cat") not in GPU_KINDS:
            continue
        launch = launched_at.get(event.get("args", {}).get("correlation"))
        step = -1 if launch is None else bisect.bisect_right(marks, launch) - 1
        end = event["ts"] + event["dur"]
        work.append(GpuWork(event["name"], event["cat"], event["ts"], end, step))
    return sorted(work, key=lambda it: it.start)


def _complete_steps(work: list[GpuWork], num_marks: int) -> list[int]:
    """Return the steps that have kernels, but for the first and the last: they may lack some."""
    with_kernels = {it.step for it in work if it.kind == "kernel"}
    return [step for step in range(1, num_marks - 1) if step in with_kernels]


def _first_start(work: list[GpuWork], step: int) -> float:
    return min(it.start for it in work if it.step == step and it.kind == "kernel")


def _gaps(work: list[GpuWork], steps: list[int]) -> list[float]:
    """Return for how long no kernel ran between the last one of a step and the next's first."""
    gaps = []
    for step, following in itertools.pairwise(steps):
        if following != step + 1:
            continue
        begin = _first_start(work, following)
        last = max(it.end for it in work if it.kind == "kernel" and it.step <= step)
        gaps.append(max(0.0, begin - last))
    return gaps


def _periods(work: list[GpuWork], steps: list[int]) -> list[float]:
    starts = {step: _first_start(work, step) for step in steps}
    return [
        starts[following] - starts[step]
        for step, following in itertools.pairwise(steps)
        if following == step + 1
    ]


def _union(work: Iterable[GpuWork]) -> list[tuple[float, float]]:
    """Return the times in which anything ran, without overlap."""
    merged: list[tuple[float, float]] = []
    for it in sorted(work, key=lambda it: it.start):
        if merged and it.start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], it.end))
        else:
            merged.append((it.start, it.end))
    return merged


def _busy_share(work: list[GpuWork], steps: list[int]) -> float:
    start, end = _first_start(work, steps[0]), _first_start(work, steps[-1])
    busy = sum(max(0.0, min(last, end) - max(first, start)) for first, last in _union(work))
    return busy / (end - start)


def _launches(
    launches: list[Row], pattern: re.Pattern[str], marks: list[float], steps: list[int]
) -> float:
    counted = Counter(
        bisect.bisect_right(marks, event["ts"]) - 1
        for event in launches
        if pattern.search(event["name"])
    )
    return sum(counted[step] for step in steps) / len(steps)


def _shares(work: list[GpuWork]) -> Row:
    """Return the share of each class in the time that kernels and copies took."""
    taken = dict.fromkeys(CLASSES, 0.0)
    for it in work:
        taken[it.work_class] += it.end - it.start
    total = sum(taken.values())
    return {name: spent / total for name, spent in taken.items()}


def _top_kernels(work: list[GpuWork]) -> list[Row]:
    taken: Counter[str] = Counter()
    for it in work:
        taken[it.name] += it.end - it.start  # type: ignore[assignment]
    total = sum(taken.values())
    classes = {it.name: it.work_class for it in work}
    return [
        {"name": name[:MAX_NAME], "class": classes[name], "share": spent / total}
        for name, spent in taken.most_common(NUM_TOP_KERNELS)
    ]


def _timeline(events: list[Row], work: list[GpuWork], steps: list[int]) -> Row:
    """Return the host's phases and the GPU's work in a few steps: name, begin and end in µs."""
    middle = max(0, len(steps) // 2 - 1)
    chosen = steps[middle : middle + NUM_TIMELINE_STEPS + 1]
    start, end = _first_start(work, chosen[0]), _first_start(work, chosen[-1])
    phases = [
        (event["name"].removeprefix(MARK), event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") == "user_annotation" and event.get("name", "").startswith(MARK)
    ]
    bars: list[tuple[str, float, float]] = []
    for it in work:
        if bars and bars[-1][0] == it.work_class and it.start - bars[-1][2] < JOIN_US:
            bars[-1] = (bars[-1][0], bars[-1][1], max(bars[-1][2], it.end))
        else:
            bars.append((it.work_class, it.start, it.end))
    return {"host": _between(phases, start, end), "gpu": _between(bars, start, end)}


def _between(bars: list[tuple[str, float, float]], start: float, end: float) -> list[list[Any]]:
    return [
        [name, round(max(first, start) - start, 2), round(min(last, end) - start, 2)]
        for name, first, last in sorted(bars, key=lambda bar: bar[1])
        if last > start and first < end
    ]
