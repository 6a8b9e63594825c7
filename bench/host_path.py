"""What does the host take for a token when the GPU is only a timer? Stock vLLM and sparksched.

Two sides take turns in the same run: an `AsyncLLM` in a process of its own with vLLM's scheduler
and sockets, and one with ours. Engines are vLLM's, in processes of their own, asynchronous, with
statistics and prefix caching. Their executor samples a token a step after a time that is given
(`bench.clocked_executor`). On both sides all threads of the client run on one processor and all
of the engine on another, the same two.

- `decode`: streams that neither begin nor end in the window of time that is measured. Tokens a
  second that clients get; inter-token latency (ITL) as the consumer of `generate()` sees it, in
  which tokens that come merged in one output come at once; the time between a step's result and the
  next launch; CPU time a token of each thread. An engine that is faster than its client has to wait
  for it, or outputs would pile up: it gets results of no more than `--ahead` steps that the client
  has not taken.
- `short`: requests of 1,024 tokens in and 4 out, none with a prefix in common, 256 at a time, and a
  GPU that takes no time: requests a second, and CPU time a request.
- `own cost`: what the executor, the consumer of outputs and the pipe by which the client holds the
  engine back take of these times, measured alone. An engine that waits for the pipe takes about as
  much as one that sleeps.
- `timer`: how well the machine keeps the executor's time when neither engine nor client do
  anything. An ITL can't be steadier than that.
- `other work`: the share of the two processors that other processes have taken meanwhile. Figures
  beside which that is more than a few percent say little.

Prompts are token ids, in the form in which vLLM's server hands them over, and so are outputs:
nothing is tokenized or detokenized. The KV cache groups are gpt-oss's, full attention and a sliding
window of 128 tokens, in blocks of 16. Each figure is the median over rounds.

    python -m bench.host_path [--quick] [--json FILE] [--streams N,...] [--step-ms T,...]
        [--no-short] [--ahead N]
"""

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from bench.header import describe_run
from bench.host_path_sides import LATEST_S, OURS, STOCK, Row, Setup, serve
from bench.progress import Progress

SIDES = (STOCK, OURS)
SHARES = ("p50", "p90", "p99")
SHORT = {"workers": 256, "prompt_tokens": 1024, "max_tokens": 4}
START_S = 300.0
"""The import of vLLM may take minutes on a busy machine."""


class BenchmarkError(RuntimeError):
    """A process has died or has reported an error, or this machine won't do."""


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    rounds: int
    warm_up_s: float
    window_s: float
    own_steps: int
    """Of the executor alone."""


EFFORT = Effort(rounds=5, warm_up_s=0.4, window_s=2.0, own_steps=2000)
QUICK_EFFORT = Effort(rounds=1, warm_up_s=0.3, window_s=1.0, own_steps=1000)


# ---- processes ----


class Side:
    """A client and its engine: processes that do what they are told through a pipe."""

    def __init__(self, context: ForkServerContext, setup: Setup) -> None:
        self._name = f"the client of {setup.side}"
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, setup), name=self._name)
        self._process.start()
        theirs.close()

    def call(self, command: str, **arguments: Any) -> Any:
        """Run a command and return its result, or raise BenchmarkError."""
        self._send((command, arguments))
        return self.answer()

    def _send(self, message: tuple[str, Row] | None) -> None:
        try:
            self._pipe.send(message)
        except ConnectionError:
            raise self._death() from None

    def answer(self, timeout_s: float = 1.5 * LATEST_S) -> Any:
        """Return what the process says next, or raise BenchmarkError."""
        if not wait([self._pipe, self._process.sentinel], timeout_s):
            raise BenchmarkError(f"{self._name} hasn't answered for {timeout_s:g} s")
        try:
            is_ok, result = self._pipe.recv()
        except (EOFError, ConnectionError):
            raise self._death() from None
        if not is_ok:
            raise BenchmarkError(f"{self._name} has failed:\n{result}")
        return result

    def _death(self) -> BenchmarkError:
        self._process.join(1.0)
        return BenchmarkError(f"{self._name} has ended with exit code {self._process.exitcode}")

    def stop(self) -> None:
        """Have client and engine shut down, and wait for their end."""
        self._send(None)
        self.answer()
        self._process.join(LATEST_S)
        if self._process.exitcode != 0:
            raise self._death()

    def kill(self) -> None:
        """End client and engine, if they still run."""
        assert self._process.pid is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the client leads a group of its own
        self._process.kill()
        self._process.join()
        self._pipe.close()


@contextmanager
def running_sides(cores: tuple[int, int]) -> Iterator[tuple[dict[str, Side], dict[str, Row]]]:
    """Start both sides; yield them and what they are. At the end they shut down, or are killed."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    context = multiprocessing.get_context("forkserver")
    # Imported once, and not in this process.
    context.set_forkserver_preload(["vllm.engine.arg_utils", "vllm.v1.engine.async_llm"])
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sides: dict[str, Side] = {}
        for name in SIDES:
            sides[name] = Side(context, Setup(name, directory, *cores))
            stack.callback(sides[name].kill)
        yield sides, {name: side.answer(START_S) for name, side in sides.items()}
        for side in sides.values():
            side.stop()


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


@dataclass(frozen=True)
class Cases:
    """What is measured."""

    streams: tuple[int, ...] = (1, 64, 256, 1024)
    steps_ms: tuple[float, ...] = (0.0, 1.5, 4.0)
    max_ahead: int = 2
    """Steps whose results the engine gets before the client has taken them.

    0: any number, until a transport gives up because too much waits for the client.
    With two, an engine that is the faster one has always the next step's outputs ready for its
    client; with three, outputs of two steps come to be merged.
    """
    with_short: bool = True


def measure(effort: Effort, cases: Cases) -> Row:
    """Measure everything."""
    cores = choose_cores()
    with Progress(_num_steps(cases)) as progress:
        progress.begin("starting four processes")
        with running_sides(cores) as (sides, found):
            for name, it in found.items():
                pids = f"client {it['client_pid']}, engine {it['pid']}"
                progress.say(f"{name}: {pids}, over {it['transport']}")
            result: Row = {"run": _header(cores, found), "effort": asdict(effort)}
            result |= {"cases": asdict(cases), "sides": found}
            result |= _measure_cases(sides, effort, cases, progress)
    result["targets"] = judge(result)
    return result


def _num_steps(cases: Cases) -> int:
    num_decode = len(cases.steps_ms) * len(cases.streams)
    num_alone = len(cases.streams) + sum(step_ms > 0 for step_ms in cases.steps_ms)
    return 1 + num_decode + cases.with_short + num_alone


def _measure_cases(sides: dict[str, Side], effort: Effort, cases: Cases, progress: Progress) -> Row:
    result: Row = {"decode": [], "short": None, "own_cost": [], "timer": []}
    for step_ms in cases.steps_ms:
        for count in cases.streams:
            progress.begin(f"streams: {count:,}, steps of {step_ms:g} ms")
            row = measure_decode(sides, effort, cases.max_ahead, count, step_ms)
            result["decode"].append(row)
    if cases.with_short:
        progress.begin("short requests")
        result["short"] = measure_short(sides, effort)
    for count in cases.streams:
        progress.begin(f"the executor alone, streams: {count:,}")
        result["own_cost"].append(measure_own_cost(sides, effort, count))
    for step_ms in filter(None, cases.steps_ms):
        progress.begin(f"the timer alone, steps of {step_ms:g} ms")
        result["timer"].append(measure_timer(sides, effort, step_ms))
    return result


def _header(cores: tuple[int, int], found: dict[str, Row]) -> Row:
    client_core, engine_core = cores
    return describe_run() | {
        "loop": "uvloop",
        "client on processor": client_core,
        "engine on processor": engine_core,
        "same core": engine_core in _threads_of_core(client_core),
        "transport": found[OURS]["transport"],
        "detokenize": False,
    }


def measure_decode(
    sides: dict[str, Side], effort: Effort, max_ahead: int, streams: int, step_ms: float
) -> Row:
    """Measure streams in decode."""
    case = {"streams": streams, "step_ms": step_ms}
    return case | _measure_in_turns(sides, effort, "decode", **case, max_ahead=max_ahead)


def measure_short(sides: dict[str, Side], effort: Effort) -> Row:
    """Measure short requests."""
    return SHORT | _measure_in_turns(sides, effort, "short_requests", **SHORT)


def _measure_in_turns(sides: dict[str, Side], effort: Effort, command: str, **case: Any) -> Row:
    """Measure the sides in an order that changes with each round; return the medians."""
    times = {"warm_up_s": effort.warm_up_s, "window_s": effort.window_s}
    rows: dict[str, list[Row]] = {name: [] for name in sides}
    for number in range(effort.rounds):
        for name in list(sides)[:: 1 if number % 2 == 0 else -1]:
            rows[name].append(sides[name].call(command, **case, **times))
    return {name: _median(found) | {"rates": _rates_of(found)} for name, found in rows.items()}


def _rates_of(rounds: list[Row]) -> list[float]:
    """Return tokens or requests a second of each round, to show how they spread."""
    return [row.get("tokens_per_s") or row["requests_per_s"] for row in rounds]


def _median(rows: list[Row]) -> Row:
    """Return the median of each figure; a thread that is missing in a round has taken nothing."""
    result: Row = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        values = [row.get(key, 0.0) for row in rows]
        if any(isinstance(value, dict) for value in values):
            result[key] = _median([value or {} for value in values])
        else:
            result[key] = statistics.median(values)
    return result


def measure_own_cost(sides: dict[str, Side], effort: Effort, streams: int) -> Row:
    """Measure the executor and the consumer alone."""
    arguments = {"streams": streams, "steps": effort.own_steps}
    return {"streams": streams} | {
        name: side.call("measure_own_cost", **arguments) for name, side in sides.items()
    }


def measure_timer(sides: dict[str, Side], effort: Effort, step_ms: float) -> Row:
    """Measure how well the executor's sleeps keep the time when nothing else runs."""
    arguments = {"steps": effort.own_steps // 2, "step_ms": step_ms}
    return {"step_ms": step_ms} | {
        name: side.call("measure_timer", **arguments) for name, side in sides.items()
    }


# ---- targets ----


def judge(result: Row) -> list[Row]:
    """Compare the result with what the host path is meant to achieve, as far as it was measured."""
    rows = {(row["streams"], row["step_ms"]): row for row in result["decode"]}
    verdicts: list[Row] = []
    if row := rows.get((256, 0.0)):
        where = "256 streams, 0 ms"
        stock, ours = row[STOCK], row[OURS]
        engine_us, client_us = sum(ours["engine_us"].values()), sum(ours["client_us"].values())
        ratio = ours["tokens_per_s"] / stock["tokens_per_s"]
        verdicts += [
            _verdict(f"{where}: engine at most 2 µs a token", engine_us, engine_us <= 2),
            _verdict(f"{where}: client at most 6 µs a token", client_us, client_us <= 6),
            _verdict(f"{where}: at least 3 times vLLM's tokens a second", ratio, ratio >= 3),
        ]
    for streams, step_ms, share, most in (
        (256, 4.0, "p50", 0.03),
        (64, 1.5, "p50", 0.03),
        (64, 1.5, "p90", 0.10),
    ):
        if row := rows.get((streams, step_ms)):
            itl_ms = row[OURS]["itl_ms"][share]
            target = f"{streams} streams, {step_ms:g} ms: ITL {share} within {most:.0%} of the step"
            verdicts.append(_verdict(target, itl_ms, abs(itl_ms / step_ms - 1) <= most))
    if row := rows.get((64, 4.0)):
        ratio = row[OURS]["itl_ms"]["p99"] / row[OURS]["itl_ms"]["p50"]
        verdicts.append(_verdict("64 streams, 4 ms: ITL p99 under 1.1 p50", ratio, ratio < 1.1))
    if short := result["short"]:
        ratio = short[OURS]["requests_per_s"] / short[STOCK]["requests_per_s"]
        target = "short requests: at least 3 times vLLM's requests a second"
        verdicts.append(_verdict(target, ratio, ratio >= 3))
    return verdicts


def _verdict(target: str, value: float, is_reached: bool) -> Row:
    return {"target": target, "value": value, "is_reached": is_reached}


# ---- report ----


def main() -> None:
    """Measure, print tables and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one short round, for a first look")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, too")
    only: Row = {"metavar": "N,...", "help": "only these"}
    parser.add_argument("--streams", type=_numbers(int), default=Cases.streams, **only)
    parser.add_argument("--step-ms", type=_numbers(float), default=Cases.steps_ms, **only)
    parser.add_argument("--no-short", action="store_true", help="leave out short requests")
    parser.add_argument(
        "--ahead",
        type=int,
        default=Cases.max_ahead,
        metavar="N",
        help="steps that an engine may be ahead of its client; 0: any number",
    )
    arguments = parser.parse_args()
    cases = Cases(arguments.streams, arguments.step_ms, arguments.ahead, not arguments.no_short)
    try:
        result = measure(QUICK_EFFORT if arguments.quick else EFFORT, cases)
    except BenchmarkError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted")
    print_report(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


def _numbers(kind: type) -> Any:
    return lambda text: tuple(kind(part) for part in text.split(",") if part)


def print_report(result: Row) -> None:
    """Print tables of all that was measured."""
    print("\n" + ", ".join(f"{name} {value}" for name, value in result["run"].items()))
    rows = result["decode"]
    _print_table(
        "Decode: tokens a second at the client",
        ("vLLM", "sparksched", "ratio", *_both("of the engine:"), *_both("other work, %:")),
        {_label(row): _rates(row) for row in rows},
    )
    for title, key, digits in (
        ("Decode: ITL in ms", "itl_ms", 3),
        ("Decode: from a step's result to the next launch, in µs", "launch_us", 1),
    ):
        cells = {_label(row): _percentiles(row, key, digits) for row in rows}
        _print_table(title, [it for share in SHARES for it in _both(share)], cells)
    _print_table(
        "Decode: CPU µs a token, all threads; and outputs in which tokens were merged, in %",
        [it for what in ("engine", "client", "merged") for it in _both(what)],
        {_label(row): _costs(row) for row in rows},
    )
    _print_table(
        "Decode: CPU µs a token by thread",
        ("engine", "client"),
        {f"{_label(row)}: {it}": _threads(row[it], 2) for row in rows for it in SIDES},
    )
    if result["short"]:
        _print_short(result["short"])
    _print_own_cost(result["own_cost"])
    _print_table(
        "The executor's timer alone, with no engine and no client: ms between results",
        [it for share in SHARES for it in _both(share)],
        {f"{row['step_ms']:g} ms": _shares(row) for row in result["timer"]},
    )
    print("\nTargets")
    for row in result["targets"]:
        verdict = "reached" if row["is_reached"] else "not reached"
        print(f"- {row['target']}: {verdict} ({row['value']:.3g})")


def _both(what: str) -> list[str]:
    return [f"{what} {it}" for it in SIDES]


def _label(row: Row) -> str:
    return f"{row['streams']:,}, {row['step_ms']:g} ms"


def _rates(row: Row) -> list[str]:
    stock, ours = (row[it]["tokens_per_s"] for it in SIDES)
    engines = [f"{row[it]['engine_tokens_per_s']:,.0f}" for it in SIDES]
    others = [f"{row[it]['other_percent']:.0f}" for it in SIDES]
    return [f"{stock:,.0f}", f"{ours:,.0f}", f"{ours / stock:.2f}x", *engines, *others]


def _percentiles(row: Row, key: str, digits: int) -> list[str]:
    return [f"{row[it][key][share]:.{digits}f}" for share in SHARES for it in SIDES]


def _shares(row: Row) -> list[str]:
    return [f"{row[it][share]:.3f}" for share in SHARES for it in SIDES]


def _costs(row: Row) -> list[str]:
    keys = ("engine_us", "client_us")
    cpu = [f"{sum(row[it][key].values()):.2f}" for key in keys for it in SIDES]
    return cpu + [f"{100 * row[it]['merged_outputs'] / row[it]['outputs']:.1f}" for it in SIDES]


def _threads(found: Row, digits: int) -> list[str]:
    """Return what the threads took, of engine and client, without those that took nothing."""
    cells = []
    for key in ("engine_us", "client_us"):
        threads = sorted(found[key].items(), key=lambda it: -it[1])
        shown = [f"{name} {spent:.{digits}f}" for name, spent in threads if spent >= 10**-digits]
        cells.append(", ".join(shown))
    return cells


def _print_short(row: Row) -> None:
    stock, ours = (row[it]["requests_per_s"] for it in SIDES)
    title = (
        f"Short requests: {row['prompt_tokens']:,} tokens in, {row['max_tokens']} out, "
        f"{row['workers']} at a time, 0 ms; CPU µs a request by thread"
    )
    cells = {
        it: [
            f"{row[it]['requests_per_s']:,.0f}",
            f"{row[it]['other_percent']:.0f}",
            *_cpu_totals(row[it]),
            *_threads(row[it], 0),
        ]
        for it in SIDES
    }
    whose = ("engine", "client", "engine's threads", "client's threads")
    columns = ("requests/s", "other work, %", *whose)
    _print_table(title, columns, cells)
    print(f"\nThat is {ours / stock:.2f} times vLLM's rate.")


def _cpu_totals(found: Row) -> list[str]:
    return [f"{sum(found[key].values()):,.0f}" for key in ("engine_us", "client_us")]


def _print_own_cost(rows: list[Row]) -> None:
    cells = {}
    for row in rows:
        for it in SIDES:
            own, streams = row[it], row["streams"]
            cells[f"{streams:,}: {it}"] = [
                f"{own['step_us']:.1f}",
                f"{own['step_us'] / streams:.3f}",
                f"{own['sleeping_step_us']:.1f}",
                f"{own['sleeping_step_us'] / streams:.3f}",
                f"{own['output_us']:.3f}",
                f"{own['marker_us']:.1f}",
            ]
    executor = ("executor, a step", "a token", "a step with a sleep", "a token")
    columns = (*executor, "consumer, an output", "marker, a step")
    _print_table("Of these, the benchmark's own cost, measured alone: CPU µs", columns, cells)


def _print_table(title: str, columns: Any, rows: dict[str, list[str]]) -> None:
    print(f"\n{title}\n| | {' | '.join(columns)} |")
    print("| --- " * (1 + len(columns)) + "|")
    for label, cells in rows.items():
        print(f"| {label} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
