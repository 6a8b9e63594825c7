"""Made-up measurements whose figures are known: traces of a GPU, and results of `bench.decode`."""

from collections.abc import Sequence
from typing import Any

from bench.serving.evaluate import evaluate
from bench.serving.garbage import Collection
from bench.serving.lateness import Call
from bench.serving.phases import evaluate_messages, evaluate_phases
from bench.serving.streams import StreamLog
from bench.serving.trace import evaluate_trace

Row = dict[str, Any]

KERNELS = (
    ("flash_fwd_splitkv_kernel", 40.0),
    ("_matmul_ogs_NNT_bf16xbf16xmxfp4", 100.0),
    ("nvjet_tst_128x64", 50.0),
    ("triton_red_fused_argmax", 10.0),
)
"""A layer's kernels and how long each takes, in µs."""


def trace_events(
    num_steps: int, host_us: float, gap_us: float, num_layers: int = 3, is_async: bool = True
) -> list[Row]:
    """Return the events of a trace: `gap_us` between steps, two graph launches in each."""
    events: list[Row] = []
    correlation = 0
    gpu_at = 1000.0
    step_us = num_layers * sum(taken for _, taken in KERNELS) + gap_us
    for step in range(num_steps):
        ahead = step_us if is_async else 0.0
        host_at = 1000.0 + step * step_us - host_us - ahead
        events.append(_host("bench:schedule", host_at - 60, 50))
        events.append(_host(f"execute_context_0(0)_generation_{step}", host_at, host_us / 2))
        events.append(_host("bench:execute", host_at, host_us / 2))
        for layer in range(num_layers):
            correlation += 1
            name = "cudaGraphLaunch" if layer < 2 else "cudaLaunchKernel"
            at = host_at + 1 + layer
            events.append(_event("cuda_runtime", name, at, 1, correlation))
            for kernel, taken in KERNELS:
                events.append(_event("kernel", kernel, gpu_at, taken, correlation))
                gpu_at += taken
        gpu_at += gap_us
    return events


def _host(name: str, start: float, duration: float) -> Row:
    return {"cat": "user_annotation", "name": name, "ts": start, "dur": duration, "ph": "X"}


def _event(kind: str, name: str, start: float, duration: float, correlation: int) -> Row:
    arguments = {"correlation": correlation}
    return {"cat": kind, "name": name, "ts": start, "dur": duration, "args": arguments, "ph": "X"}


def stream_logs(num_streams: int, num_tokens: int, itl_ms: float) -> list[StreamLog]:
    """Return streams that get a token every `itl_ms`, sent at 0, the first one after 20 ms."""
    import numpy as np

    times = 0.020 + itl_ms / 1000 * np.arange(num_tokens)
    return [
        StreamLog(0.0, times + 1e-6 * number, np.ones(num_tokens, dtype=np.int64))
        for number in range(num_streams)
    ]


US = {
    "schedule": 100.0,
    "execute": 200.0,
    "sample": 50.0,
    "wait": 1000.0,
    "update": 40.0,
    "deliver": 10.0,
    "other": 30.0,
}
"""Phases of a step, in microseconds."""


def recorded_phases(
    num_requests: int, num_steps: int, us: dict[str, float], is_async: bool = True
) -> Row:
    """Return what the engine's probe would have recorded, with these phases in each step.

    A wait is sleep, but for the CPU time `wait_cpu`.
    """
    events, sizes = [], []
    at = 0
    order = ("schedule", "execute", "sample", "wait", "update", "deliver")
    for _ in range(num_steps):
        sizes.append((num_requests, num_requests))
        for phase in order:
            end = at + round(1000 * us[phase])
            cpu_us = us.get("wait_cpu", 0.0) if phase == "wait" else 0.0
            events.append((phase, at, end, 0, round(1000 * cpu_us)))
            at = end
        at += round(1000 * us.get("other", 0.0))
    encodings = [(round(1000 * us["encode"]), 0)] * num_steps if "encode" in us else []
    return {"events": events, "sizes": sizes, "encodings": encodings}


def cell(scheduler: str, count: int, driver: str, itl_ms: float, us: dict[str, float]) -> Row:
    """Return a cell as `bench.decode` keeps it, of a machine with a GPU."""
    logs = stream_logs(count, 64, itl_ms)
    rounds = []
    for factor in (0.98, 1.0, 1.02):
        entry = evaluate(stream_logs(count, 64, itl_ms * factor), is_steady=True)
        threads = {"MainThread": 50.0, "process_output_sockets": 5.0}
        share = {it: {"percent": 55.0, "threads": dict(threads)} for it in ("API server", "engine")}
        entry["cpu"] = {"share": share, "us_per_token": {"API server": 9.0, "engine": 12.0}}
        entry["counters"] = {"prefix_cache_hits": 0.0, "prefix_cache_queries": 128.0}
        entry["counters"]["num_preemptions"] = 0.0
        entry["load"] = {"processes": 1, "percent": 20.0, "busiest_percent": 20.0}
        rounds.append(entry)
    recorded = recorded_phases(count, 20, us)
    client = {
        "messages": [(count, 150_000, Call(0, 40_000, 40_000))] * len(logs),
        "processing": [Call(0, 60_000, 60_000)] * 20,
        "handed": [(count, 200_000)] * 20,
        "collections": [],
    }
    messages = evaluate_messages({"engine": recorded, "client": client}, count)
    found = {
        "rounds": rounds,
        "phases": evaluate_phases(recorded, count, is_async=True),
        "messages": {name: it for name, it in messages.items() if name not in OF_LATE_MESSAGES},
        "spinners": [],
        "memory": {
            "least_gb": 5.0,
            "even_gb": 60.0,
            "least_gb_s": 1200.0,
            "even_gb_s": 4000.0,
            "peak_gb_s": 4800.0,
            "least_share": 0.25,
            "even_share": 0.83,
        },
    }
    return key(scheduler, "async") | _case(count, driver) | {"run": 0} | found


def key(scheduler: str, mode: str) -> Row:
    """Return the key of a server."""
    return {"model": "gpt-oss-20b", "scheduler": scheduler, "mode": mode, "visit": 0}


def _case(count: int, driver: str) -> Row:
    return {"cores": "all", "workload": "decode", "concurrency": count, "driver": driver}


def result(counts: tuple[int, ...] = (1, 64, 256)) -> Row:
    """Return a whole result: the host limits vLLM with many streams, and never sparksched."""
    cells, traces = [], []
    for scheduler, scale in (("stock", 1.0), ("sparksched", 0.05)):
        for count in counts:
            us = {
                "schedule": scale * (40 + 9 * count),
                "execute": 500.0,
                "sample": 300.0,
                "update": scale * (20 + 5 * count),
                "deliver": 3.0,
                "other": 50.0,
            }
            host = sum(us.values())
            gpu = 3.0 * sum(taken for _, taken in KERNELS) * 3
            us["wait"] = max(5.0, gpu - host)
            us["wait_cpu"] = 5.0
            if scheduler == "stock":
                us["encode"] = 30.0
            itl_ms = max(host + 5.0, gpu) / 1000
            cells += [cell(scheduler, count, it, itl_ms, us) for it in ("asyncllm", "http")]
            events = trace_events(12, host, max(2.0, host - gpu), num_layers=9)
            trace = evaluate_trace(events, count)
            traces.append(key(scheduler, "async") | {"concurrency": count, "run": 0} | trace)
    run = {"date": "2026-01-01", "commit": "0" * 12, "cpu": "a CPU", "gpu": "NVIDIA H200"}
    return {
        "kind": "decode",
        "run": run,
        "runs": [run],
        "servers": [
            key(it, "async")
            | {"run": 0, "start_s": 30.0, "transport": "rings", "engine": {}, "idle_cpu": {}}
            for it in ("stock", "sparksched")
        ],
        "cells": cells,
        "traces": traces,
        "streams": [],
    }


# ---- what newer benchmarks keep ----

OF_LATE_MESSAGES = ("decode_cpu_us", "process_cpu_us", "late", "collections")
SPREAD = {"p10": 1.0, "p50": 2.0, "p90": 3.0, "p99": 4.0, "max": 5.0, "count": 20}


def on_several_gpus(layout: str) -> Row:
    """Return a result of a model that is spread over GPUs; all of both sides' figures differ."""
    found = result((64,))
    for row in (*found["cells"], *found["servers"]):
        row["model"] += f", {layout}"
    found["traces"] = []
    for row in found["cells"]:
        _split(row, layout, is_stock=row["scheduler"] == "stock")
    for row in found["servers"]:
        is_stock = row["scheduler"] == "stock"
        row["engine"] = {
            "executor": "vllm.v1.executor.multiproc_executor.MultiprocExecutor",
            "is_async": True,
            "model_runner": "V1" if is_stock else "V2",
            "max_concurrent_batches": 3 if is_stock else 4,
            "experts": "whole" if is_stock else "in parts",
        }
    found["streams"] = [compared("stock", layout), compared("sparksched", layout)]
    return found


def _split(row: Row, layout: str, is_stock: bool) -> None:
    row["is_held"] = "PP" in layout
    for number, entry in enumerate(row["rounds"]):
        more = 32 + number if is_stock else 40
        engines = {"1": 64.0 - more, "0": float(more)} if "DP" in layout else {"0": 64.0}
        entry["counters"]["requests_by_engine"] = engines
        if "PP" in layout:
            entry["turns"] = [[33.0, 31.0] if is_stock else [34.5, 29.5]] * len(engines)
    row["phases"]["requests"] = 31.5 if is_stock else 31.0
    row["phases"]["peer_us"] = SPREAD | {"p50": 41.0 if is_stock else 51.0, "p99": 410.0}
    row["phases"]["dummy_us"] = SPREAD | {"p50": 0.0, "p99": 61.0 if is_stock else 71.0}
    row["engine_cpu"] = {
        "loop_us_per_token": 21.0 if is_stock else 11.0,
        "waiting_us_per_token": 16.0 if is_stock else 8.0,
        "working_us_per_token": 5.0 if is_stock else 3.0,
        "other_threads_us_per_token": 2.5 if is_stock else 1.5,
        "without_waiting_us_per_token": 7.5 if is_stock else 4.5,
    }


def calls(us: Sequence[float], cpu_us: Sequence[float]) -> list[Call]:
    """Return calls that took so long, one each 10 ms."""
    return [
        Call(10_000_000 * number, round(1000 * wall), round(1000 * cpu))
        for number, (wall, cpu) in enumerate(zip(us, cpu_us, strict=True))
    ]


def with_late_messages() -> Row:
    """Return a result in which a few of 20 messages were late; both sides' figures differ.

    vLLM's decoder: once for 1,000 µs more, of which 600 went to a full collection, and in 300 its
    thread didn't run. sparksched's: never; its output processor twice for 200 µs, all of it work.
    """
    found = result((64,))
    usual = [100.0] * 18
    full = Collection(180_100_000, 600_000, 600_000, 2)
    young = Collection(5_000_000, 40_000, 40_000, 0)
    for row in found["cells"]:
        is_stock = row["scheduler"] == "stock"
        slow, quick = calls([*usual, 1100, 100], [*usual, 800, 100]), calls(usual, usual)
        busy = calls([*usual, 200, 200], [*usual, 200, 200])
        decoding, processing = (slow, quick) if is_stock else (quick, busy)
        client = {
            "messages": [(64, 150_000, it) for it in decoding],
            "processing": processing,
            "handed": [(64, 200_000)],
            "collections": [young, full] if is_stock else [young],
        }
        recorded = {"engine": {"encodings": []}, "client": client}
        messages = evaluate_messages(recorded, 64)
        row["messages"] |= {name: messages[name] for name in OF_LATE_MESSAGES}
        row["messages"] |= {it: messages[it] for it in ("decode_us", "process_us")}
    return found


SAMPLED_DIGESTS = {
    "stock": [["a", "b", "c", "d", "e"], ["a", "b", "c", "d", "x"]],
    "sparksched": [["a", "b", "c", "y", "z"], ["a", "b", "u", "v", "w"]],
}
GREEDY_DIGESTS = {
    "stock": [["a", "b", "c", "d", "e"], ["a", "b", "c", "d", "e"]],
    "sparksched": [["a", "v", "w", "y", "z"], ["u", "b", "c", "d", "e"]],
}


def compared(scheduler: str, layout: str = "") -> Row:
    """Return a row of streams: sampled ones equal in 3 of 5, 4 and 2; greedy in 1 of 5, 5 and 0."""
    row = key(scheduler, "async") | {"run": 0, "scaled": 120, "is_sampled": True}
    row["model"] += f", {layout}" if layout else ""
    batches = [["a digest"], ["a digest"]]
    row |= {"digests": SAMPLED_DIGESTS[scheduler], "distinct_tokens_median": 47}
    row |= {"batches": batches}
    greedy = {"is_sampled": False, "digests": GREEDY_DIGESTS[scheduler], "batches": batches}
    return row | {"greedy": greedy | {"distinct_tokens_median": 11}}


def timed(median: float) -> Row:
    """Return a distribution as `bench.step_cost` keeps it."""
    return {"median": median, "p10": 0.9 * median, "p90": 2 * median}


def step_cost() -> Row:
    """Return what `bench.step_cost --metrics --verify` keeps; no two figures are the same."""
    decode = {it: {f"{part}_us": timed(us) for part in PARTS} for it, us in DECODED.items()}
    return {
        "run": {},
        "decode": [{"requests": 64} | {it: decode[it] for it in ("stock", "sparksched")}],
        "broadcast": [
            {
                "requests": 64,
                "stock": {"us": timed(24.0), "bytes": 5300},
                "sparksched": {"us": timed(16.0), "bytes": 4100},
            }
        ],
        "verified": [{"requests": 256} | {it: decode[it] for it in ("stock", "verifying")}],
        "counted": [
            {"requests": 8}
            | {it: decode[it] for it in ("sparksched without metrics", "sparksched")}
        ],
        "prefill": [],
    }


PARTS = ("schedule", "update", "message", "step")
DECODED = {
    "stock": 300.0,
    "sparksched": 30.0,
    "verifying": 345.0,
    "sparksched without metrics": 28.5,
}


def recording() -> Row:
    """Return what `bench.recording` keeps; no two figures are the same."""
    kinds = ("off", "without tokens", "with tokens")
    rows = []
    for side, us in (("stock", 500.0), ("sparksched", 10.0)):
        for number, kind in enumerate(kinds):
            more = us * (1 + number / 10)
            figures = {"schedule_us": timed(more), "update_us": timed(1.2 * more)}
            figures |= {"step_p99_us": 5 * more, "processor_us": 6 * more}
            rows.append(
                {"side": side, "requests": 64, "kind": kind}
                | figures
                | {"bytes_a_step": number * (210.0 if side == "stock" else 220.0)}
            )
    return {"run": {}, "recording": rows}
