"""Who waits for whose prompts, if the GPU is only a timer? Stock vLLM and sparksched.

Streams decode while prompts come: a long one and short ones, one of 60,000 tokens each 8 s beside
requests of 500 at random, or ten of 20,000 at once; or one tenant's burst of prompts of 1,024
beside another tenant's request of 500 each second (`tenants_timer`). A step takes 5.2 ms, 19 ms
more with prompts in it, and 50 µs more for each token of them: about what a mixture of experts
takes. A prompt that gets one token costs what a decode costs.
Sides are vLLM and sparksched with paced prefill. Each is an `AsyncLLM` with an engine of its own,
as in `bench.micro.host_path`, and has the machine to itself while it is measured.

    python -m bench.micro.mixed [--case tenants_timer] [--sides A|B] [--quick] [--out DIR]
"""

import argparse
import asyncio
import itertools
import math
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from bench.micro.clocked_executor import TIMES
from bench.micro.host_path import choose_cores
from bench.micro.host_path_sides import (
    OURS,
    POLL_S,
    STOCK,
    Client,
    Row,
    Setup,
    percentiles,
    prompt_of,
    serve,
)
from bench.micro.processes import BenchmarkError, running_workers
from bench.results import Results

STEP_MS = 5.2
PROMPT_MS = 19.0
PROMPT_TOKEN_US = 50.0
DEVICE = f"{STEP_MS} {PROMPT_MS} {PROMPT_TOKEN_US}"

NUM_STREAMS = 16
LONG_TOKENS = 60_000
SETTLE_S = 0.5
MAX_SLOWDOWN = 2.5


class Load(NamedTuple):
    """What comes beside the streams."""

    prompts: list[tuple[float, int]]
    """When a prompt comes, in seconds, and its tokens."""
    window_s: float = 0.0
    """Tokens of streams are counted for so long, in rounds whose prompts are through by then."""


def _one_long(tokens: int) -> Load:
    return Load([(0.0, tokens), *((0.5 * turn, 100) for turn in range(1, 7))], window_s=12)


def _each_8_s() -> Load:
    chance, at, prompts = random.Random(1), 0.0, [(8.0 * turn, LONG_TOKENS) for turn in range(6)]
    while (at := at + chance.expovariate(3)) < 40:
        prompts.append((at, 500))
    return Load(sorted(prompts), window_s=52)


def _burst(number: int, tokens: int = 1024) -> Load:
    seconds = math.ceil(number * tokens * PROMPT_TOKEN_US / 1e6)
    return Load([(0.0, tokens)] * number + [(0.5 + at, 500) for at in range(seconds)])


LOADS: dict[str, Load] = {
    f"{LONG_TOKENS} tokens": _one_long(LONG_TOKENS),
    "60,000 each 8 s, 3/s of 500": _each_8_s(),
    "ten of 20,000 at once": Load([(0.0, 20_000)] * 10, window_s=30),
}

BURSTS = {f"{it} at once, 1/s of 500": _burst(it) for it in (25, 100, 400)}

PACED = "sparksched, paced"
PACED_50_MS = "sparksched, paced, 50 ms"


def _paced(max_stall_ms: int) -> dict[str, str]:
    return {
        "SPARKSCHED_MAX_STALL_MS": str(max_stall_ms),
        "SPARKSCHED_MAX_SLOWDOWN": str(MAX_SLOWDOWN),
    }


SIDES: dict[str, Row] = {
    STOCK: {"scheduler": STOCK},
    PACED: {"scheduler": OURS, "environment": _paced(200)},
    PACED_50_MS: {"scheduler": OURS, "environment": _paced(50)},
}
FAIR = {"SPARKSCHED_ORDER": "fair"}
BY_HAND = {"scheduling_policy": "priority"}
"""Of a side where short prompts have the priority before long ones."""
TENANT_SIDES: dict[str, Row] = {
    STOCK: SIDES[STOCK],
    "vLLM, priorities by hand": {"scheduler": STOCK, "engine_arguments": BY_HAND},
    f"{OURS}, fair": {"scheduler": OURS, "environment": FAIR},
    f"{OURS}, fair and paced": {"scheduler": OURS, "environment": FAIR | _paced(200)},
}
CASES = {"mixed_timer": (LOADS, SIDES), "tenants_timer": (BURSTS, TENANT_SIDES)}


class MixedClient(Client):
    """Sends the load."""

    async def mixed(self, number: int, load: Load) -> Row:
        """Make one round; return what it was like for whom."""
        await self._ask_engine("set_step_ms", STEP_MS)
        times: list[list[float]] = [[] for _ in range(NUM_STREAMS)]
        async with self._running(self._note(it, times[it], number) for it in range(NUM_STREAMS)):
            while not all(times):
                await asyncio.sleep(POLL_S)
            await asyncio.sleep(SETTLE_S)
            start = time.perf_counter()
            prompts = load.prompts
            most = max(tokens for _, tokens in prompts)
            come = [self._come(start + at, tokens, tokens == most) for at, tokens in prompts]
            first_s = await asyncio.gather(*come)
            end = time.perf_counter()
            await asyncio.sleep(start + load.window_s - end)
        await self._clean_up()
        inside = [[at for at in it if start <= at <= end] for it in times]
        gaps = [now - before for it in inside for before, now in itertools.pairwise(it)]
        long_s = [it for it, (_, tokens) in zip(first_s, prompts, strict=True) if tokens == most]
        short_s = [it for it, (_, tokens) in zip(first_s, prompts, strict=True) if tokens < most]
        row = {
            "seconds": end - start,
            "stream_tokens_per_s": sum(map(len, inside)) / NUM_STREAMS / (end - start),
            "gap_p99_ms": 1e3 * percentiles(gaps)["p99"],
            "gap_max_ms": 1e3 * max(gaps),
            "long_s": max(long_s),
        }
        if end - start <= load.window_s:
            counted = (start <= at <= start + load.window_s for it in times for at in it)
            row["stream_tokens"] = sum(counted)
        if short_s:
            of_short = percentiles(short_s) | {"max": max(short_s)}
            row |= {f"short_{it}_ms": 1e3 * seconds for it, seconds in of_short.items()}
        return row

    async def _come(self, at: float, num_tokens: int, is_long: bool) -> float:
        """Send a request at a time; return after how many seconds its first token came."""
        await asyncio.sleep(at - time.perf_counter())
        number = next(self._numbers)
        prompt = prompt_of(number + 1_000_000, num_tokens)
        params = self._params(4)
        params.extra_args = {"tenant": "long" if is_long else "short"}
        by_hand = self._setup.engine_arguments == BY_HAND
        priority = int(by_hand and is_long)
        start, first = time.perf_counter(), math.nan
        sent = self._llm.generate(prompt, params, f"prompt-{number}", priority=priority)
        async for output in sent:
            if output.outputs[0].token_ids and math.isnan(first):
                first = time.perf_counter() - start
        return first

    async def _note(self, stream: int, times: list[float], number: int) -> None:
        prompt = prompt_of(1_000 * number + stream, 128)
        async for _ in self._llm.generate(
            prompt, self._params(self._max_tokens), f"stream-{number}-{stream}"
        ):
            times.append(time.perf_counter())


def main() -> int:
    """Measure, print a table and write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round of a shorter prompt")
    parser.add_argument("--case", choices=CASES, default="mixed_timer")
    parser.add_argument("--sides", type=lambda it: it.split("|"), metavar="A|B")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, metavar="DIR", help="where CASE.csv is to be")
    options = parser.parse_args()
    loads, sides = CASES[options.case]
    if options.quick:
        loads, options.rounds = {"16000 tokens": _one_long(16_000)}, 1
    results = Results(options.out, options.case)
    chosen = {it: sides[it] for it in options.sides or sides}
    try:
        _measure(chosen, loads, options.rounds, results)
    except BenchmarkError as error:
        print(error, file=sys.stderr)
        return 1
    results.show()
    return 0


def _measure(sides: dict[str, Row], loads: dict[str, Load], rounds: int, results: Results) -> None:
    cores = choose_cores()
    with tempfile.TemporaryDirectory() as directory:
        for name, side in tqdm(sides.items()):
            environment = side.get("environment", {}) | {TIMES: DEVICE}
            setup = Setup(name, Path(directory), *cores, **(side | {"environment": environment}))
            with running_workers(serve, {name: (setup, MixedClient)}) as (workers, _):
                # The first round is for what runs for the first time.
                workers[name].call("mixed", number=0, load=_one_long(16_000))
                number = 0
                for point, load in loads.items():
                    for turn in range(rounds):
                        number += 1
                        row = workers[name].call("mixed", number=number, load=load)
                        results.add(point, name, turn, row)


if __name__ == "__main__":
    sys.exit(main())
