"""What is read of a profiler's trace."""

import gzip
import json
import os
from pathlib import Path

import pytest
from synthetic import KERNELS, Row, trace_events

from bench.serving.trace import (
    NoTraceError,
    classify,
    evaluate_trace,
    find_trace,
    read_events,
)

BUSY_US = 3 * sum(taken for _, taken in KERNELS)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("gap_us", [0.0, 7.0, 900.0])
def test_gaps_between_steps_are_found(gap_us: float, is_async: bool) -> None:
    found = evaluate_trace(trace_events(10, 300.0, gap_us, is_async=is_async), num_requests=4)
    assert found["gap_us"]["p50"] == pytest.approx(gap_us)
    assert found["gpu_busy_us"]["p50"] == pytest.approx(BUSY_US)
    assert found["gpu_step_us"]["p50"] == pytest.approx(BUSY_US + gap_us)
    assert found["gpu_busy_share"] == pytest.approx(BUSY_US / (BUSY_US + gap_us))
    assert found["steps"] == 8


def test_kernels_and_launches_are_counted_by_step_and_token() -> None:
    found = evaluate_trace(trace_events(10, 300.0, 5.0), num_requests=4)
    assert found["kernels_per_step"] == 3 * len(KERNELS)
    assert found["kernels_per_token"] == 3 * len(KERNELS) / 4
    assert found["graph_launches_per_step"] == 2
    assert found["launches_per_step"] == 1


def test_shares_are_those_of_the_kernels_time() -> None:
    shares = evaluate_trace(trace_events(10, 300.0, 5.0), num_requests=1)["shares"]
    assert shares == pytest.approx(
        {
            "attention": 0.20,
            "MoE": 0.50,
            "matrix products": 0.25,
            "sampling": 0.05,
            "copies": 0.0,
            "other": 0.0,
        }
    )


def test_a_copy_beside_a_kernel_is_no_time_of_its_own() -> None:
    events = trace_events(10, 300.0, 5.0)
    copies = [
        {**event, "cat": "gpu_memcpy", "name": "Memcpy DtoH"}
        for event in events
        if event["cat"] == "kernel"
    ]
    found = evaluate_trace(events + copies, num_requests=1)
    assert found["gpu_busy_us"]["p50"] == pytest.approx(BUSY_US)
    assert found["shares"]["copies"] == pytest.approx(0.5)


def test_a_copy_between_two_steps_is_no_kernel() -> None:
    events = trace_events(10, 300.0, gap_us=50.0)
    marks = [it for it in events if it["name"].startswith("execute_")]
    copies = []
    for number, mark in enumerate(marks):
        # Launched with the step, and done long before its first kernel.
        launch = {"cat": "cuda_runtime", "name": "cudaMemcpyAsync", "ts": mark["ts"] + 1, "dur": 1}
        copy = {"cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": mark["ts"] + 5, "dur": 2}
        arguments = {"args": {"correlation": -1 - number}, "ph": "X"}
        copies += [launch | arguments, copy | arguments]
    assert evaluate_trace(events + copies, 1)["gap_us"]["p50"] == pytest.approx(50.0)


def test_the_timeline_has_both_lanes_on_one_scale() -> None:
    timeline = evaluate_trace(trace_events(10, 300.0, 5.0), num_requests=1)["timeline"]
    assert {name for name, *_ in timeline["host"]} == {"schedule", "execute"}
    assert {name for name, *_ in timeline["gpu"]} >= {"attention", "MoE"}
    assert all(0 <= start <= end for lane in timeline.values() for _, start, end in lane)


@pytest.mark.parametrize(
    "events",
    [
        [],
        [event for event in trace_events(10, 300.0, 5.0) if event["cat"] != "kernel"],
        trace_events(3, 300.0, 5.0),
    ],
    ids=["nothing", "no kernels", "too few steps"],
)
def test_a_trace_that_says_nothing_is_refused(events: list[Row]) -> None:
    with pytest.raises(NoTraceError):
        evaluate_trace(events, num_requests=1)


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ("_ZN5flash19flash_fwd_kernel", "attention"),
        ("kernel_unified_attention_2d", "attention"),
        ("reshape_and_cache_flash_kernel", "attention"),
        ("_matmul_ogs_NNT_bf16xbf16xmxfp4_128x256", "MoE"),
        ("fused_moe_kernel", "MoE"),
        ("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT", "matrix products"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16>", "matrix products"),
        ("_gumbel_sample_kernel", "sampling"),
        ("triton_poi_fused_add_rms_norm_0", "other"),
    ],
)
def test_kernels_are_classed_by_name(kernel: str, expected: str) -> None:
    assert classify(kernel) == expected


def test_the_newest_trace_with_just_this_prefix_is_read(tmp_path: Path) -> None:
    for name, age in (("c1_rank0.1", 20), ("c1_rank0.2", 10), ("c16_rank0.3", 0)):
        path = tmp_path / f"{name}.pt.trace.json.gz"
        with gzip.open(path, "wt") as file:
            json.dump({"traceEvents": [{"name": name}]}, file)
        os.utime(path, (1000 - age, 1000 - age))
    assert read_events(find_trace(tmp_path, "c1")) == [{"name": "c1_rank0.2"}]
    with pytest.raises(NoTraceError):
        find_trace(tmp_path, "c256")


@pytest.mark.parametrize("content", [b"", b"\x1f\x8b\x08 cut short", b"no gzip at all"])
def test_a_broken_trace_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "c1_rank0.pt.trace.json.gz"
    path.write_bytes(content)
    with pytest.raises(NoTraceError):
        read_events(path)
