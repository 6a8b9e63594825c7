"""What does a message between API server and engine cost? vLLM's sockets and our rings.

Two pairs of processes, one with vLLM's ZMQ sockets and one with shared-memory rings, take turns
with the same messages in the same run. All that vLLM does with a message is included: queues,
threads, encoding and decoding, the event loop. See `bench.micro.message_sides` for the processes.

- `latency`: from before the sender's call to when the receiver begins to decode the message
  ("arrived"), and to when it has the decoded message in the thread that waits for it ("ready"); the
  two processes share a clock. The receiver sleeps when it is sent, unless the table says otherwise.
- `cpu`: CPU time a message, of all threads of a process: a sender's in the 2 ms after it has sent
  less that in the 2 ms after these, a receiver's from when it waits to when the message is ready,
  less that of an idle process. Freeing messages is not counted. A step's outputs come to
  sparksched's transport as bytes: its scheduler writes them instead of making the objects that
  vLLM's encoder begins with. What that takes, `bench.micro.steps` measures.
- `idle`: CPU time of processes that wait.

The two take turns in rounds. p50 and p99 of latency and the median of CPU times are a round's, and
of these the tables show the median over the rounds: a burst of other work on the machine spoils one
round.

    python -m bench.micro.messages [--quick] [--out DIR]
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.micro.message_sides import RINGS, ZMQ, Log, Setup, serve
from bench.micro.processes import BenchmarkError, Worker, in_turn, running_workers
from bench.progress import Progress
from bench.results import Results

TRANSPORTS = (ZMQ, RINGS)
PACE_S = 0.004
NUM_WARM_UP = 20

Row = dict[str, Any]


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    rounds: int
    messages: int
    """Of each transport in a round of latencies."""
    idle_s: float


EFFORT = Effort(rounds=10, messages=125, idle_s=5.0)
QUICK_EFFORT = Effort(rounds=1, messages=50, idle_s=1.0)


@dataclass(frozen=True)
class Case:
    """One kind of message, and what the two processes do besides."""

    group: str
    to_engine: bool
    size: int
    """Requests in a step's outputs, or tokens in a prompt; no tokens: an abort."""
    busy_s: float = 0.0
    """What each callback in the client's event loop takes; 0: it sleeps."""
    work_s: float = 0.0
    """For how long the engine's main thread goes on after it has sent outputs."""

    @property
    def label(self) -> str:
        """The row's name in tables."""
        if not self.to_engine:
            return f"{self.size:,} requests" if self.size > 1 else "1 request"
        return f"ADD, {self.size:,} tokens" if self.size else "ABORT"

    @property
    def measures_cpu(self) -> bool:
        """Whether there is nothing else that takes CPU time."""
        return not self.busy_s and not self.work_s


ASLEEP = "Engine to client, asleep"
BUSY = "Engine to client, its event loop busy with callbacks of 200 µs"
WORKING = "Engine to client, asleep; the engine goes on with 1 ms of Python, as with its next step"
TO_ENGINE = "Client to engine, asleep"

STEP_SIZES = (1, 64, 256, 1024)
CASES = (
    *(Case(ASLEEP, False, size) for size in STEP_SIZES),
    *(Case(BUSY, False, size, busy_s=200e-6) for size in STEP_SIZES),
    *(Case(WORKING, False, size, work_s=1e-3) for size in (1, 256)),
    *(Case(TO_ENGINE, True, size) for size in (100, 10_000, 0)),
)


# ---- processes ----


@dataclass(frozen=True)
class Pair:
    """An engine and a client with one transport between them."""

    engine: Worker
    client: Worker

    def transfer(self, case: Case, count: int, *, thorough: bool = False) -> tuple[Log, Log]:
        """Send messages; return the logs of sender and receiver."""
        sender, receiver = self._roles(case)
        size = {"num_tokens" if case.to_engine else "num_requests": case.size}
        busy, work = (
            ({}, {}) if case.to_engine else ({"busy_s": case.busy_s}, {"work_s": case.work_s})
        )
        receiver.tell("receive", count=count, thorough=thorough, **size, **busy)
        receiver.answer()  # it has started
        sent: Log = sender.call("send", count=count, pace_s=PACE_S, **size, **work)
        return sent, receiver.answer()

    def _roles(self, case: Case) -> tuple[Worker, Worker]:
        return (self.client, self.engine) if case.to_engine else (self.engine, self.client)


@contextmanager
def running_pairs() -> Iterator[dict[str, Pair]]:
    """Start both pairs."""
    with tempfile.TemporaryDirectory() as directory:
        setups = {it: Setup(it, Path(directory)) for it in TRANSPORTS}
        arguments = {
            f"the {side} of {transport}": (side, setups[transport])
            for transport in TRANSPORTS
            for side in ("client", "engine")
        }
        with running_workers(serve, arguments) as (workers, _):
            yield {
                it: Pair(workers[f"the engine of {it}"], workers[f"the client of {it}"])
                for it in TRANSPORTS
            }


# ---- measurements ----


def measure_case(pairs: dict[str, Pair], case: Case, effort: Effort) -> Row:
    """Measure latency and, if nothing else takes any, CPU time."""
    logs: dict[str, list[tuple[Log, Log]]] = {transport: [] for transport in pairs}
    for pair in pairs.values():
        pair.transfer(case, NUM_WARM_UP, thorough=True)
    for number in range(effort.rounds):
        for transport in in_turn(pairs, number):
            logs[transport].append(pairs[transport].transfer(case, effort.messages))
    result: Row = {"group": case.group, "message": case.label}
    return result | {it: _evaluate(case, logs[it]) for it in pairs}


def _evaluate(case: Case, logs: list[tuple[Log, Log]]) -> Row:
    row: Row = {}
    for what in ("arrived", "ready"):
        rounds = [_latencies(sent, received, what) for sent, received in logs]
        row |= {
            f"{what}_p50_us": 1e6 * _median_of_medians(rounds),
            f"{what}_p99_us": 1e6 * statistics.median(_percentile_99(it) for it in rounds),
        }
    if case.measures_cpu:
        engines, clients = zip(*(log[::-1] if case.to_engine else log for log in logs), strict=True)
        for side, found in (("engine", engines), ("client", clients)):
            row[f"{side}_cpu_us"] = 1e6 * _median_of_medians([log.cpu_s for log in found])
    return row


def _latencies(sent: Log, received: Log, what: str) -> list[float]:
    ends = received.arrivals if what == "arrived" else received.times
    return [end - start for start, end in zip(sent.times, ends, strict=True)]


def _percentile_99(values: list[float]) -> float:
    return sorted(values)[min(int(0.99 * len(values)), len(values) - 1)]


def _median_of_medians(rounds: list[list[float]]) -> float:
    return statistics.median(statistics.median(values) for values in rounds)


def subtract_idle(rows: list[Row], idle_percent: dict[str, dict[str, float]]) -> None:
    """Take what receivers need without messages from their CPU time a message."""
    for row in rows:
        receiver = "engine" if row["group"] == TO_ENGINE else "client"
        for transport, shares in idle_percent.items():
            if f"{receiver}_cpu_us" in row[transport]:
                row[transport][f"{receiver}_cpu_us"] -= shares[receiver] / 100 * PACE_S * 1e6


def measure_idle(pairs: dict[str, Pair], effort: Effort) -> dict[str, dict[str, float]]:
    """Return the share of a processor that each process takes while nothing happens, in percent."""
    workers = {
        (transport, side): worker
        for transport, pair in pairs.items()
        for side, worker in (("engine", pair.engine), ("client", pair.client))
    }
    for worker in workers.values():
        worker.tell("idle", seconds=effort.idle_s)
    shares: dict[str, dict[str, float]] = {transport: {} for transport in pairs}
    for (transport, side), worker in workers.items():
        shares[transport][side] = 100 * worker.answer()
    return shares


# ---- report ----


def main() -> None:
    """Measure, print tables and write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, for a first look")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where messages.csv is to be")
    arguments = parser.parse_args()
    results = Results(arguments.out, "messages")
    try:
        cases, idle_percent = measure(QUICK_EFFORT if arguments.quick else EFFORT)
    except BenchmarkError as error:
        sys.exit(f"error: {error}")
    for row in cases:
        for transport in TRANSPORTS:
            results.add(f"{row['group']}: {row['message']}", transport, None, row[transport])
    for transport, shares in idle_percent.items():
        metrics = {f"{side}_percent": share for side, share in shares.items()}
        results.add("idle", transport, None, metrics)
    results.show()


def measure(effort: Effort) -> tuple[list[Row], dict[str, dict[str, float]]]:
    """Measure everything; return a row for each case, and what idle processes take."""
    with Progress(len(CASES) + 2) as progress:
        progress.begin("starting four processes")
        with running_pairs() as pairs:
            rows = []
            for case in CASES:
                progress.begin(f"{case.group}: {case.label}")
                rows.append(measure_case(pairs, case, effort))
            progress.begin("idle processes")
            idle_percent = measure_idle(pairs, effort)
    subtract_idle(rows, idle_percent)
    return rows, idle_percent


if __name__ == "__main__":
    main()
