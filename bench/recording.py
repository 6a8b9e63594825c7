"""What does it cost to record a scheduler? Steps with and without a recorder, in one process.

Each step is followed by a pause in the place of the GPU's work: then the recorder's thread writes.
`processor` is the time of all threads a step, that of the benchmark's own model among it.

    python -m bench.recording [--requests 64,256] [--steps 400] [--json FILE]
"""

import argparse
import json
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sparksched.trace.recorder import Recorder
from sparksched.trace.recording import attach

from bench.header import describe_run
from bench.step_cost import SIDES, VOCABULARY, Engine, Spread
from bench.step_loads import PLAIN
from tests.differential.world import vllm_environment

GPU_S = 0.005
WARM_UP_STEPS = 30
KINDS = {"off": None, "without tokens": False, "with tokens": True}


def measure(
    side: str, num_requests: int, num_steps: int, with_tokens: bool | None
) -> dict[str, Any]:
    """Time the steps of so many generating requests."""
    engine = Engine(side)
    recorder = None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        if with_tokens is not None:
            recorder = _record(engine, path, with_tokens)
        for number in range(num_requests):
            prompt = [engine.random.randrange(VOCABULARY) for _ in range(128 + number % 64)]
            engine.scheduler.add_request(engine.request(f"request-{number}", prompt, 10**6))
        while engine.scheduler.get_request_counts()[0] < num_requests:
            engine.step()
        _steps(engine, WARM_UP_STEPS)
        engine.schedule_times.clear()
        engine.update_times.clear()
        before = path.stat().st_size if recorder else 0
        processor = _steps(engine, num_steps)
        if recorder is not None:
            recorder.close()
        num_bytes = path.stat().st_size - before if recorder else 0
    return {
        "schedule_us": asdict(Spread.of(engine.schedule_times)),
        "update_us": asdict(Spread.of(engine.update_times)),
        "processor_us": processor * 1e6 / num_steps,
        "bytes_a_step": num_bytes / num_steps,
    }


def _record(engine: Engine, path: Path, with_tokens: bool) -> Recorder:
    world = engine.world
    recorder = Recorder(
        path,
        world.vllm_config,
        world.kv_cache_config,
        world.scheduler_block_size,
        world.hash_block_size,
        with_tokens=with_tokens,
    )
    attach(recorder, engine.scheduler)
    return recorder


def _steps(engine: Engine, num_steps: int) -> float:
    """Return seconds of processor time."""
    start = time.process_time()
    for _ in range(num_steps):
        engine.step()
        time.sleep(GPU_S)
    return time.process_time() - start


def _line(result: dict[str, Any]) -> str:
    return (
        f"{result['side']:11s} {result['requests']:8d}  {result['kind']:14s} "
        f"{result['schedule_us']['median']:6.0f} µs {result['update_us']['median']:6.0f} µs  "
        f"{result['processor_us']:6.0f} µs {result['bytes_a_step']:11.0f}"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.recording", description=__doc__)
    parser.add_argument("--requests", default="64,256", help="running requests")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    results = []
    print("scheduler   requests  recording       schedule    update  processor  bytes/step")
    with vllm_environment(PLAIN.configuration):
        for side in SIDES:
            for num_requests in map(int, arguments.requests.split(",")):
                for kind, with_tokens in KINDS.items():
                    result = measure(side, num_requests, arguments.steps, with_tokens)
                    results.append({"side": side, "requests": num_requests, "kind": kind} | result)
                    print(_line(results[-1]), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(describe_run() | {"recording": results}, indent=1))


if __name__ == "__main__":
    main()
