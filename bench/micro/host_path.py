"""What does the host take for a token when the GPU is only a timer? Stock vLLM and sparksched.

The sides take turns in the same run: an `AsyncLLM` in a process of its own with vLLM's scheduler
and sockets, and one with ours; with `--sides`, any of `bench/sides.toml`, such as our parts.
Engines are vLLM's, in processes of their own, asynchronous, with statistics and prefix caching.
Their executor samples a token a step after a time that is given (`bench.micro.clocked_executor`).
On all sides all threads of the client run on one processor and all of the engine on another, the
same two.

- `decode`: streams that neither begin nor end in the window of time that is measured. Tokens a
  second that clients get; the time between outputs as the consumer of `generate()` sees it, and how
  many of these have several tokens; the time between a step's result and the next launch; CPU time
  a token. An engine that is faster than its client has to wait for it, or outputs would pile up: it
  gets results of no more than two steps that the client has not taken.
- `delivery`: from a step's result in the engine to when the client has the outputs of all streams.
- `idle`: what both processes take of a processor while nothing is asked of them.

Prompts are token ids, in the form in which vLLM's server hands them over, and so are outputs:
nothing is tokenized or detokenized. The KV cache groups are gpt-oss's, full attention and a sliding
window of 128 tokens, in blocks of 16.

    python -m bench.micro.host_path [--quick] [--out DIR] [--streams N,...] [--step-ms T,...]
        [--sides A,...]
"""

import argparse
import itertools
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench.micro.host_path_sides import OURS, STOCK, Client, Row, Setup, serve
from bench.micro.processes import BenchmarkError, Worker, running_workers
from bench.results import Results
from bench.sides import find_side, in_turn

SIDES = ("vllm", "sparksched")
STREAMS = (1, 64, 256, 1024)
STEPS_MS = (0.0, 1.5, 4.0)


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
def running_sides(names: tuple[str, ...], cores: tuple[int, int]) -> Iterator[dict[str, Worker]]:
    """Start the clients of all sides, and their engines."""
    with tempfile.TemporaryDirectory() as directory:
        wanted = {it: (_setup(it, Path(directory), cores), Client) for it in names}
        with running_workers(serve, wanted) as (workers, _):
            yield workers


def _setup(name: str, directory: Path, cores: tuple[int, int]) -> Setup:
    side = find_side(name)
    arguments = dict(it.removeprefix("--").split("=") for it in side.arguments)
    return Setup(
        name,
        directory,
        *cores,
        scheduler=OURS if side.is_ours else STOCK,
        engine_arguments={it.replace("-", "_"): value for it, value in arguments.items()},
        environment=side.environment,
    )


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


def measure(
    results: Results,
    effort: Effort,
    names: tuple[str, ...],
    streams: tuple[int, ...],
    steps_ms: tuple[float, ...],
) -> None:
    """Measure everything."""
    times = {"warm_up_s": effort.warm_up_s, "window_s": effort.window_s}
    with running_sides(names, choose_cores()) as sides:
        for step_ms, count in tqdm(list(itertools.product(steps_ms, streams))):
            for number in range(effort.rounds):
                for name in in_turn(list(sides), number):
                    found = sides[name].call("decode", streams=count, step_ms=step_ms, **times)
                    point = f"{count} streams, {step_ms:g} ms"
                    results.add(point, name, number, dict(_flat(found)))
        for name, worker in sides.items():
            results.add("idle", name, 0, worker.call("idle", window_s=effort.window_s))


def _flat(row: Row, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield metrics: those of a group are named after it."""
    for name, value in row.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}_")
        else:
            yield f"{prefix}{name}", value


# ---- report ----


def main() -> None:
    """Measure, print a table and write CSV."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one short round, for a first look")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where CASE.csv is to be")
    parser.add_argument("--case", default="host_path", metavar="CASE", help="what rows call it")
    only: Row = {"metavar": "N,...", "help": "only these"}
    parser.add_argument("--sides", type=_list_of(str), default=SIDES, metavar="A,...")
    parser.add_argument("--streams", type=_list_of(int), default=STREAMS, **only)
    parser.add_argument("--step-ms", type=_list_of(float), default=STEPS_MS, **only)
    options = parser.parse_args()
    results = Results(options.out, options.case)
    effort = QUICK_EFFORT if options.quick else EFFORT
    try:
        measure(results, effort, options.sides, options.streams, options.step_ms)
    except BenchmarkError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted")
    results.show()


def _list_of(kind: type) -> Any:
    return lambda text: tuple(kind(part) for part in text.split(",") if part)


if __name__ == "__main__":
    main()
