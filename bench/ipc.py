"""What does a message between API server and engine cost? vLLM's sockets and our rings.

Two pairs of processes, one with vLLM's ZMQ sockets and one with shared-memory rings, take turns
with the same messages in the same run. All that vLLM does with a message is included: queues,
threads, encoding and decoding, the event loop. See `bench.ipc_sides` for the processes.

- `latency`: from before the sender's call to when the receiver begins to decode the message
  ("arrived"), and to when it has the decoded message in the thread that waits for it ("ready"); the
  two processes share a clock. The receiver sleeps when it is sent, unless the table says otherwise.
- `cpu`: CPU time a message, of all threads of a process: a sender's in the 2 ms after it has sent
  less that in the 2 ms after these, a receiver's from when it waits to when the message is ready,
  less that of an idle process. Freeing messages is not counted. Once without what vLLM's encoder
  and decoder take of it, and once with that. For a sender that is what the same loop takes if it
  only encodes the message, which includes the benchmark's own work. A step's outputs come to
  sparksched's transport as bytes: its scheduler writes them instead of making the objects that
  vLLM's encoder begins with. What that takes, `bench.step_cost` measures.
- `throughput`: messages a second, back to back.
- `ring`: the ring alone, between two threads that don't sleep.
- `idle`: CPU time of processes that wait.

The two take turns in rounds. p50 and p99 of latency and the median of CPU times are a round's, and
of these the tables show the median over the rounds: a burst of other work on the machine spoils one
round. The JSON also has the p99 of all messages together.

    python -m bench.ipc [--quick] [--json FILE] [--loop uvloop|asyncio]
"""

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from bench.header import describe_run
from bench.ipc_sides import LATEST_S, RINGS, ZMQ, Log, Setup, serve
from bench.progress import Progress

TRANSPORTS = (ZMQ, RINGS)
PACE_S = 0.004
NUM_WARM_UP = 20
START_S = 300.0
"""The import of vLLM may take minutes on a busy machine."""

Row = dict[str, Any]


class BenchmarkError(RuntimeError):
    """A process has died or has reported an error."""


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    rounds: int
    messages: int
    """Of each transport in a round of latencies."""
    dry_messages: int
    """Encoded but not sent, in a round."""
    flood: int
    idle_s: float


EFFORT = Effort(rounds=10, messages=125, dry_messages=40, flood=10_000, idle_s=5.0)
QUICK_EFFORT = Effort(rounds=1, messages=50, dry_messages=50, flood=5_000, idle_s=1.0)


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


class Worker:
    """A process that does what it is told through a pipe."""

    def __init__(self, context: ForkServerContext, side: str, setup: Setup) -> None:
        self._name = f"the {side} of {setup.transport}"
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=serve, args=(theirs, side, setup), name=self._name, daemon=True
        )
        self._process.start()
        theirs.close()

    def tell(self, command: str, **arguments: Any) -> None:
        """Start a command; `answer` waits for its end."""
        self._send((command, arguments))

    def _send(self, message: tuple[str, Row] | None) -> None:
        try:
            self._pipe.send(message)
        except ConnectionError:
            raise BenchmarkError(f"{self._name} doesn't listen") from None

    def answer(self, timeout_s: float = 3 * LATEST_S) -> Any:
        """Return the result of a command, or raise BenchmarkError."""
        if not wait([self._pipe, self._process.sentinel], timeout_s):
            raise BenchmarkError(f"{self._name} hasn't answered for {timeout_s:g} s")
        try:
            is_ok, result = self._pipe.recv()
        except (EOFError, ConnectionError):
            raise BenchmarkError(f"{self._name} doesn't answer") from None
        if not is_ok:
            raise BenchmarkError(f"{self._name} has failed:\n{result}")
        return result

    def call(self, command: str, **arguments: Any) -> Any:
        """Run a command and return its result."""
        self.tell(command, **arguments)
        return self.answer()

    def stop(self) -> None:
        """Have the process shut down, and wait for its end."""
        self._send(None)
        self.answer()
        self._process.join(LATEST_S)
        if self._process.exitcode != 0:
            raise BenchmarkError(f"{self._name} has ended with {self._process.exitcode}")

    def death(self) -> str | None:
        """Return how the process has ended, if it has."""
        self._process.join(0.1)
        code = self._process.exitcode
        return None if code is None else f"{self._name} has ended with exit code {code}"

    def kill(self) -> None:
        """End the process, if it still runs."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


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
        sent: Log = sender.call("send", count=count, pace_s=PACE_S, is_dry=False, **size, **work)
        return sent, receiver.answer()

    def dry_run(self, case: Case, count: int) -> float:
        """Return the CPU seconds that the sender's loop takes if it only encodes a message."""
        sender, _ = self._roles(case)
        size = {"num_tokens" if case.to_engine else "num_requests": case.size}
        work = {} if case.to_engine else {"work_s": case.work_s}
        log: Log = sender.call("send", count=count, pace_s=PACE_S, is_dry=True, **size, **work)
        return statistics.median(log.cpu_s)

    def _roles(self, case: Case) -> tuple[Worker, Worker]:
        return (self.client, self.engine) if case.to_engine else (self.engine, self.client)


@contextmanager
def running_pairs(loop: str) -> Iterator[dict[str, Pair]]:
    """Start both pairs; at the end they shut down, or are killed after an error."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    context = multiprocessing.get_context("forkserver")
    # Imported once, and not in this process.
    context.set_forkserver_preload(["vllm.engine.arg_utils", "vllm.v1.engine.core_client"])
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def start(side: str, transport: str) -> Worker:
            worker = Worker(context, side, Setup(transport, loop, directory))
            stack.callback(worker.kill)
            return worker

        pairs = {it: Pair(start("engine", it), start("client", it)) for it in TRANSPORTS}
        workers = [worker for pair in pairs.values() for worker in (pair.client, pair.engine)]
        try:
            for worker in workers:
                worker.answer(START_S)
            yield pairs
            for worker in workers:
                worker.stop()
        except BenchmarkError as error:
            deaths = [death for worker in workers if (death := worker.death())]
            raise BenchmarkError("\n".join([str(error), *deaths])) from None


# ---- measurements ----


def measure_case(pairs: dict[str, Pair], case: Case, effort: Effort) -> Row:
    """Measure latency and, if nothing else takes any, CPU time."""
    logs: dict[str, list[tuple[Log, Log]]] = {transport: [] for transport in pairs}
    dry_s: dict[str, list[float]] = {transport: [] for transport in pairs}
    for pair in pairs.values():
        pair.transfer(case, NUM_WARM_UP, thorough=True)
    for number in range(effort.rounds):
        for transport in _in_turn(pairs, number):
            logs[transport].append(pairs[transport].transfer(case, effort.messages))
            if case.measures_cpu:
                dry_s[transport].append(pairs[transport].dry_run(case, effort.dry_messages))
    result: Row = {"group": case.group, "message": case.label}
    return result | {it: _evaluate(case, logs[it], dry_s[it]) for it in pairs}


def _in_turn(pairs: dict[str, Pair], number: int) -> list[str]:
    """Return the transports in an order that changes with each round."""
    return list(pairs) if number % 2 == 0 else list(pairs)[::-1]


def _evaluate(case: Case, logs: list[tuple[Log, Log]], dry_s: list[float]) -> Row:
    row: Row = {}
    for what in ("arrived", "ready"):
        rounds = [_latencies(sent, received, what) for sent, received in logs]
        row |= {
            f"{what}_p50_us": 1e6 * _median_of_medians(rounds),
            f"{what}_p99_us": 1e6 * statistics.median(_percentile_99(it) for it in rounds),
            f"{what}_p99_of_all_us": 1e6 * _percentile_99(list(itertools.chain(*rounds))),
            # To show how they spread.
            f"{what}_p50_rounds_us": [1e6 * statistics.median(values) for values in rounds],
        }
    if case.measures_cpu:
        engines, clients = zip(*(log[::-1] if case.to_engine else log for log in logs), strict=True)
        sender = "client" if case.to_engine else "engine"
        for side, found in (("engine", engines), ("client", clients)):
            cpu_us = 1e6 * _median_of_medians([log.cpu_s for log in found])
            codec_us = 1e6 * (
                statistics.median(dry_s)
                if side == sender
                else _median_of_medians([log.codec_s for log in found])
            )
            row |= {f"{side}_cpu_us": cpu_us, f"{side}_transport_us": cpu_us - codec_us}
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
            for key in (f"{receiver}_cpu_us", f"{receiver}_transport_us"):
                if key in row[transport]:
                    row[transport][key] -= shares[receiver] / 100 * PACE_S * 1e6


def measure_throughput(pairs: dict[str, Pair], effort: Effort) -> dict[str, float]:
    """Count messages a second from engine to client, back to back, one output each."""
    rates: dict[str, list[float]] = {transport: [] for transport in pairs}
    for number in range(effort.rounds):
        for transport in _in_turn(pairs, number):
            pair = pairs[transport]
            pair.client.tell(
                "receive", num_requests=1, count=effort.flood, busy_s=0.0, thorough=False
            )
            pair.client.answer()  # it has started
            start: float = pair.engine.call("flood", count=effort.flood)
            received: Log = pair.client.answer()
            rates[transport].append(effort.flood / (received.times[-1] - start))
    return {transport: statistics.median(found) for transport, found in rates.items()}


def measure_ring(pair: Pair, effort: Effort) -> dict[str, float]:
    """Time small messages through rings that nothing else uses: nanoseconds a message."""
    pair.client.call("connect_bare", name=pair.engine.call("open_bare"))
    streams = []
    for _ in range(effort.rounds):
        pair.client.tell("bare_receive", count=effort.flood)
        pair.client.answer()  # it has started
        start: float = pair.engine.call("bare_send", count=effort.flood)
        end: float = pair.client.answer()
        streams.append({"stream": (end - start) * 1e9 / effort.flood})
    turns: list[Row] = [
        pair.engine.call("bare_turns", count=effort.flood) for _ in range(effort.rounds)
    ]
    rows = [stream | turn for stream, turn in zip(streams, turns, strict=True)]
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


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


# ---- targets ----


def judge(result: Row) -> list[Row]:
    """Compare the result with what the rings are meant to achieve."""
    asleep = [row for row in result["cases"] if row["group"] in (ASLEEP, TO_ENGINE)]
    idle = result["idle_percent"][RINGS]
    ring = result["ring_ns"]
    return [
        _judge_ratio(asleep, "arrived_p50_us", 0.5, "p50 until arrived, asleep"),
        _judge_ratio(asleep, "arrived_p99_us", 1.0, "p99 until arrived, asleep"),
        _judge_ratio(asleep, "ready_p50_us", 0.5, "p50 until ready, asleep"),
        _judge_ratio(asleep, "ready_p99_us", 1.0, "p99 until ready, asleep"),
        _judge_ratio(asleep, "engine_transport_us", 0.2, "CPU time without the codec, engine"),
        _judge_ratio(asleep, "client_transport_us", 0.5, "CPU time without the codec, client"),
        _judge_ratio(asleep, "engine_cpu_us", 0.2, "CPU time with the codec, engine"),
        _judge_ratio(asleep, "client_cpu_us", 0.5, "CPU time with the codec, client"),
        _judge_values(ring, 1000, "ring, both sides busy: under 1,000 ns a message"),
        _judge_values(idle, 0.3, "idle: under 0.3 % a process"),
    ]


def _judge_ratio(rows: list[Row], key: str, most: float, what: str) -> Row:
    ratios = {f"{row['group']}, {row['message']}": row[RINGS][key] / row[ZMQ][key] for row in rows}
    missed = [f"{label}: {ratio:.2f}" for label, ratio in ratios.items() if ratio > most]
    target = f"{what}: at most {most:g} of vLLM's"
    return {"target": target, "is_reached": not missed, "missed": missed}


def _judge_values(values: dict[str, float], most: float, what: str) -> Row:
    missed = [f"{label}: {value:.3g}" for label, value in values.items() if value >= most]
    return {"target": what, "is_reached": not missed, "missed": missed}


# ---- report ----

LATENCY_COLUMNS = {
    "arrived p50": "arrived_p50_us",
    "arrived p99": "arrived_p99_us",
    "ready p50": "ready_p50_us",
    "ready p99": "ready_p99_us",
}


def main() -> None:
    """Measure, print tables and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, for a first look")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, too")
    parser.add_argument("--loop", choices=("uvloop", "asyncio"), default="uvloop")
    arguments = parser.parse_args()
    try:
        result = measure(QUICK_EFFORT if arguments.quick else EFFORT, arguments.loop)
    except BenchmarkError as error:
        sys.exit(f"error: {error}")
    _print_report(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


def measure(effort: Effort, loop: str) -> Row:
    """Measure everything."""
    with Progress(len(CASES) + 4) as progress:
        progress.begin("starting four processes")
        with running_pairs(loop) as pairs:
            result: Row = {"run": describe_run() | {"loop": loop}, "effort": asdict(effort)}
            result["cases"] = []
            for case in CASES:
                progress.begin(f"{case.group}: {case.label}")
                result["cases"].append(measure_case(pairs, case, effort))
            progress.begin("throughput")
            result["messages_per_s"] = measure_throughput(pairs, effort)
            progress.begin("the ring alone")
            result["ring_ns"] = measure_ring(pairs[RINGS], effort)
            progress.begin("idle processes")
            result["idle_percent"] = measure_idle(pairs, effort)
    subtract_idle(result["cases"], result["idle_percent"])
    result["targets"] = judge(result)
    return result


def _print_report(result: Row) -> None:
    print("\n" + ", ".join(f"{name} {value}" for name, value in result["run"].items()))
    for group in dict.fromkeys(row["group"] for row in result["cases"]):
        rows = [row for row in result["cases"] if row["group"] == group]
        _print_table(f"{group}: µs", rows, LATENCY_COLUMNS)
    rows = [row for row in result["cases"] if "engine_cpu_us" in row[ZMQ]]
    columns = {"engine": "engine_transport_us", "client": "client_transport_us"}
    _print_table("CPU time a message, without encoding and decoding: µs", rows, columns)
    columns = {"engine": "engine_cpu_us", "client": "client_cpu_us"}
    _print_table("CPU time a message, with encoding and decoding: µs", rows, columns)
    rates = result["messages_per_s"]
    print("\nBack to back, engine to client, one output: messages a second")
    print(f"- vLLM {rates[ZMQ]:,.0f}, sparksched {rates[RINGS]:,.0f}")
    print("\nThe ring alone, 100 bytes, no side sleeps: ns a message")
    for what, value in result["ring_ns"].items():
        print(f"- {what}: {value:.0f}")
    print("\nIdle: % of a processor")
    for transport, shares in result["idle_percent"].items():
        print(f"- {transport}: " + ", ".join(f"{side} {it:.2f}" for side, it in shares.items()))
    print("\nTargets")
    for row in result["targets"]:
        verdict = "reached" if row["is_reached"] else f"not reached ({'; '.join(row['missed'])})"
        print(f"- {row['target']}: {verdict}")


def _print_table(title: str, rows: list[Row], columns: dict[str, str]) -> None:
    names = [f"{name} {it}" for name in columns for it in ("vLLM", "sparksched", "ratio")]
    print(f"\n{title}\n| message | {' | '.join(names)} |")
    print("| --- " * (1 + len(names)) + "|")
    for row in rows:
        cells = [row["message"]]
        for key in columns.values():
            theirs, ours = row[ZMQ][key], row[RINGS][key]
            cells += [f"{theirs:,.1f}", f"{ours:,.1f}", f"{ours / theirs:.2f}"]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
