"""What does the host take for a token when the GPU is only a timer? Stock vLLM and sparksched.

Two sides take turns in the same run: an `AsyncLLM` in a process of its own with vLLM's scheduler
and sockets, and one with ours. Engines are vLLM's, in processes of their own, asynchronous, with
statistics and prefix caching. Their executor samples a token a step after a time that is given
(`bench.micro.clocked_executor`). On both sides all threads of the client run on one processor and
all of the engine on another, the same two.

- `decode`: streams that neither begin nor end in the window of time that is measured. Tokens a
  second that clients get; the time between outputs as the consumer of `generate()` sees it, and how
  many of these have several tokens; the time between a step's result and the next launch; CPU time
  a token. An engine that is faster than its client has to wait for it, or outputs would pile up: it
  gets results of no more than two steps that the client has not taken.
- `short`: requests of 1,024 tokens in and 4 out, none with a prefix in common, 256 at a time, and a
  GPU that takes no time: requests a second, and how long their first and last tokens take. A
  client that is slower than its engine gets all tokens of a request in one output.

Prompts are token ids, in the form in which vLLM's server hands them over, and so are outputs:
nothing is tokenized or detokenized. The KV cache groups are gpt-oss's, full attention and a sliding
window of 128 tokens, in blocks of 16. Each figure is the median over rounds.

    python -m bench.micro.host_path [--quick] [--json FILE] [--streams N,...] [--step-ms T,...]
"""

import argparse
import itertools
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.header import describe_run
from bench.micro.host_path_sides import OURS, STOCK, Client, Row, Setup, serve
from bench.micro.processes import BenchmarkError, Worker, in_turn, running_workers
from bench.progress import Progress
from bench.report.show import show

SIDES = (STOCK, OURS)
STREAMS = (1, 64, 256, 1024)
STEPS_MS = (0.0, 1.5, 4.0)
SHORT = {"workers": 256, "prompt_tokens": 1024, "max_tokens": 4}


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    rounds: int
    warm_up_s: float
    window_s: float


EFFORT = Effort(rounds=5, warm_up_s=0.4, window_s=2.0)
QUICK_EFFORT = Effort(rounds=1, warm_up_s=0.3, window_s=1.0)


# ---- processes ----


@contextmanager
def running_sides(
    cores: tuple[int, int],
) -> Iterator[tuple[dict[str, Worker], dict[str, Row]]]:
    """Start the clients of all sides, and their engines; yield them and what they are."""
    with (
        tempfile.TemporaryDirectory() as directory,
        running_workers(
            serve,
            {name: (Setup(name, Path(directory), *cores), Client) for name in SIDES},
        ) as running,
    ):
        yield running


def choose_cores() -> tuple[int, int]:
    """Return two processors, for clients and for engines; threads of two cores if there are."""
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        raise BenchmarkError("two processors are needed: one for the client, one for the engine")
    if len(allowed) > 2:
        del allowed[0]  # which serves most interrupts
    first = allowed[0]
    others = [it for it in allowed[1:] if it not in _threads_of_core(first)]
    return first, (others or allowed[1:])[0]


def _threads_of_core(cpu: int) -> set[int]:
    """Return the processors that are one core with this one, as far as the system tells."""
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    threads: set[int] = set()
    with suppress(OSError, ValueError):
        for part in path.read_text().strip().split(","):
            first, _, last = part.partition("-")
            threads.update(range(int(first), int(last or first) + 1))
    return threads


# ---- measurements ----


def measure(effort: Effort, streams: tuple[int, ...], steps_ms: tuple[float, ...]) -> Row:
    """Measure everything."""
    cores = choose_cores()
    with Progress(2 + len(steps_ms) * len(streams)) as progress:
        progress.begin("starting four processes")
        with running_sides(cores) as (sides, found):
            result: Row = {"run": describe_run(), "effort": asdict(effort), "sides": found}
            result["decode"] = []
            for step_ms, count in itertools.product(steps_ms, streams):
                progress.begin(f"streams: {count:,}, steps of {step_ms:g} ms")
                case = {"streams": count, "step_ms": step_ms}
                result["decode"].append(case | measure_in_turns(sides, effort, "decode", **case))
            progress.begin("short requests")
            result["short"] = SHORT | measure_in_turns(sides, effort, "short_requests", **SHORT)
    return result


def measure_in_turns(sides: dict[str, Worker], effort: Effort, command: str, **case: Any) -> Row:
    """Measure the sides in an order that changes with each round; return the medians."""
    times = {"warm_up_s": effort.warm_up_s, "window_s": effort.window_s}
    rows: dict[str, list[Row]] = {name: [] for name in sides}
    for number in range(effort.rounds):
        for name in in_turn(sides, number):
            rows[name].append(sides[name].call(command, **case, **times))
    return {name: _median(found) for name, found in rows.items()}


def _median(rows: list[Row]) -> Row:
    """Return the median of each figure."""
    result: Row = {}
    for key, first in rows[0].items():
        values = [row[key] for row in rows]
        result[key] = _median(values) if isinstance(first, dict) else statistics.median(values)
    return result


# ---- report ----


def main() -> None:
    """Measure, print tables and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one short round, for a first look")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, too")
    only: Row = {"metavar": "N,...", "help": "only these"}
    parser.add_argument("--streams", type=_numbers(int), default=STREAMS, **only)
    parser.add_argument("--step-ms", type=_numbers(float), default=STEPS_MS, **only)
    arguments = parser.parse_args()
    effort = QUICK_EFFORT if arguments.quick else EFFORT
    try:
        result = measure(effort, arguments.streams, arguments.step_ms)
    except BenchmarkError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted")
    show(result, arguments.json)


def _numbers(kind: type) -> Any:
    return lambda text: tuple(kind(part) for part in text.split(",") if part)


if __name__ == "__main__":
    main()
