"""What does a step cost the host? vLLM's scheduler and ours, side by side in one process.

Three questions, each answered for both schedulers in the same run and in alternation:

- `decode`: time of `schedule()`, of `update_from_output()` and of making the outputs a message, per
  step, by running requests, in vLLM's asynchronous engine loop (a step is scheduled before the
  former one's output is there). In vLLM a thread of its own makes messages; ours begins them in
  `update_from_output()`.
- `features`: the same, if all requests speculate, have a grammar, or an adapter. What grammars cost
  by themselves is left out: it is the same for both.
- `prefill`: time to hash, admit and prefill one request, with and without its prefix cached.

With `--verify` also what a step costs that vLLM's scheduler verifies (docs/verify.md), with
`--metrics` what counting for `/metrics` has part in it (docs/metrics.md).

The KV cache groups are gpt-oss's: full attention and a sliding window of 128 tokens, blocks of 16.
Objects passed in and out are those that vLLM's engine passes and consumes; statistics are on, and
ours also counts for `/metrics`.

    python -m bench.micro.steps [--quick] [--verify] [--metrics] [--json FILE]
"""

import argparse
import gc
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparksched._core import EngineMeters, StepOutputs
from sparksched.engine.scheduler import NativeScheduler
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackEncoder
from vllm.v1.structured_output import StructuredOutputManager

from bench.header import describe_run
from bench.micro.loads import BLOCK_SIZE, FEATURES, GPT_OSS, PLAIN, GrammarsOfNoCost, Load
from bench.progress import Progress
from bench.report.show import show
from testkit.worlds.candidates import CANDIDATES, BlockHasher, stock_block_hasher
from testkit.worlds.world import World, build_world, vllm_environment

SIDES = ("stock", "sparksched")
VERIFIED_SIDES = ("stock", "verifying")
UNCOUNTED = "sparksched without metrics"
COUNTED_SIDES = (UNCOUNTED, "sparksched")
VOCABULARY = 200_000
DECODE_STEPS = {1: 1000, 8: 400, 64: 200, 256: 100, 1024: 60}
"""By running requests: the fewest steps to measure."""
FEATURE_STEPS = {64: 100, 256: 60, 1024: 30}
VERIFIED_STEPS = {1: 400, 64: 100, 256: 60}
PROMPTS = (1024, 8192)
STEPS_IN_A_ROW = 20
"""Steps before it is the other side's turn: one side's objects don't evict the other's from the
processor's caches in each step, and slow phases of the machine still hit both."""


@dataclass(frozen=True)
class Spread:
    """A distribution of times, in microseconds."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, nanoseconds: list[int]) -> "Spread":
        """Summarise measured times."""
        ordered = sorted(nanoseconds)
        at = lambda share: ordered[min(int(share * len(ordered)), len(ordered) - 1)] / 1000  # noqa: E731
        return cls(statistics.median(ordered) / 1000, at(0.1), at(0.9))


class Engine:
    """One scheduler in a loop like the engine's, with a model that takes no time."""

    def __init__(self, side: str, load: Load = PLAIN) -> None:
        self.load = load
        self.world: World = build_world(load.configuration)
        scheduler_class = CANDIDATES[side.partition(" ")[0]](load.configuration)
        manager = (
            GrammarsOfNoCost()
            if load.has_grammars
            else StructuredOutputManager(self.world.vllm_config)
        )
        self.scheduler: SchedulerInterface = self.world.build_scheduler(scheduler_class, manager)
        if type(self.scheduler) is not scheduler_class:
            raise RuntimeError(f"{scheduler_class} fell back to {type(self.scheduler)}")
        self.hasher = _block_hasher(side, self.world)
        self.random = random.Random(0)
        self.num_missing: dict[str, int] = {}
        self.in_flight: tuple[SchedulerOutput, ModelRunnerOutput] | None = None
        self.schedule_times: list[int] = []
        self.update_times: list[int] = []
        self.message_times: list[int] = []
        self._frames = _message_writer(self.scheduler)
        if isinstance(self.scheduler, NativeScheduler) and side != UNCOUNTED:
            self.scheduler.report_to(EngineMeters(0))

    def request(self, request_id: str, prompt: list[int], max_tokens: int) -> Request:
        """Build a request as the engine does, its prompt hashed."""
        return self.load.request(request_id, prompt, max_tokens, self.hasher)

    def step(self) -> None:
        """Schedule a step, then take in the output of the one before."""
        start = time.perf_counter_ns()
        scheduled = self.scheduler.schedule()
        if self.load.has_grammars:
            self.scheduler.get_grammar_bitmask(scheduled)
        self.schedule_times.append(time.perf_counter_ns() - start)
        finished, self.in_flight = self.in_flight, (scheduled, self._execute(scheduled))
        if finished is not None:
            start = time.perf_counter_ns()
            outputs = self.scheduler.update_from_output(*finished)
            updated = time.perf_counter_ns()
            frames = [self._frames(client_outputs) for client_outputs in outputs.values()]
            self.message_times.append(time.perf_counter_ns() - updated)
            self.update_times.append(updated - start)
            del outputs, frames

    def drain(self) -> None:
        """Take in what is still in flight."""
        if self.in_flight is not None:
            self.scheduler.update_from_output(*self.in_flight)
            self.in_flight = None

    def _execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """Sample for each request whose prompt is computed to its end: a token, and some drafts."""
        for new in scheduled.scheduled_new_reqs:
            self.num_missing[new.req_id] = len(new.prompt_token_ids) - new.num_computed_tokens
        sampled: list[list[int]] = []
        for request_id, num_tokens in scheduled.num_scheduled_tokens.items():
            self.num_missing[request_id] -= num_tokens
            drafts = scheduled.scheduled_spec_decode_tokens.get(request_id, ())
            is_complete = self.num_missing[request_id] <= 0
            num_sampled = is_complete * (1 + self.random.randint(0, len(drafts)))
            sampled.append([self.random.randrange(VOCABULARY) for _ in range(num_sampled)])
        ids = list(scheduled.num_scheduled_tokens)
        rows = {request_id: row for row, request_id in enumerate(ids)}
        return ModelRunnerOutput(req_ids=ids, req_id_to_index=rows, sampled_token_ids=sampled)


def _message_writer(scheduler: SchedulerInterface) -> Callable[[Any], Any]:
    """Return what makes a message for a client of a step's outputs."""
    if not isinstance(scheduler, NativeScheduler):
        return MsgpackEncoder().encode
    # As in an engine that has rings: what is left to do is the end of the message.
    scheduler.encode_outputs_for(0)
    return StepOutputs.frames


def _block_hasher(side: str, world: World) -> BlockHasher | None:
    if side == "stock":
        return stock_block_hasher(world)
    from sparksched.engine.hooks import native_block_hasher

    algorithm = world.configuration.prefix_caching_hash_algo
    return native_block_hasher(algorithm, world.hash_block_size)


# ---- decode ----


def measure_decode(
    num_requests: int,
    num_steps: int,
    load: Load = PLAIN,
    sides: tuple[str, ...] = SIDES,
) -> dict[str, Any]:
    """Time a step of `num_requests` generating requests."""
    engines = _decoding_engines(num_requests, load, sides)
    with _heap_as_in_the_engine():
        for number in range(1 + num_steps // STEPS_IN_A_ROW):
            for engine in engines.values():
                for _ in range(STEPS_IN_A_ROW):
                    engine.step()
                if number == 0:  # the first turn warms up
                    engine.schedule_times.clear()
                    engine.update_times.clear()
                    engine.message_times.clear()
    for engine in engines.values():
        engine.scheduler.shutdown()
    result = {side: _decode_times(engine) for side, engine in engines.items()}
    return {"feature": load.name, "requests": num_requests} | result


def _decoding_engines(num_requests: int, load: Load, sides: tuple[str, ...]) -> dict[str, Engine]:
    engines = {side: Engine(side, load) for side in sides}
    for engine in engines.values():
        prompt_source = random.Random(1)
        for number in range(num_requests):
            # Of different lengths: requests need new blocks in different steps.
            length = prompt_source.randrange(128, 128 + 4 * BLOCK_SIZE)
            prompt = [prompt_source.randrange(VOCABULARY) for _ in range(length)]
            engine.scheduler.add_request(engine.request(f"request-{number}", prompt, 10**6))
        while engine.scheduler.get_request_counts()[0] < num_requests:
            engine.step()
    return engines


def _decode_times(engine: Engine) -> dict[str, Any]:
    parts = (engine.schedule_times, engine.update_times, engine.message_times)
    return {
        "schedule_us": asdict(Spread.of(engine.schedule_times)),
        "update_us": asdict(Spread.of(engine.update_times)),
        "message_us": asdict(Spread.of(engine.message_times)),
        "step_us": asdict(Spread.of([sum(times) for times in zip(*parts, strict=True)])),
    }


class _heap_as_in_the_engine:
    """Long-lived objects are out of the collector's sight, as vLLM arranges after its start."""

    def __enter__(self) -> None:
        gc.collect()
        gc.freeze()

    def __exit__(self, *_: object) -> None:
        gc.unfreeze()


# ---- prefill ----


def measure_prefill(num_tokens: int, cached: bool, rounds: int) -> dict[str, Any]:
    """Time one request from its arrival in the engine to its first token."""
    engines = {side: Engine(side) for side in SIDES}
    times: dict[str, list[int]] = {side: [] for side in SIDES}
    prompts = {side: _prompts(num_tokens, cached) for side in SIDES}
    with _heap_as_in_the_engine():
        for number in range(rounds + 2):
            for side, engine in engines.items():
                taken = _prefill(engine, f"request-{number}", next(prompts[side]))
                if number >= 2:  # the first ones fill the cache and warm up
                    times[side].append(taken)
    result = {side: asdict(Spread.of(times[side])) for side in SIDES}
    return {"tokens": num_tokens, "prefix_cached": cached} | result


def _prompts(num_tokens: int, cached: bool) -> Iterator[list[int]]:
    source = random.Random(0)
    fixed = [source.randrange(VOCABULARY) for _ in range(num_tokens)]
    while True:
        yield list(fixed) if cached else [source.randrange(VOCABULARY) for _ in range(num_tokens)]


def _prefill(engine: Engine, request_id: str, prompt: list[int]) -> int:
    """Return nanoseconds spent in hashing and in the scheduler until the request is done."""
    start = time.perf_counter_ns()
    engine.scheduler.add_request(engine.request(request_id, prompt, max_tokens=1))
    taken = time.perf_counter_ns() - start
    engine.schedule_times.clear()
    engine.update_times.clear()
    while engine.scheduler.has_requests():
        engine.step()
    engine.drain()
    return taken + sum(engine.schedule_times) + sum(engine.update_times)


# ---- report ----


def main() -> None:
    """Measure, print tables and write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, for a first look")
    parser.add_argument("--verify", action="store_true", help="also what verification costs")
    parser.add_argument("--metrics", action="store_true", help="also what counting costs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, too")
    arguments = parser.parse_args()
    scale = 1 if arguments.quick else 5
    result = measure(scale)
    if arguments.verify:
        result["verified"] = measure_beside(VERIFIED_SIDES, "verified", VERIFIED_STEPS, scale)
    if arguments.metrics:
        result["counted"] = measure_beside(COUNTED_SIDES, "counted", DECODE_STEPS, scale)
    show(result, arguments.json)


def measure(scale: int) -> dict[str, Any]:
    """Measure everything, with `scale` times the fewest repetitions."""
    result: dict[str, Any] = {"run": describe_run(), "decode": [], "features": [], "prefill": []}
    num_cases = len(DECODE_STEPS) + len(FEATURES) * len(FEATURE_STEPS) + 2 * len(PROMPTS)
    with Progress(num_cases) as progress, vllm_environment(GPT_OSS):
        for count, steps in DECODE_STEPS.items():
            progress.begin(f"decode, {count} requests")
            result["decode"].append(measure_decode(count, scale * steps))
        for load, (count, steps) in itertools.product(FEATURES, FEATURE_STEPS.items()):
            progress.begin(f"{load.name}, {count} requests")
            result["features"].append(measure_decode(count, scale * steps, load))
        for tokens, cached in itertools.product(PROMPTS, (False, True)):
            progress.begin(f"prefill, {tokens} tokens")
            result["prefill"].append(measure_prefill(tokens, cached, scale * 10))
    return result


def measure_beside(
    sides: tuple[str, ...], what: str, steps_by_count: dict[int, int], scale: int
) -> list[dict[str, Any]]:
    """Measure what a step costs in another way, beside the way that it is compared with."""
    with Progress(len(steps_by_count)) as progress, vllm_environment(GPT_OSS):
        rows = []
        for count, steps in steps_by_count.items():
            progress.begin(f"{what}, {count} requests")
            rows.append(measure_decode(count, scale * steps, sides=sides))
        return rows


if __name__ == "__main__":
    main()
