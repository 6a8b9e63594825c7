"""What does a step cost the host? vLLM's scheduler and ours, side by side in one process.

Four questions, each answered for both schedulers in the same run and in alternation:

- `decode`: time of `schedule()`, of `update_from_output()` and of making the outputs a message, per
  step, by running requests, in vLLM's asynchronous engine loop (a step is scheduled before the
  former one's output is there). In vLLM a thread of its own makes messages; ours begins them in
  `update_from_output()`.
- `features`: the same, if all requests speculate, have a grammar, or an adapter. What grammars cost
  by themselves is left out: it is the same for both.
- `prefill`: time to hash, admit and prefill one request, with and without its prefix cached.
- `arrival`: time of `add_request()` alone, by priority, while each of some tenants has
  a request that waits; ours also with an order that is fair between them (docs/order.md).

With `--verify` also what a step costs that vLLM's scheduler verifies (docs/verify.md), with
`--metrics` what counting for `/metrics` has part in it (docs/metrics.md).

The KV cache groups are gpt-oss's: full attention and a sliding window of 128 tokens, blocks of 16.
Objects passed in and out are those that vLLM's engine passes and consumes; statistics are on, and
ours also counts for `/metrics`.

    python -m bench.micro.steps [--quick] [--verify] [--metrics] [--out DIR]
"""

import argparse
import gc
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from sparksched._core import EngineMeters, StepOutputs
from sparksched.engine.scheduler import NativeScheduler
from sparksched.environment import Order
from tqdm import tqdm
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackEncoder
from vllm.v1.structured_output import StructuredOutputManager

from bench.micro.loads import BLOCK_SIZE, FEATURES, GPT_OSS, PLAIN, GrammarsOfNoCost, Load
from bench.results import Results
from testkit.worlds.candidates import CANDIDATES, BlockHasher, stock_block_hasher
from testkit.worlds.world import World, build_world, vllm_environment

SIDES = ("vllm", "sparksched")
VERIFIED_SIDES = ("vllm", "verifying")
UNCOUNTED = "sparksched without metrics"
FAIR = "sparksched, fair"
CANDIDATE = {"vllm": "stock", UNCOUNTED: "sparksched", FAIR: "sparksched"}
"""What the test kit calls a side."""
COUNTED_SIDES = (UNCOUNTED, "sparksched")
VOCABULARY = 200_000
DECODE_STEPS = {1: 1000, 8: 400, 64: 200, 256: 100, 1024: 60}
"""By running requests: the fewest steps to measure."""
FEATURE_STEPS = {64: 100, 256: 60, 1024: 30}
VERIFIED_STEPS = {1: 400, 64: 100, 256: 60}
PROMPTS = (1024, 8192)
TENANTS = (1, 10_000)
Metrics = dict[str, float]
STEPS_IN_A_ROW = 20
"""Steps before it is the other side's turn: one side's objects don't evict the other's from the
processor's caches in each step, and slow phases of the machine still hit both."""


def spread(name: str, nanoseconds: list[int]) -> Metrics:
    """Return the median of times, and where a tenth and nine tenths of them are."""
    ordered = sorted(nanoseconds)
    at = lambda share: ordered[min(int(share * len(ordered)), len(ordered) - 1)] / 1000  # noqa: E731
    found = {f"{name}_us": statistics.median(ordered) / 1000}
    return found | {f"{name}_us_p10": at(0.1), f"{name}_us_p90": at(0.9)}


class Engine:
    """One scheduler in a loop like the engine's, with a model that takes no time."""

    def __init__(self, side: str, load: Load = PLAIN) -> None:
        self.load = load
        self.world: World = build_world(load.configuration)
        scheduler_class = CANDIDATES[CANDIDATE.get(side, side)](load.configuration)
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
            EngineMeters(0).time_steps(self.scheduler.core)
        if side == FAIR:
            self.scheduler.order_by(Order("fair", {}, 0.0))

    def request(self, request_id: str, prompt: list[int], max_tokens: int) -> Request:
        """Build a request as the engine does, its prompt hashed."""
        return self.load.request(request_id, prompt, max_tokens, self.hasher)

    def start_decoding(self, num_requests: int) -> None:
        """Take steps until so many requests generate."""
        source = random.Random(1)
        for number in range(num_requests):
            # Of different lengths: requests need new blocks in different steps.
            length = source.randrange(128, 128 + 4 * BLOCK_SIZE)
            prompt = [source.randrange(VOCABULARY) for _ in range(length)]
            self.scheduler.add_request(self.request(f"request-{number}", prompt, 10**6))
        while self.scheduler.get_request_counts()[0] < num_requests:
            self.step()

    def forget_times(self) -> None:
        """Begin to time anew."""
        for times in (self.schedule_times, self.update_times, self.message_times):
            times.clear()

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
    scheduler.core.encode_outputs_for(0)
    return StepOutputs.frames


def _block_hasher(side: str, world: World) -> BlockHasher | None:
    if side == "vllm":
        return stock_block_hasher(world)
    from sparksched.engine.hashing import native_block_hasher

    algorithm = world.configuration.prefix_caching_hash_algo
    return native_block_hasher(algorithm, world.hash_block_size)


# ---- decode ----


def measure_decode(
    num_requests: int,
    num_steps: int,
    load: Load = PLAIN,
    sides: tuple[str, ...] = SIDES,
) -> dict[str, Metrics]:
    """Return by side what a step of `num_requests` generating requests takes."""
    engines = {side: Engine(side, load) for side in sides}
    for engine in engines.values():
        engine.start_decoding(num_requests)
    with _heap_as_in_the_engine():
        for number in range(1 + num_steps // STEPS_IN_A_ROW):
            for engine in engines.values():
                for _ in range(STEPS_IN_A_ROW):
                    engine.step()
                if number == 0:  # the first turn warms up
                    engine.forget_times()
    for engine in engines.values():
        engine.scheduler.shutdown()
    return {side: _decode_times(engine) for side, engine in engines.items()}


def _decode_times(engine: Engine) -> Metrics:
    parts = (engine.schedule_times, engine.update_times, engine.message_times)
    names = ("schedule", "update", "message")
    found = [spread(name, times) for name, times in zip(names, parts, strict=True)]
    found.append(spread("step", [sum(times) for times in zip(*parts, strict=True)]))
    return dict(itertools.chain.from_iterable(it.items() for it in found))


@contextmanager
def _heap_as_in_the_engine() -> Iterator[None]:
    """Keep long-lived objects out of the collector's sight, as vLLM does after its start."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


# ---- prefill ----


def measure_prefill(num_tokens: int, cached: bool, rounds: int) -> dict[str, Metrics]:
    """Return by side what one request takes from its arrival in the engine to its first token."""
    engines = {side: Engine(side) for side in SIDES}
    times: dict[str, list[int]] = {side: [] for side in SIDES}
    prompts = {side: _prompts(num_tokens, cached) for side in SIDES}
    with _heap_as_in_the_engine():
        for number in range(rounds + 2):
            for side, engine in engines.items():
                taken = _prefill(engine, f"request-{number}", next(prompts[side]))
                if number >= 2:  # the first ones fill the cache and warm up
                    times[side].append(taken)
    return {side: spread("request", times[side]) for side in SIDES}


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
    engine.forget_times()
    while engine.scheduler.has_requests():
        engine.step()
    engine.drain()
    return taken + sum(engine.schedule_times) + sum(engine.update_times)


# ---- arrival ----


def measure_arrival(num_tenants: int, rounds: int) -> dict[str, Metrics]:
    """Return by side what it takes to put one more request into the queue."""
    by_priority, sides = Load("priorities", policy="priority"), (*SIDES, FAIR)
    engines = {side: Engine(side, by_priority) for side in sides}
    times: dict[str, list[int]] = {side: [] for side in sides}
    prompts = _prompts(128, cached=False)
    with _heap_as_in_the_engine():
        for number in range(num_tenants + rounds):
            prompt, tenant = next(prompts), f"tenant-{number % num_tenants}"
            for side, engine in engines.items():
                request = engine.request(f"request-{number}", prompt, max_tokens=128)
                request.sampling_params.extra_args = {"tenant": tenant}
                start = time.perf_counter_ns()
                engine.scheduler.add_request(request)
                times[side].append(time.perf_counter_ns() - start)
    return {side: spread("arrival", found[num_tenants:]) for side, found in times.items()}


# ---- report ----


def main() -> None:
    """Measure, print a table and write CSV."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, for a first look")
    parser.add_argument("--verify", action="store_true", help="also what verification costs")
    parser.add_argument("--metrics", action="store_true", help="also what counting costs")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where steps.csv is to be")
    options = parser.parse_args()
    scale = 1 if options.quick else 5
    results = Results(options.out, "steps")
    with vllm_environment(GPT_OSS):
        points = list(_points(scale))
        if options.verify:
            points += _beside("verified", VERIFIED_SIDES, VERIFIED_STEPS, scale)
        if options.metrics:
            points += _beside("counted", COUNTED_SIDES, DECODE_STEPS, scale)
        for name, measure in tqdm(points):
            for side, metrics in measure().items():
                results.add(name, side, None, metrics)
    results.show()


Point = tuple[str, Callable[[], dict[str, Metrics]]]
"""Its name, and what measures it."""


def _points(scale: int) -> Iterator[Point]:
    """Yield what is measured, with `scale` times the fewest repetitions."""
    for count, steps in DECODE_STEPS.items():
        yield f"{count}", partial(measure_decode, count, scale * steps)
    for load, (count, steps) in itertools.product(FEATURES, FEATURE_STEPS.items()):
        yield f"{load.name}: {count}", partial(measure_decode, count, scale * steps, load)
    for tokens, cached in itertools.product(PROMPTS, (False, True)):
        name = f"prompt of {tokens}" + (", prefix cached" if cached else "")
        yield name, partial(measure_prefill, tokens, cached, scale * 10)
    for tenants in TENANTS:
        yield f"arrival: {tenants} waiting", partial(measure_arrival, tenants, scale * 200)


def _beside(
    what: str, sides: tuple[str, ...], steps_by_count: dict[int, int], scale: int
) -> Iterator[Point]:
    """Yield what a step costs in another way, beside the way that it is compared with."""
    for count, steps in steps_by_count.items():
        yield f"{what}: {count}", partial(measure_decode, count, scale * steps, sides=sides)


if __name__ == "__main__":
    main()
