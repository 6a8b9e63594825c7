"""`vllm bench throughput` and `vllm bench latency`: an engine by itself, without a server."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.serving.server import OURS, Start, engine_arguments_of, hooked_environment
from bench.serving.vllm_cases import LATENCY, CaseKey, Lengths
from bench.serving.vllm_client import ClientError
from testkit.server import CPU_ARGUMENTS, CPU_ENVIRONMENT, PROGRAM, SPARKSCHED_LINE, stop

Row = dict[str, Any]

WARM_UP_ITERATIONS = 3
ITERATIONS = 10
OF_SERVERS = "--disable-uvicorn-access-log"
POLL_S = 0.2


def run(key: CaseKey, start: Start, num_prompts: int, folder: Path, deadline: float) -> Row:
    """Run the command of a case, and return what it found.

    Args:
        key: The case.
        start: The engine that it is to start.
        num_prompts: How many requests `throughput` has.
        folder: For its log and result.
        deadline: By `time.monotonic()`: it is ended then.

    Raises:
        ClientError: if it fails, or its engine isn't what was asked for.

    """
    folder.mkdir(parents=True, exist_ok=True)
    log_path, result_path = folder / "bench.log", folder / "bench.json"
    result_path.unlink(missing_ok=True)
    environment = dict(os.environ) | hooked_environment()
    environment.pop("VLLM_SCHEDULER", None)
    engine = engine_arguments_of(start)
    if not start.has_gpu:
        engine = [*(it for it in CPU_ARGUMENTS if it != OF_SERVERS), *engine]
        environment |= CPU_ENVIRONMENT
    if start.scheduler == OURS:
        environment["VLLM_SCHEDULER"] = "sparksched"
    arguments = [
        *("bench", key.command, f"--model={start.model.directory.resolve()}", *engine),
        *_workload(key, num_prompts),
        f"--output-json={result_path}",
    ]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", PROGRAM, *arguments],
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        status = process.poll()
    finally:
        stop(process)
    if status != 0 or not result_path.exists():
        ended = "didn't end in time" if status is None else f"ended with status {status}"
        raise ClientError(f"vllm bench {key.command} {ended}; see {log_path}")
    if (SPARKSCHED_LINE in log_path.read_text(errors="replace")) != (start.scheduler == OURS):
        raise ClientError(f"the engine doesn't run {start.scheduler}: {log_path}")
    return figures(key, json.loads(result_path.read_text()))


def _workload(key: CaseKey, num_prompts: int) -> list[str]:
    lengths = Lengths.named(key.lengths)
    if key.command == LATENCY:
        return [
            f"--input-len={lengths.input_tokens}",
            f"--output-len={lengths.output_tokens}",
            f"--batch-size={key.concurrency}",
            f"--num-iters-warmup={WARM_UP_ITERATIONS}",
            f"--num-iters={ITERATIONS}",
        ]
    return [
        "--dataset-name=random",
        f"--random-input-len={lengths.input_tokens}",
        f"--random-output-len={lengths.output_tokens}",
        f"--num-prompts={num_prompts}",
        f"--num-warmups={min(num_prompts, 64)}",
    ]


def figures(key: CaseKey, result: Mapping[str, Any]) -> Row:
    """Return the figures of a command's result file."""
    if key.command == LATENCY:
        percentiles = result["percentiles"]
        times = {f"p{at}": 1e3 * float(percentiles[str(at)]) for at in (50, 99)}
        return {"batch_ms": times | {"mean": 1e3 * float(result["avg_latency"])}}
    return {
        "completed": int(result["num_requests"]),
        "duration_s": float(result["elapsed_time"]),
        "requests_per_s": float(result["requests_per_second"]),
        "all_tokens_per_s": float(result["tokens_per_second"]),
    }
