"""How long does a request that joins wait for its first token? vLLM, sparksched, and just in time.

Three sides take turns in the same run, as in `bench.micro.host_path`: the same engines, client and
executor, whose GPU is only a timer, without HTTP. Streams run side by side for the whole window;
beside them single requests of 64 to 128 tokens come at random, three steps apart in the mean.

- `ttft_ms`: from the call of `generate()` to the first output of a request that joins.
- `output_gap_ms`: the time between outputs of the streams, as their consumer sees it.
- `tokens_per_s`: of the streams.

    python -m bench.micro.first_token [--quick] [--json FILE]
"""

import argparse
import asyncio
import random
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.header import describe_run
from bench.micro.host_path import (
    EFFORT,
    QUICK_EFFORT,
    Effort,
    choose_cores,
    measure_in_turns,
    running_sides,
)
from bench.micro.host_path_sides import (
    JUST_IN_TIME,
    OURS,
    POLL_S,
    STOCK,
    Client,
    Row,
    StreamLog,
    clock_ns,
    evaluate_streams,
    percentiles,
    prompt_of,
)
from bench.micro.processes import BenchmarkError
from bench.progress import Progress
from bench.report.show import show

SIDES = (STOCK, OURS, JUST_IN_TIME)
CASES = ((256, 18.0), (64, 7.0))
"""Streams, and milliseconds of a step: about gpt-oss-120b, and a smaller batch of it."""

STEPS_BETWEEN = 3.0
NUM_JOINING_TOKENS = 3


class JoinedClient(Client):
    """A client whose streams are joined by single requests."""

    async def join(self, streams: int, step_ms: float, warm_up_s: float, window_s: float) -> Row:
        """Let streams run, and requests join them, and measure both."""
        await self._ask_engine("set_step_ms", step_ms)
        logs = [StreamLog() for _ in range(streams)]
        first_tokens: list[tuple[int, float]] = []
        async with self._running([self._stream(log) for log in logs]):
            while not all(log.times_ns for log in logs):
                await asyncio.sleep(POLL_S)
            async with self._running([self._come(step_ms / 1000, first_tokens)]):
                await asyncio.sleep(warm_up_s)
                window = await self._window(window_s)
        await self._clean_up()
        start_ns, end_ns = window.start_ns, window.end_ns
        times_ms = [it for came_ns, it in first_tokens if start_ns <= came_ns < end_ns]
        return evaluate_streams(logs, window) | {"ttft_ms": percentiles(times_ms)}

    async def _come(self, step_s: float, first_tokens: list[tuple[int, float]]) -> None:
        """Send requests at random times; note when each came and its milliseconds."""
        chance = random.Random(0)
        async with asyncio.TaskGroup() as requests:
            while True:
                await asyncio.sleep(chance.expovariate(1 / (STEPS_BETWEEN * step_s)))
                requests.create_task(self._join_once(first_tokens))

    async def _join_once(self, first_tokens: list[tuple[int, float]]) -> None:
        number = next(self._numbers)
        prompt = prompt_of(number, 64 + number % 64)
        came_ns, is_first = clock_ns(), True
        outputs = self._llm.generate(prompt, self._params(NUM_JOINING_TOKENS), f"joins-{number}")
        async for _ in outputs:
            if is_first:
                first_tokens.append((came_ns, (clock_ns() - came_ns) / 1e6))
                is_first = False


def measure(effort: Effort) -> Row:
    """Measure all cases."""
    cores = choose_cores()
    with Progress(1 + len(CASES)) as progress:
        progress.begin("starting six processes")
        with running_sides(cores, SIDES, JoinedClient) as (sides, found):
            result: Row = {"run": describe_run(), "effort": asdict(effort), "sides": found}
            result["joining"] = []
            for streams, step_ms in CASES:
                progress.begin(f"streams: {streams:,}, steps of {step_ms:g} ms")
                case = {"streams": streams, "step_ms": step_ms}
                result["joining"].append(case | measure_in_turns(sides, effort, "join", **case))
    return result


def main() -> None:
    """Measure, print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one short round, for a first look")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, too")
    arguments = parser.parse_args()
    try:
        result: Any = measure(QUICK_EFFORT if arguments.quick else EFFORT)
    except BenchmarkError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted")
    show(result, arguments.json)


if __name__ == "__main__":
    main()
