"""Shows on a laptop, in minutes, what sparksched is: the same answers at a lower cost per step.

Starts `vllm serve` with a tiny random-weight gpt-oss on the CPU, once with vLLM's own scheduler
and once with sparksched, streams the same completions from both, compares them token for token,
and shows what each call of either scheduler took inside the live engine.
"""

import asyncio
import json
import os
import signal
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from testkit.server import ServerError, serve
from testkit.streaming import Completion, Prompt, mixed_prompts, stream_all
from testkit.tiny_models import write_model

ROOT = Path(__file__).resolve().parents[1]
WORK_DIR = ROOT / ".demo"
TIMEOUT_S = 300
NUM_STREAMS = 128
STEADY_TOKENS = 128
VOCAB_SIZE = 400  # ids below this are in the tiny model's vocabulary
CALLS = ("schedule", "update_from_output")


@dataclass(frozen=True)
class Side:
    """What was seen of one server."""

    scheduler: str
    completions: list[Completion]
    call_us: dict[str, float]
    """CPU time of the calls: medians over the steps in which every stream had a token."""
    num_steps: int

    @property
    def step_us(self) -> float:
        """Both calls together."""
        return sum(self.call_us.values())


def main() -> int:
    """Run the demo; return the exit status."""
    _end_by_itself()
    model_dir = write_model(WORK_DIR / "model")
    print(f"sparksched: the same vLLM twice, {NUM_STREAMS} streams at a time\n", flush=True)
    try:
        stock = _run_side(model_dir, None)
        ours = _run_side(model_dir, "sparksched")
    except ServerError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    return _report(stock, ours)


def _end_by_itself() -> None:
    """Leave through SystemExit, which stops the server, when told to or out of time."""

    def give_up(number: int, frame: FrameType | None) -> None:
        reason = "out of time" if number == signal.SIGALRM else "told to stop"
        raise SystemExit(f"\nthe demo ended early, {reason}; the logs are in {WORK_DIR}")

    signal.signal(signal.SIGALRM, give_up)
    signal.signal(signal.SIGTERM, give_up)
    signal.alarm(TIMEOUT_S)


def _run_side(model_dir: Path, scheduler: str | None) -> Side:
    begun = time.monotonic()
    label = scheduler or "its own scheduler"
    print(f"  vllm serve with {label:<17}  starting (a minute or so) ...", end="", flush=True)
    folder = WORK_DIR / (scheduler or "vllm")
    folder.mkdir(parents=True, exist_ok=True)
    steps_path = folder / "steps.jsonl"
    steps_path.unlink(missing_ok=True)
    search_path = [str(ROOT / "bench" / "hooks"), os.environ.get("PYTHONPATH", "")]
    with serve(
        model_dir,
        folder / "serve.log",
        scheduler=scheduler,
        arguments=(f"--max-num-seqs={NUM_STREAMS}", "--max-num-batched-tokens=1024"),
        environment={
            "PYTHONPATH": os.pathsep.join(filter(None, search_path)),
            "SPARKSCHED_DEMO_PROBE": str(steps_path),
        },
    ) as server:
        if server.runs_sparksched != (scheduler is not None):
            raise ServerError(f"the server runs another scheduler; see {server.log_path}")
        print(" streaming ...", end="", flush=True)
        completions = _stream(server.base_url, server.model)
    print(f" done, {time.monotonic() - begun:.0f} s", flush=True)
    records = [json.loads(line) for line in steps_path.read_text().splitlines()]
    steady = [it for it in records if it["num_requests"] == it["num_tokens"] == NUM_STREAMS]
    times = {call: [it["cpu_us"] for it in steady if it["call"] == call] for call in CALLS}
    medians = {call: statistics.median(found) for call, found in times.items()}
    return Side(records[-1]["scheduler"], completions, medians, min(map(len, times.values())))


def _stream(base_url: str, model: str) -> list[Completion]:
    """Stream mixed requests, then as many of equal length: a steady batch for the timings."""
    mixed = mixed_prompts(NUM_STREAMS, vocab_size=VOCAB_SIZE)
    steady = [
        Prompt([index % VOCAB_SIZE, 1, 2, 3], STEADY_TOKENS, {"ignore_eos": True})
        for index in range(NUM_STREAMS)
    ]
    completions = asyncio.run(stream_all(base_url, model, mixed))
    return completions + asyncio.run(stream_all(base_url, model, steady))


def _report(stock: Side, ours: Side) -> int:
    print(f"\n  {'':<34}{'vllm':>16}{'sparksched':>16}{'ratio':>10}")
    rows = {f"{call}(), µs of CPU": (stock.call_us[call], ours.call_us[call]) for call in CALLS}
    rows["both, µs of CPU"] = (stock.step_us, ours.step_us)
    for label, (before, after) in rows.items():
        print(f"  {label:<34}{before:>16.1f}{after:>16.1f}{before / after:>9.1f}x")
    print(f"  {'class in the engine':<34}{stock.scheduler:>16}{ours.scheduler:>16}")
    print(f"  {'steady steps timed':<34}{stock.num_steps:>16}{ours.num_steps:>16}\n")
    pairs = list(zip(stock.completions, ours.completions, strict=True))
    differing = [index for index, (a, b) in enumerate(pairs) if a.outcome != b.outcome]
    if differing:
        print(f"  ✗ {len(differing)} of {len(pairs)} token streams differ: {differing[:10]}\n")
    else:
        print(f"  ✓ {len(pairs)} of {len(pairs)} token streams are identical, token for token.\n")
    print("  The model runs on this machine's CPU, too, and takes most of each step.")
    print("  On a GPU a step lasts a few milliseconds, and the scheduler's part weighs more.")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
