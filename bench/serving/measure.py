"""Measures one running server: rounds of streams, phases, CPU time, traces, the same streams."""

import hashlib
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from bench.serving.compilations import evaluate_compiled
from bench.serving.drivers import Driver, Round
from bench.serving.evaluate import evaluate, missing, tokens_between
from bench.serving.loop_cpu import evaluate_engine, evaluate_loop
from bench.serving.memory_traffic import UnknownShapeError, peak_bytes_per_s, step_bytes
from bench.serving.phases import evaluate_messages, evaluate_phases, usual_size
from bench.serving.remote import RemoteError
from bench.serving.server import ASYNC, Metrics, Server, ServerError
from bench.serving.splits import busiest, fingerprints, turns
from bench.serving.streams import FIRST_END, RUNNING, clock
from bench.serving.threads import Process, Snapshot, cpu_between, what_spinners_do
from bench.serving.trace import NoTraceError, evaluate_trace, find_trace, read_events
from bench.serving.workload import Workload

Row = dict[str, Any]

NOT_AVAILABLE = "not available: there is no GPU"
ONE_GPU = "this is only known with one GPU"
WARM_UP_TOKENS = 32
MOST_WARM_UPS = 8
SPIN_LOOK_S = 0.15
TRACE_DELAY_STEPS = 8
TRACE_STEPS = 12
TRACE_TOKENS = 128
REQUESTS = "vllm:request_success_total"
COUNTERS = ("vllm:prefix_cache_queries", "vllm:prefix_cache_hits", "vllm:num_preemptions")


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    rounds: int
    idle_s: float
    compared_streams: int
    compared_tokens: int


EFFORT = Effort(rounds=3, idle_s=3.0, compared_streams=64, compared_tokens=64)
QUICK_EFFORT = Effort(rounds=1, idle_s=1.0, compared_streams=8, compared_tokens=24)


class CpuWatch:
    """Looks at a server's threads when all streams run, and when the first has ended."""

    def __init__(self, processes: list[Process], looks_at_spinners: bool = False) -> None:
        """Look at these processes."""
        self._processes = processes
        self._looks_at_spinners = looks_at_spinners
        self._snapshots: dict[str, Snapshot] = {}
        self._spinners: list[Row] = []
        self._looked_until = float("inf")

    def __call__(self, event: str) -> None:
        """Take notice of RUNNING or FIRST_END."""
        self._snapshots.setdefault(event, Snapshot.take(self._processes))
        if event == RUNNING and self._looks_at_spinners:
            before = self._snapshots[event]
            time.sleep(SPIN_LOOK_S)
            now = Snapshot.take(self._processes)
            self._spinners = what_spinners_do(self._processes, before, now)
            self._looked_until = clock()

    def spinners(self, done: Round) -> list[Row] | Row:
        """Return what threads did that took most of a processor."""
        if min(float(log.times[-1]) for log in done.logs) < self._looked_until:
            return missing("the streams had ended before the threads were looked at")
        return self._spinners

    def evaluate(self, done: Round) -> Row:
        """Return shares of a processor by thread, and CPU time a token by process."""
        before, after = self._snapshots.get(RUNNING), self._snapshots.get(FIRST_END)
        if before is None or after is None or after.at <= before.at:
            return missing("the streams didn't run side by side")
        tokens = tokens_between(done.logs, before.at, after.at)
        shares = cpu_between(self._processes, before, after)
        seconds = after.at - before.at
        if not tokens:
            return missing("no token came meanwhile")
        us = {role: it["percent"] / 100 * seconds * 1e6 / tokens for role, it in shares.items()}
        return {"share": shares, "us_per_token": us}


def measure_cell(
    server: Server, driver: Driver, workload: Workload, effort: Effort, gpu: str | None, case: str
) -> Row:
    """Warm up, measure rounds without a probe, then one with.

    Args:
        server: What is measured.
        driver: How requests get there.
        workload: The requests, but for their prompts.
        effort: How often.
        gpu: The GPU's name, if there is one.
        case: What this cell has of its own: its prompts are no other cell's, which are cached.

    Raises:
        NothingMeasuredError: if a round brings nothing.
        RemoteError: if the server or a driver fails.

    """
    _warm_up(server, driver, workload, case)
    processes = server.processes()
    rounds = []
    for number in range(effort.rounds):
        rounds.append(_measure_round(server, driver, workload.seeded(case, number), processes))
    found: Row = {"rounds": rounds, "is_held": is_held(server, workload)}
    if workload.is_steady:
        found |= _measure_phases(server, driver, workload.seeded(case, "phases"), processes)
        found["engine_cpu"] = evaluate_engine(found["engine_cpu"], rounds)
        tokens_per_s = statistics.median(entry["tokens_per_s"] for entry in rounds)
        step_ms = 1e3 * workload.num_requests / tokens_per_s
        found["memory"] = memory_traffic(server, workload, step_ms, gpu)
    return found


def _warm_up(server: Server, driver: Driver, workload: Workload, case: str) -> None:
    """Send requests until no step has to wait for a kernel to be compiled, or often enough."""
    _take_compiled(server)
    for number in range(MOST_WARM_UPS):
        warm_up = workload.shortened(WARM_UP_TOKENS).seeded(case, "warm-up", number)
        _prepare(server, warm_up)
        driver.run(warm_up, lambda event: None)
        if not _take_compiled(server).get("count"):
            break


def _take_compiled(server: Server) -> Row:
    """Return what the workers have compiled since the last call."""
    return evaluate_compiled(server.remote.call("take_compiled"))


def _prepare(server: Server, workload: Workload) -> None:
    """Have the server ready for a round's requests, so that they are split alike each time.

    With pipeline stages they are all scheduled from the same step on: the split then depends on
    their lengths alone, and not on how fast they come.
    """
    server.settle()
    if is_held(server, workload):
        server.remote.call("hold", num_requests=workload.num_requests)


def is_held(server: Server, workload: Workload) -> bool:
    """Whether a round begins once all requests are in the engines: its TTFT then says little."""
    return workload.is_steady and server.start.layout.num_stages > 1


def _measure_round(
    server: Server, driver: Driver, workload: Workload, processes: list[Process]
) -> Row:
    watch = CpuWatch(processes)
    _prepare(server, workload)
    is_split = is_held(server, workload)
    if is_split:
        server.remote.call("count")
    whole_before, before = server.metrics(), Snapshot.take(processes)
    done = driver.run(workload, watch)
    after = Snapshot.take(processes)
    server.settle()  # until then the last requests may not be counted yet
    whole_after = server.metrics()
    found = evaluate(done.logs, workload.is_steady)
    if workload.is_steady:
        found["cpu"] = watch.evaluate(done)
    else:
        found["cpu"] = {"share": cpu_between(processes, before, after)}
    found["counters"] = _counters(whole_before, whole_after)
    found["compiled"] = _take_compiled(server)
    if is_split:
        counted = server.remote.call("counted")
        found["turns"] = [turns(sizes, server.start.layout.num_stages) for sizes in counted]
    found["load"] = done.load
    return found


def _counters(before: Metrics, after: Metrics) -> Row:
    found: Row = {}
    for name in COUNTERS:
        of_engines = _counted(before, after, f"{name}_total")
        found[name.removeprefix("vllm:")] = (
            sum(of_engines.values()) if of_engines else missing("no such counter")
        )
    return found | {"requests_by_engine": _counted(before, after, REQUESTS)}


def _counted(before: Metrics, after: Metrics, name: str) -> dict[str, float]:
    """Return how far a counter has gone, by engine."""
    former = before.get(name, {})
    return {engine: it - former.get(engine, 0.0) for engine, it in after.get(name, {}).items()}


def _measure_phases(
    server: Server, driver: Driver, workload: Workload, processes: list[Process]
) -> Row:
    """Measure a round in which the engine's phases are timed; its rate doesn't count."""
    watch = CpuWatch(processes, looks_at_spinners=True)
    _prepare(server, workload)
    server.remote.call("start_probes")
    try:
        done = driver.run(workload, watch)
    finally:
        recorded = server.remote.call("stop_probes")
    engines = recorded["engines"]
    is_async = server.start.mode == ASYNC
    # Several engines share the requests: the steps of one stand for all of them.
    engine = busiest(engines)
    num_requests: int | None = usual_size(engine) if len(engines) > 1 else workload.num_requests
    if server.start.layout.num_stages > 1:
        num_requests = None
    messages = missing("messages are timed between one engine and one API server")
    if len(engines) == len(server.remotes) == 1:
        client = recorded["client"]
        outputs = usual_size(engine) if num_requests is None else num_requests
        messages = evaluate_messages({"engine": engine, "client": client}, outputs)
    return {
        "phases": evaluate_phases(engine, num_requests, is_async),
        "messages": messages,
        "engine_cpu": evaluate_loop(engine),
        "spinners": watch.spinners(done),
    }


def memory_traffic(server: Server, workload: Workload, step_ms: float, gpu: str | None) -> Row:
    """Return the memory bandwidth that steps of this duration mean, and the GPU's peak."""
    if gpu is None:
        return missing(NOT_AVAILABLE)
    if server.start.layout.num_gpus > 1:
        return missing(ONE_GPU)
    context = workload.prompt_tokens[1] + workload.output_tokens[1] / 2
    try:
        read = step_bytes(server.start.model.config, workload.num_requests, context)
    except UnknownShapeError as error:
        return missing(str(error))
    peak = peak_bytes_per_s(gpu)
    found: Row = {
        "least_gb": read.least / 1e9,
        "even_gb": read.even / 1e9,
        "least_gb_s": read.least / step_ms / 1e6,
        "even_gb_s": read.even / step_ms / 1e6,
        "peak_gb_s": missing(f"the peak of {gpu} is not known") if peak is None else peak / 1e9,
    }
    if peak is not None:
        found["least_share"] = found["least_gb_s"] / found["peak_gb_s"]
        found["even_share"] = found["even_gb_s"] / found["peak_gb_s"]
    return found


def measure_idle(server: Server, effort: Effort) -> Row:
    """Return what a server takes that has nothing to do, in percent of a processor."""
    processes = server.processes()
    before = Snapshot.take(processes)
    time.sleep(effort.idle_s)
    return cpu_between(processes, before, Snapshot.take(processes))


def measure_trace(server: Server, workload: Workload, steps: int = TRACE_STEPS) -> Row:
    """Return what the GPU does in a few steps; or why that isn't known."""
    if not server.start.has_gpu:
        return missing(NOT_AVAILABLE)
    if server.start.layout.num_gpus > 1:
        return missing(ONE_GPU)
    prefix = f"c{workload.num_requests}"
    length = workload.shortened(TRACE_TOKENS).seeded("trace")
    server.remote.call("stream", workload=length.shortened(WARM_UP_TOKENS), timeout_s=300.0)
    server.settle()
    server.remote.call(
        "trace",
        timeout_s=300.0,
        workload=length,
        prefix=prefix,
        delay_steps=TRACE_DELAY_STEPS,
        steps=steps,
    )
    try:
        events = read_events(find_trace(server.trace_dir, prefix))
        return evaluate_trace(events, workload.num_requests)
    except NoTraceError as error:
        return missing(str(error))


def measure_same_streams(server: Server, workload: Workload) -> Row:
    """Return digests of what the same requests bring, twice; and how varied that is.

    Tokens are sampled at temperature 1, each request with a seed of its own, so that what is kept
    of a request's sampling counts as well. The greedy ones are there, too.
    """
    with _lively_weights(server) as changed:
        sampled = _same_streams(server, workload, True)
        return sampled | {"greedy": _same_streams(server, workload, False), "scaled": changed}


@contextmanager
def _lively_weights(server: Server) -> Iterator[int | Row]:
    """Have weights scaled that are random; yield how many tensors, or why none.

    Raises:
        ServerError: if they can't be scaled back: then the server is of no more use.

    """
    if not server.start.model.has_dummy_weights:
        yield 0
        return
    try:
        changed = server.remote.call("scale_weights", is_back=False)
    except RemoteError as error:
        yield missing(str(error))
        return
    try:
        yield changed
    finally:
        try:
            server.remote.call("scale_weights", timeout_s=300.0, is_back=True)
        except RemoteError as error:
            raise ServerError(f"its weights are not what they were: {error}") from None


def _same_streams(server: Server, workload: Workload, is_sampled: bool) -> Row:
    collected = [_collect(server, workload.seeded("same"), is_sampled) for _ in range(2)]
    first, _ = collected[0]
    return {
        "is_sampled": is_sampled,
        "streams": len(first),
        "tokens": sum(map(len, first)),
        "distinct_tokens_median": statistics.median_low(len(set(stream)) for stream in first),
        "digests": [[_digest(stream) for stream in streams] for streams, _ in collected],
        "batches": [batches for _, batches in collected],
    }


def _collect(
    server: Server, workload: Workload, is_sampled: bool
) -> tuple[list[list[int]], list[str]]:
    """Return the requests' tokens, and of each engine a digest of its batches' sizes."""
    server.remote.call("count")
    streams = server.remote.call(
        "collect", timeout_s=300.0, workload=workload, is_sampled=is_sampled
    )
    return streams, fingerprints(server.remote.call("counted"))


def _digest(token_ids: list[int]) -> str:
    return hashlib.sha256(",".join(map(str, token_ids)).encode()).hexdigest()[:16]
