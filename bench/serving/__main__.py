"""Measures a case of `bench/cases`: real servers, alive at the same time, in turn.

All servers of a comparison are started, on one GPU if its memory allows. Each point is warmed up on
each of them until no kernel is compiled any more, and then measured in rounds: a round of one
server follows a round of the other, so that what changes with time changes both. A round in which
a kernel was compiled doesn't count, and is repeated, three times at most.

    python -m bench.serving CASE --out DIR [--model NAME] [--sides A,B] [--points TEXT,...]
        [--rounds N] [--gpus 0,1] [--one-at-a-time] [--minutes M] [--set NAME=VALUE]...

Rows go to DIR/CASE.csv (see `bench.results`) as soon as they are measured; a run with the same DIR
adds to it. The exit status is 1 if a point has failed, 3 if --minutes were too short for all.
"""

import argparse
import json
import sys
import time
import tomllib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.filler import FILLERS
from bench.filler import OURS as OUR_FILLER
from bench.models import ModelError, prepare
from bench.results import NO_GPU, Results, gpu_name
from bench.serving import agents, experts, mixed, tenants, tokens, vllm_client
from bench.serving.client import RequestError
from bench.serving.servers import Plan, Server, running
from bench.sides import find_side, in_turn
from testkit.server import ServerError

CASES = Path(__file__).resolve().parents[1] / "cases"
LOADS = {it.__name__.rpartition(".")[2]: it for it in (agents, experts, mixed, tenants, tokens)}
CLIENT = "client"
"""The load of points that name none: `vllm bench serve`, with the options of this key."""
AT_ONCE = 128
"""Requests under way while it is measured what a server sustains."""
MOST_WARM_UPS = 6
MOST_REPEATED = 3
"""So many rounds may follow, in place of those in which a kernel was compiled."""
WITHOUT_WEIGHTS = "none"
FAILURES = (RequestError, ServerError, OSError, httpx.HTTPError, TimeoutError)
WAIT_S = 600.0

Point = dict[str, Any]


@dataclass
class Case:
    """What a file of `bench/cases` says."""

    name: str
    about: str
    model: str
    sides: list[str]
    points: list[Point]
    rounds: int = 5
    max_num_seqs: int = 256
    max_model_len: int = 2048
    kv_gib: float | None = None
    filler: str = OUR_FILLER
    arguments: list[str] = field(default_factory=list)


class OutOfTimeError(Exception):
    """What is left needs more time than there is."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure a case; return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        case = read_case(options)
        sides = [find_side(it) for it in case.sides]
    except (OSError, KeyError, ValueError, TypeError) as error:
        parser.error(f"{error}")
    has_gpu = gpu_name() != NO_GPU
    work_dir = options.work_dir.resolve()
    try:
        model = prepare(case.model, work_dir)
    except ModelError as error:
        parser.error(f"{error}")
    plan = Plan(
        model=model,
        has_gpu=has_gpu,
        max_num_seqs=case.max_num_seqs,
        max_model_len=case.max_model_len,
        kv_gib=case.kv_gib,
        filler=case.filler,
        arguments=(*case.arguments, *options.serve_args.split()),
        gpus=tuple(options.gpus.split(",")) if options.gpus else (),
    )
    run = _Run(case, Results(options.out, case.name, model=model.name), options)
    groups = [[it] for it in sides] if options.one_at_a_time else [sides]
    try:
        for group in groups:
            with running(group, plan, work_dir) as servers:
                if len(servers) < len(group):
                    run.status = 1
                run.measure(servers)
    except OutOfTimeError:
        print("no time is left for the rest", file=sys.stderr)
        return 3
    return run.status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.serving", description=(__doc__ or "").strip())
    known = ", ".join(sorted(it.stem for it in CASES.glob("*.toml")))
    parser.add_argument("case", help=f"a TOML file, or one of: {known}")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where CASE.csv is to be")
    parser.add_argument("--model", help="in the place of the case's")
    parser.add_argument("--sides", type=_names, metavar="A,...", help="names of bench/sides.toml")
    parser.add_argument("--points", type=_names, metavar="TEXT,...", help="whose name begins so")
    parser.add_argument("--rounds", type=int, metavar="N")
    parser.add_argument("--filler", choices=FILLERS, help="of random weights")
    parser.add_argument("--kv-gib", type=float, metavar="GIB", help="each server's KV cache")
    parser.add_argument("--gpus", default="", metavar="0,1", help="servers are placed in turn")
    parser.add_argument("--one-at-a-time", action="store_true", help="where memory is short")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="a recording, for some cases")
    parser.add_argument("--sustained", metavar="RATE|FILE", help="requests/s that vLLM can serve")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a point's"
    )
    parser.add_argument("--minutes", type=float, default=1e6, metavar="M")
    parser.add_argument("--serve-args", default="", metavar="ARGS", help="more for `vllm serve`")
    default = Path("/tmp/sparksched-bench")
    parser.add_argument("--work-dir", type=Path, default=default, help="models and logs")
    return parser


def _names(text: str) -> list[str]:
    return [it for it in text.split(",") if it]


def read_case(options: argparse.Namespace) -> Case:
    """Return a case with what the options change of it.

    Raises:
        ValueError: if it isn't one, or an option makes no sense with it.

    """
    path = Path(options.case)
    path = path if path.suffix == ".toml" else CASES / f"{options.case}.toml"
    case = Case(path.stem, **tomllib.loads(path.read_text()))
    for name in ("model", "sides", "rounds", "filler", "kv_gib"):
        if (value := getattr(options, name)) is not None:
            setattr(case, name, value)
    if options.points:
        chosen = tuple(options.points)
        case.points = [it for it in case.points if it["name"].startswith(chosen)]
    changed = {}
    for text in options.set:
        name, _, value = text.partition("=")
        changed[name] = json.loads(value)
    for point in case.points:
        point.update({name: value for name, value in changed.items() if name in point})
        # Of a recorded load, which the project doesn't contain.
        if point.get("trace") is not None:
            if options.trace is None:
                raise ValueError(f"{case.name} needs --trace FILE")
            point["trace"] = str(options.trace.resolve())
            if CLIENT in point:
                point[CLIENT]["dataset-path"] = point["trace"]
    if not case.points:
        raise ValueError("no point is left")
    return case


@dataclass
class _Run:
    case: Case
    results: Results
    options: argparse.Namespace
    status: int = 0
    began: float = field(default_factory=time.monotonic)
    sustained: float | None = None

    def measure(self, servers: list[Server]) -> None:
        """Measure all points on these servers.

        Raises:
            OutOfTimeError: if there is no time for one.

        """
        for point in self.case.points if servers else ():
            try:
                self._measure_point(servers, dict(point))
            except FAILURES as error:
                print(f"failed: {point['name']}: {error!r}", file=sys.stderr, flush=True)
                self.status = 1

    def _measure_point(self, servers: list[Server], point: Point) -> None:
        name = point["name"]
        if "rate" in point:
            rate = point["rate"] * self._sustained(servers[0], point)
            point[CLIENT] = point[CLIENT] | {"request-rate": f"{rate:.4g}"}
        for server in servers:
            self._warm_up(server, point)
        longest_s, num_left = 0.0, {it.side.name: self.case.rounds for it in servers}
        for number in range(self.case.rounds + MOST_REPEATED):
            for server in in_turn(servers, number):
                if num_left[server.side.name] == 0:
                    continue
                self._check_time(longest_s)
                start = time.monotonic()
                metrics = self._round(server, point, number, is_warm_up=False)
                longest_s = max(longest_s, time.monotonic() - start)
                self._write(name, server, number, metrics)
                num_left[server.side.name] -= not metrics["compiled"]
        for side, num in num_left.items():
            if num:
                print(f"{name}, {side}: {num} rounds too few: kernels were compiled", flush=True)

    def _write(self, name: str, server: Server, number: int, metrics: dict[str, float]) -> None:
        model = server.model
        filler = server.filler if model.has_dummy_weights else WITHOUT_WEIGHTS
        self.results.add(name, server.side.name, number, metrics, filler=filler)
        shown = ", ".join(f"{it} {value:.4g}" for it, value in metrics.items())
        print(f"{name}, {server.side.name}, {number}: {shown}", flush=True)

    def _warm_up(self, server: Server, point: Point) -> None:
        point = point | {CLIENT: point["warm_up"]} if "warm_up" in point else point
        for number in range(MOST_WARM_UPS):
            self._check_time()
            before = server.num_compiled()
            self._round(server, point, -1 - number, is_warm_up=True)
            if server.num_compiled() == before:
                return
            print(f"{point['name']}, {server.side.name}: kernels were compiled", flush=True)

    def _round(
        self, server: Server, point: Point, number: int, *, is_warm_up: bool
    ) -> dict[str, float]:
        seed = zlib.crc32(f"{self.case.name} {point['name']} {number}".encode()) % 2**31
        if point.get("empties_cache"):
            server.empty_cache()
        before, compiled = server.threads(), server.num_compiled()
        preempted = server.counters().get("preempted")
        start = time.monotonic()
        if CLIENT in point:
            found = vllm_client.run(server, point[CLIENT], seed)
        else:
            load = LOADS[point["load"]]
            found = load.measure(server, point | {"is_warm_up": is_warm_up}, seed)
        seconds = found.get("seconds", time.monotonic() - start)
        cpu = server.threads().since(before, seconds, int(found.get("tokens", 0)))
        found |= cpu | {"compiled": server.num_compiled() - compiled}
        if preempted is not None and "preempted" not in found:
            found["preempted"] = server.counters().get("preempted", preempted) - preempted
        return found

    def _sustained(self, server: Server, point: Point) -> float:
        """Return the requests a second that the first server serves while enough are under way."""
        if self.sustained is not None:
            return self.sustained
        given = self.options.sustained
        path = Path(given) if given and not given.replace(".", "", 1).isdecimal() else None
        if given and path is None:
            self.sustained = float(given)
        elif path is not None and server.side.name.removesuffix("-rust") != "vllm":
            self.sustained = _wait_for(path)
        else:
            options = point[CLIENT] | {"max-concurrency": AT_ONCE, "num-prompts": 4 * AT_ONCE}
            options.pop("request-rate", None)
            # The first time is for kernels.
            *_, found = (vllm_client.run(server, options, 10**6 + turn) for turn in range(2))
            self.sustained = found["requests_per_s"]
            self._write("sustained", server, 0, found)
            if path is not None:
                path.write_text(f"{self.sustained}")
        return self.sustained

    def _check_time(self, needed_s: float = 0.0) -> None:
        if time.monotonic() - self.began + needed_s > 60 * self.options.minutes:
            raise OutOfTimeError


def _wait_for(path: Path) -> float:
    """Return the number that another run writes into a file.

    Raises:
        TimeoutError: if it doesn't.

    """
    deadline = time.monotonic() + WAIT_S
    while not (path.exists() and path.read_text()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody has written {path}")
        time.sleep(0.5)
    return float(path.read_text())


if __name__ == "__main__":
    sys.exit(main())
