"""Shows on a laptop, in minutes, what sparksched is: the same answers at a lower cost.

Starts `vllm serve` with a tiny random-weight gpt-oss on the CPU, once with vLLM's own scheduler
and once with sparksched, streams the same completions from both, compares them token for token,
and shows what processor time a token took in the engine and in the API server.
"""

import asyncio
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from bench.cpu import ENGINE, FRONT_END, Threads
from testkit.server import Server, ServerError, serve
from testkit.streaming import Completion, Prompt, mixed_prompts, stream_all
from testkit.tiny_models import write_model

ROOT = Path(__file__).resolve().parents[1]
WORK_DIR = ROOT / ".demo"
NUM_STREAMS = 128
STEADY_TOKENS = 128
VOCAB_SIZE = 400  # ids below this are in the tiny model's vocabulary
ROLES = {ENGINE: "engine", FRONT_END: "API server"}


@dataclass(frozen=True)
class Side:
    """What was seen of one server."""

    completions: list[Completion]
    cpu: dict[str, float]
    """What the threads took while as many streams ran as there are places."""


def main() -> int:
    """Run the demo; return the exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to stop"))  # its servers end with it
    model_dir = write_model(WORK_DIR / "model")
    print(f"sparksched: the same vLLM twice, {NUM_STREAMS} streams at a time\n", flush=True)
    try:
        stock = _run_side(model_dir, None)
        ours = _run_side(model_dir, "sparksched")
    except ServerError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    return _report(stock, ours)


def _run_side(model_dir: Path, scheduler: str | None) -> Side:
    begun = time.monotonic()
    label = scheduler or "its own scheduler"
    print(f"  vllm serve with {label:<17}  starting (a minute or so) ...", end="", flush=True)
    with serve(
        model_dir,
        WORK_DIR / f"{scheduler or 'vllm'}.log",
        scheduler=scheduler,
        arguments=(f"--max-num-seqs={NUM_STREAMS}", "--max-num-batched-tokens=1024"),
    ) as server:
        if server.runs_sparksched != (scheduler is not None):
            raise ServerError(f"the server runs another scheduler; see {server.log_path}")
        print(" streaming ...", end="", flush=True)
        side = _stream(server)
    print(f" done, {time.monotonic() - begun:.0f} s", flush=True)
    return side


def _stream(server: Server) -> Side:
    """Stream mixed requests, then as many of equal length: a steady batch for the timings."""
    mixed = mixed_prompts(NUM_STREAMS, vocab_size=VOCAB_SIZE)
    steady = [
        Prompt([index % VOCAB_SIZE, 1, 2, 3], STEADY_TOKENS, {"ignore_eos": True})
        for index in range(NUM_STREAMS)
    ]
    completions = asyncio.run(stream_all(server.base_url, server.model, mixed))
    before, begun = Threads.of(server.process.pid), time.monotonic()
    completions += asyncio.run(stream_all(server.base_url, server.model, steady))
    now, seconds = Threads.of(server.process.pid), time.monotonic() - begun
    return Side(completions, now.since(before, seconds, NUM_STREAMS * STEADY_TOKENS))


def _report(stock: Side, ours: Side) -> int:
    print(f"\n  {'':<34}{'vllm':>16}{'sparksched':>16}{'ratio':>10}")
    for role, name in ROLES.items():
        before, after = (it.cpu[f"cpu_{role}_us_per_token"] for it in (stock, ours))
        label = f"{name}, µs of CPU a token"
        print(f"  {label:<34}{before:>16.1f}{after:>16.1f}{before / after:>9.1f}x")
    pairs = list(zip(stock.completions, ours.completions, strict=True))
    differing = [index for index, (a, b) in enumerate(pairs) if a.outcome != b.outcome]
    if differing:
        print(f"\n  ✗ {len(differing)} of {len(pairs)} token streams differ: {differing[:10]}\n")
    else:
        print(f"\n  ✓ {len(pairs)} of {len(pairs)} token streams are identical, token for token.\n")
    print("  The model runs on this machine's CPU, too, in a process of its own.")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
