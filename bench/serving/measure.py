"""Measures one running server: rounds of streams, waits, CPU time, the same streams."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from bench.serving.drivers import Driver, HttpDriver
from bench.serving.evaluate import evaluate, missing, tokens_between
from bench.serving.loop_cpu import evaluate_engine
from bench.serving.phases import busiest, evaluate_phases
from bench.serving.server import ASYNC, Server
from bench.serving.streams import FIRST_END, RUNNING, StreamLog
from bench.serving.threads import Process, Snapshot, cpu_between
from bench.serving.workload import Workload

Row = dict[str, Any]
T = TypeVar("T")

WARM_UP_TOKENS = 32
MOST_WARM_UPS = 8
BLIND_WARM_UPS = 3
"""Where nobody tells what is compiled."""


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    rounds: int
    compared_streams: int
    compared_tokens: int


EFFORT = Effort(rounds=3, compared_streams=64, compared_tokens=64)
QUICK_EFFORT = Effort(rounds=1, compared_streams=8, compared_tokens=24)


class CpuWatch:
    """Looks at a server's threads when all streams run, and when the first has ended."""

    def __init__(self, processes: list[Process]) -> None:
        """Look at these processes."""
        self._processes = processes
        self._snapshots: dict[str, Snapshot] = {}

    def __call__(self, event: str) -> None:
        """Take notice of RUNNING or FIRST_END."""
        self._snapshots.setdefault(event, Snapshot.take(self._processes))

    def evaluate(self, logs: list[StreamLog]) -> Row:
        """Return shares of a processor by thread, and CPU time a token by process."""
        before, after = self._snapshots.get(RUNNING), self._snapshots.get(FIRST_END)
        if before is None or after is None or after.at <= before.at:
            return missing("the streams didn't run side by side")
        tokens = tokens_between(logs, before.at, after.at)
        shares = cpu_between(self._processes, before, after)
        seconds = after.at - before.at
        if not tokens:
            return missing("no token came meanwhile")
        us = {role: it["percent"] / 100 * seconds * 1e6 / tokens for role, it in shares.items()}
        return {"share": shares, "us_per_token": us}


def measure_in_turn(
    subjects: Sequence[tuple[Server, Driver]], workload: Workload, effort: Effort, case: str
) -> list[Row]:
    """Warm up, measure rounds without a probe, then one with, if there can be one.

    Args:
        subjects: What is measured, and how requests get there. Several take turns, in an order that
            changes with each round.
        workload: The requests, but for their prompts.
        effort: How often.
        case: What this cell has of its own: its prompts are no other cell's, which are cached.

    Raises:
        NothingMeasuredError: if a round brings nothing.
        RemoteError: if a server or a driver fails.

    """
    for server, driver in subjects:
        warm_up_with(server, driver, workload, case)
    found: list[Row] = [{"rounds": []} for _ in subjects]
    for number in range(effort.rounds):
        turns = list(zip(subjects, found, strict=True))
        for (server, driver), row in turns if number % 2 == 0 else reversed(turns):
            seeded = workload.seeded(case, number)
            row["rounds"].append(_measure_round(server, driver, seeded, server.processes()))
    for (server, driver), row in zip(subjects, found, strict=True):
        if server.remotes:
            steps = workload.seeded(case, "steps")
            row.update(_measure_steps(server, driver, steps, row["rounds"]))
    return found


def warm_up(
    server: Server, send: Callable[[int], T], has_stalled: Callable[[T], bool] | None = None
) -> None:
    """Send requests until no step has to wait for a kernel to be compiled, or often enough.

    Args:
        server: What is warmed up.
        send: Sends requests and waits for their ends; is given the number of the attempt.
        has_stalled: Says of what `send` returns whether a step has waited, where nobody else tells.

    """
    has_compiled(server)
    is_told = bool(server.remotes) or has_stalled is not None
    for number in range(MOST_WARM_UPS if is_told else BLIND_WARM_UPS):
        sent = send(number)
        if server.remotes:
            is_warm = not has_compiled(server)
        else:
            is_warm = has_stalled is not None and not has_stalled(sent)
        if is_warm:
            break


def warm_up_with(server: Server, driver: Driver, workload: Workload, case: str) -> None:
    """Warm a server up with requests of a case, shortened and with prompts of their own."""
    warm_up(server, partial(_send_shortened, server, driver, workload, case))


def _send_shortened(
    server: Server, driver: Driver, workload: Workload, case: str, number: int
) -> None:
    shortened = workload.shortened(WARM_UP_TOKENS).seeded(case, "warm-up", number)
    _prepare(server, shortened)
    driver.run(shortened, lambda event: None)


def has_compiled(server: Server) -> bool:
    """Whether workers have compiled anything since the last call, as far as anyone tells."""
    return bool(server.remotes) and any(server.remote.call("take_compiled"))


def _prepare(server: Server, workload: Workload) -> None:
    """Have the server ready for a round's requests, so that they are split alike each time.

    With pipeline stages they are all scheduled from the same step on: the split then depends on
    their lengths alone, and not on how fast they come.
    """
    server.settle()
    if server.start.layout.num_stages > 1 and server.remotes:
        server.remote.call("hold", num_requests=workload.num_requests)


def _measure_round(
    server: Server, driver: Driver, workload: Workload, processes: list[Process]
) -> Row:
    watch = CpuWatch(processes)
    before = server.num_preempted()
    _prepare(server, workload)
    logs = driver.run(workload, watch)
    about = {"cpu": watch.evaluate(logs), "preempted": server.preempted_since(before)}
    return evaluate(logs) | about


def _measure_steps(server: Server, driver: Driver, workload: Workload, rounds: list[Row]) -> Row:
    """Measure a round in which the engine's steps are noted; its rate doesn't count."""
    _prepare(server, workload)
    server.remote.call("start_probes")
    try:
        driver.run(workload, lambda event: None)
    finally:
        engines = server.remote.call("stop_probes")
    # Several engines share the requests: the steps of one stand for all of them.
    engine = busiest(engines)
    if server.start.layout.num_gpus > 1:
        return {"engine_cpu": evaluate_engine(engine, rounds)}
    is_async = server.start.mode == ASYNC
    return {"phases": evaluate_phases(engine, workload.num_requests, is_async)}


def measure_same_streams(driver: HttpDriver, workload: Workload) -> Row:
    """Return digests of what the same requests bring over HTTP, twice.

    Tokens are sampled at temperature 1, each request with a seed of its own, so that what is kept
    of a request's sampling counts as well, and greedy ones repeat themselves with random weights.
    """
    collected = [driver.collect(workload.seeded("same")) for _ in range(2)]
    return {"digests": [[_digest(stream) for stream in streams] for streams in collected]}


def _digest(token_ids: list[int]) -> str:
    return hashlib.sha256(",".join(map(str, token_ids)).encode()).hexdigest()[:16]
