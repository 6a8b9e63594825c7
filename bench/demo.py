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
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from testkit.server import Server, ServerError, serve
from testkit.streaming import Completion, Prompt, mixed_prompts, stream_all
from testkit.tiny_gpt_oss import write_model

ROOT = Path(__file__).resolve().parents[1]
WORK_DIR = ROOT / ".demo"
TIMEOUT_S = 300
NUM_STREAMS = 128
STEADY_TOKENS = 128
VOCAB_SIZE = 400  # ids below this are in the tiny model's vocabulary
CALLS = ("schedule", "update_from_output")
LABEL_WIDTH, COLUMN_WIDTH = 34, 16


@dataclass(frozen=True)
class StepCost:
    """The CPU time of a scheduler's calls in its engine: medians over steady steps."""

    scheduler: str
    num_steps: int
    call_us: dict[str, float]

    @property
    def total_us(self) -> float:
        """Both calls together."""
        return sum(self.call_us.values())


@dataclass(frozen=True)
class Side:
    """What was seen of one server."""

    name: str
    completions: list[Completion]
    cost: StepCost
    seconds: float

    @property
    def num_tokens(self) -> int:
        """All tokens that were streamed."""
        return sum(len(completion.token_ids) for completion in self.completions)

    @property
    def token_ms(self) -> float:
        """The time from one token of a stream to the next: the median of the streams' means.

        Tokens that came merged in one chunk count as so many.
        """
        means = [
            sum(stream.gaps_s) / (len(stream.token_ids) - 1)
            for stream in self.completions
            if stream.gaps_s
        ]
        return statistics.median(means) * 1000


def main() -> int:
    """Run the demo; return the exit status."""
    _end_by_itself(TIMEOUT_S)
    model_dir = write_model(WORK_DIR / "model")
    print(f"sparksched: the same vLLM twice, {NUM_STREAMS} streams at a time\n", flush=True)
    try:
        stock = _run_side("vllm", model_dir, scheduler=None)
        ours = _run_side("sparksched", model_dir, scheduler="sparksched")
    except ServerError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    return _report(stock, ours)


def _end_by_itself(timeout_s: int) -> None:
    """Leave through SystemExit, which stops the server, when told to or out of time."""

    def give_up(number: int, frame: FrameType | None) -> None:
        reason = "out of time" if number == signal.SIGALRM else "told to stop"
        raise SystemExit(f"\nthe demo ended early, {reason}; the logs are in {WORK_DIR}")

    signal.signal(signal.SIGALRM, give_up)
    signal.signal(signal.SIGTERM, give_up)
    signal.alarm(timeout_s)


# ----------------------------------------------------------------------------------------
# One server
# ----------------------------------------------------------------------------------------


def _run_side(name: str, model_dir: Path, scheduler: str | None) -> Side:
    started_at = time.monotonic()
    label = scheduler or "its own scheduler"
    print(f"  vllm serve with {label:<17}  starting (a minute or so) ...", end="", flush=True)
    side_dir = WORK_DIR / name
    side_dir.mkdir(parents=True, exist_ok=True)
    steps_path = side_dir / "steps.jsonl"
    steps_path.unlink(missing_ok=True)
    with serve(
        model_dir,
        side_dir / "serve.log",
        scheduler=scheduler,
        arguments=(f"--max-num-seqs={NUM_STREAMS}", "--max-num-batched-tokens=1024"),
        environment=_probe_environment(steps_path),
    ) as server:
        print(" streaming ...", end="", flush=True)
        _require_scheduler(server, scheduler)
        completions = _stream(server)
    seconds = time.monotonic() - started_at
    print(f" done, {seconds:.0f} s", flush=True)
    return Side(name, completions, _step_cost(steps_path), seconds)


def _probe_environment(steps_path: Path) -> dict[str, str]:
    search_path = [str(ROOT / "bench" / "hooks"), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, search_path)),
        "SPARKSCHED_DEMO_PROBE": str(steps_path),
    }


def _require_scheduler(server: Server, scheduler: str | None) -> None:
    if server.runs_sparksched != (scheduler == "sparksched"):
        raise ServerError(
            f"the server does not run the scheduler that was asked for; see {server.log_path}"
        )


def _stream(server: Server) -> list[Completion]:
    """Stream mixed requests, then as many of equal length: a steady batch for the timings."""
    mixed = mixed_prompts(NUM_STREAMS, vocab_size=VOCAB_SIZE)
    steady = [
        Prompt([index % VOCAB_SIZE, 1, 2, 3], STEADY_TOKENS, {"ignore_eos": True})
        for index in range(NUM_STREAMS)
    ]
    completions = asyncio.run(stream_all(server.base_url, server.model, mixed))
    return completions + asyncio.run(stream_all(server.base_url, server.model, steady))


def _step_cost(steps_path: Path) -> StepCost:
    """Take the medians over the steps in which every stream got one token."""
    records = [json.loads(line) for line in steps_path.read_text().splitlines()]
    steady = [
        record
        for record in records
        if record["num_requests"] == record["num_tokens"] == NUM_STREAMS
    ]
    durations = {
        call: [record["cpu_us"] for record in steady if record["call"] == call] for call in CALLS
    }
    return StepCost(
        scheduler=records[-1]["scheduler"],
        num_steps=min(map(len, durations.values())),
        call_us={call: statistics.median(values) for call, values in durations.items()},
    )


# ----------------------------------------------------------------------------------------
# The report
# ----------------------------------------------------------------------------------------


def _report(stock: Side, ours: Side) -> int:
    pairs = list(zip(stock.completions, ours.completions, strict=True))
    differing = [index for index, (a, b) in enumerate(pairs) if a.outcome != b.outcome]
    print()
    _print_table(stock, ours)
    print()
    if differing:
        print(f"  ✗ {len(differing)} of {len(pairs)} token streams differ: {differing[:10]}")
    else:
        print(f"  ✓ {len(pairs)} of {len(pairs)} token streams are identical, token for token.")
    print()
    print(_in_words(stock, ours))
    return 1 if differing else 0


def _print_table(stock: Side, ours: Side) -> None:
    _print_row("", stock.name, ours.name, "ratio")
    print("  " + "─" * (LABEL_WIDTH + 3 * COLUMN_WIDTH))
    for call in CALLS:
        _print_ratio_row(f"{call}(), µs of CPU", stock.cost.call_us[call], ours.cost.call_us[call])
    _print_ratio_row("both, µs of CPU", stock.cost.total_us, ours.cost.total_us)
    print("  " + "─" * (LABEL_WIDTH + 3 * COLUMN_WIDTH))
    _print_row("class in the engine", stock.cost.scheduler, ours.cost.scheduler)
    _print_row("steady steps timed", str(stock.cost.num_steps), str(ours.cost.num_steps))
    _print_row("tokens streamed", str(stock.num_tokens), str(ours.num_tokens))
    _print_row("from token to token, ms", f"{stock.token_ms:.1f}", f"{ours.token_ms:.1f}")


def _print_ratio_row(label: str, stock_us: float, ours_us: float) -> None:
    _print_row(label, f"{stock_us:.1f}", f"{ours_us:.1f}", f"{stock_us / ours_us:.1f}x")


def _print_row(label: str, *cells: str) -> None:
    print("  " + label.ljust(LABEL_WIDTH) + "".join(cell.rjust(COLUMN_WIDTH) for cell in cells))


def _in_words(stock: Side, ours: Side) -> str:
    words = (
        f"Seen here: with {NUM_STREAMS} streams running, a step costs {stock.cost.total_us:.0f} µs "
        f"of CPU with {stock.name} and {ours.cost.total_us:.0f} µs with {ours.name} (medians, "
        f"measured inside the engines). The model runs on this machine's CPU too, and most of the "
        f"{stock.token_ms:.0f} ms from token to token are its own; on a GPU a step lasts a few "
        f"milliseconds, and the scheduler's part of it weighs more."
    )
    indent = "  "
    return textwrap.fill(words, width=80, initial_indent=indent, subsequent_indent=indent)


if __name__ == "__main__":
    sys.exit(main())
