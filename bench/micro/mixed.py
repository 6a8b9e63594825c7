"""Who waits while a long prompt is computed, if the GPU is only a timer? Stock vLLM and sparksched.

Streams decode, a long prompt comes, and short requests all along. A step takes 5.2 ms, 19 ms more
with prompts in it, and 50 µs more for each token of them: about what a mixture of experts takes.
Sides are vLLM, vLLM with a fixed threshold for long prompts, and sparksched with paced prefill;
each is an `AsyncLLM` with an engine of its own, as in `bench.micro.host_path`, and has the machine
to itself while it is measured. Each figure is the median over rounds.

    python -m bench.micro.mixed [--quick] [--out DIR]
"""

import argparse
import asyncio
import itertools
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench.micro.host_path import choose_cores
from bench.micro.host_path_sides import OURS, POLL_S, STOCK, Client, Row, Setup, prompt_of, serve
from bench.micro.processes import BenchmarkError, running_workers
from bench.results import Results

STEP_MS = 5.2
PROMPT_MS = 19.0
PROMPT_TOKEN_US = 50.0

NUM_STREAMS = 16
LONG_TOKENS = 60_000
SHORT_TOKENS = 100
SHORT_EVERY_S = 0.5
SETTLE_S = 0.5
MAX_STALL_MS = 200
MAX_SLOWDOWN = 2.5

THRESHOLD = "vLLM, threshold 1,024"
PACED = "sparksched, paced"
SIDES: dict[str, Row] = {
    STOCK: {"scheduler": STOCK},
    THRESHOLD: {
        "scheduler": STOCK,
        "engine_arguments": {"long_prefill_token_threshold": 1024},
    },
    OURS: {"scheduler": OURS},
    PACED: {
        "scheduler": OURS,
        "environment": {
            "SPARKSCHED_MAX_STALL_MS": str(MAX_STALL_MS),
            "SPARKSCHED_MAX_SLOWDOWN": str(MAX_SLOWDOWN),
        },
    },
}


class MixedClient(Client):
    """Sends the load."""

    async def mixed(self, number: int, long_tokens: int) -> Row:
        """Make one round; return what it was like for whom."""
        await self._ask_engine("set_step_ms", STEP_MS)
        await self._ask_engine("set_prompt_times", PROMPT_MS, PROMPT_TOKEN_US)
        times: list[list[float]] = [[] for _ in range(NUM_STREAMS)]
        first_s: list[float] = []
        async with self._running(self._note(it, times[it], number) for it in range(NUM_STREAMS)):
            while not all(times):
                await asyncio.sleep(POLL_S)
            await asyncio.sleep(SETTLE_S)
            start = time.perf_counter()
            long = asyncio.ensure_future(self._first_token(f"long-{number}", long_tokens, 1))
            shorts = []
            while not long.done():
                await asyncio.wait([long], timeout=SHORT_EVERY_S)
                if not long.done():
                    name = f"short-{number}-{len(shorts)}"
                    shorts.append(asyncio.ensure_future(self._first_token(name, SHORT_TOKENS, 4)))
            end = start + await long
            first_s = await asyncio.gather(*shorts)
        await self._ask_engine("set_prompt_times", 0.0, 0.0)
        await self._clean_up()
        inside = [[at for at in it if start <= at <= end] for it in times]
        gaps = [now - before for it in inside for before, now in itertools.pairwise(it)]
        return {
            "stream_tokens_per_s": sum(map(len, inside)) / NUM_STREAMS / (end - start),
            "gap_p99_ms": 1e3 * _quantile(gaps, 0.99),
            "short_p50_ms": 1e3 * _quantile(first_s, 0.5),
            "short_max_ms": 1e3 * max(first_s, default=math.nan),
            "long_s": end - start,
        }

    async def _note(self, stream: int, times: list[float], number: int) -> None:
        prompt = prompt_of(1_000 * number + stream, 128)
        async for _ in self._llm.generate(
            prompt, self._params(self._max_tokens), f"stream-{number}-{stream}"
        ):
            times.append(time.perf_counter())

    async def _first_token(self, name: str, num_tokens: int, max_tokens: int) -> float:
        """Send a request to its end; return after how many seconds its first token came."""
        prompt = prompt_of(next(self._numbers) + 1_000_000, num_tokens)
        start, first = time.perf_counter(), math.nan
        async for output in self._llm.generate(prompt, self._params(max_tokens), name):
            if output.outputs[0].token_ids and math.isnan(first):
                first = time.perf_counter() - start
        return first


def _quantile(values: list[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)] if ordered else math.nan


def main() -> int:
    """Measure, print a table and write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round of a shorter prompt")
    parser.add_argument(
        "--sides", type=lambda it: it.split("|"), default=list(SIDES), metavar="A|B"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="where mixed_timer.csv is to be")
    options = parser.parse_args()
    long_tokens, rounds = (16_000, 1) if options.quick else (LONG_TOKENS, 3)
    try:
        rows = _measure(options.sides, long_tokens, rounds)
    except BenchmarkError as error:
        print(error, file=sys.stderr)
        return 1
    results = Results(options.out, "mixed_timer")
    for row in rows:
        metrics = {
            name: value for name, value in row.items() if name not in ("side", "long_tokens")
        }
        results.add(f"{row['long_tokens']} tokens", row["side"], None, metrics)
    results.show()
    return 0


def _measure(sides: list[str], long_tokens: int, rounds: int) -> list[Row]:
    rows = []
    cores = choose_cores()
    with tempfile.TemporaryDirectory() as directory:
        for name in tqdm(sides):
            setup = Setup(name, Path(directory), *cores, **SIDES[name])
            with running_workers(serve, {name: (setup, MixedClient)}) as (workers, _):
                # The first round is for what runs for the first time.
                found = [
                    workers[name].call("mixed", number=number, long_tokens=long_tokens)
                    for number in range(rounds + 1)
                ][1:]
            row: dict[str, Any] = {"side": name, "long_tokens": long_tokens}
            rows.append(row | {it: statistics.median(one[it] for one in found) for it in found[0]})
    return rows


if __name__ == "__main__":
    sys.exit(main())
