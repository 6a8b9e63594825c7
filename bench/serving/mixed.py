"""Who waits while a long prompt is computed? A real server, over HTTP.

Streams decode, then a long prompt comes, and short requests all along. Servers: vLLM, vLLM with
fixed thresholds for long prompts, sparksched, and sparksched with paced prefill. Each is warmed up
with rounds of the same until nothing compiles any more; then rounds are measured.

- `before_tokens_per_s`: of each stream, in the second before the long prompt comes.
- `stream_tokens_per_s`: of each stream, from the long prompt's arrival to its first token.
- `gap_ms`: between the outputs of streams in that time.
- `short_ttft_ms`, `long_ttft_s`: from sending a request to its first token.
- `tokens_per_s`: of all requests in that time, prompts included: what it costs.
- `alone_s`: the long prompt's first token where nobody decodes, the median.

With `--rates`, an ordinary load follows: requests of 1,024 tokens in and 128 out, as a Poisson
process, at these parts of what vLLM sustains: of the requests in a second, by their output tokens,
while 128 are always under way. The server `vllm` measures that, so it comes first, and the file
keeps it. Each server gets other requests at this rate first, until nothing stalls, or twelve times;
then, in each round, the same requests come at the same times to each. `requests_per_s` is of all
of a round, until the last one has ended. `silence_ms` is the longest time in which nobody got
anything though somebody waited: above a second, kernels were still compiled then. A single request
may wait for longer: if the KV cache is full, some are preempted (`preempted`). So all servers get
as much memory for it as the first one found.

A run with the same `--json` leaves out what that file has: each number of streams and each rate of
a server is written when it is measured. `--minutes` begins nothing that would end later, as far as
it is known from what came before; the exit status is 3 then. What fails is told and left out, and
the exit status is 1.

What paced prefill has decided in each step is in `pacing.jsonl` in the work directory; a summary is
among the results.

    python -m bench.serving.mixed --model gpt-oss-120b [--json FILE] [--streams 16,64]
        [--long 100000] [--sides vllm,vllm-1024,vllm-interval-4,paced-180-0.5,...] [--rounds N]
        [--rates 0.8,0.95] [--minutes M] [--serve-args ARGS] [--work-dir DIR]
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import re
import shlex
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.header import NO_GPU, describe_run
from bench.progress import Progress
from bench.report.mixed import PACING, STANDARD, parts_of
from bench.report.show import show
from bench.serving.benchmark import reason_of
from bench.serving.evaluate import summary, tokens_between
from bench.serving.gpus import memory_of_gpus, wait_until_free
from bench.serving.http_load import CompletionStream, encode
from bench.serving.models import Model, prepare
from bench.serving.options import WORK_DIR
from bench.serving.server import ASYNC, OURS, STOCK, SYNC, Server, ServerError, Start, serve
from bench.serving.streams import Recorder, StreamLog, clock
from bench.serving.workload import Workload

Row = dict[str, Any]

SIDES = ("vllm", "vllm-1024", "vllm-2048", "sparksched", "paced-180-0.5")
"""vLLM, with a threshold; ours, paced with a stall in ms and a share.

Where vLLM has `--prefill-schedule-interval`, since 0.33.0, also `vllm-interval-N`, and with a
threshold `vllm-interval-N-TOKENS`.
"""
SIDE = re.compile(r"vllm(-interval-\d+)?(-\d+)?|sparksched|paced-[\d.]+-[\d.]+")
STREAM_PROMPT_TOKENS = 128
SHORT_PROMPT_TOKENS = 100
SHORT_OUTPUT_TOKENS = 4
LONG_OUTPUT_TOKENS = 8
SETTLE_S = 1.5
"""For how long streams decode before the long prompt comes."""
BEFORE_S = 1.0
"""For how much of that it is measured what streams get by themselves."""
LATEST_S = 60.0
"""A long prompt that takes longer will never end."""
LINGER_S = 2.0
"""How long short requests have after the long prompt is through."""
MOST_WARM_UPS = 3
MOST_ORDINARY_WARM_UPS = 12
ON_GPU = (
    # One long prompt and the streams are to fit into the KV cache together.
    "--gpu-memory-utilization=0.92",
    # As vLLM captures by default, but fewer: a short prompt beside streams runs as a graph.
    "--compilation-config="
    + json.dumps({"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]}),
)
STALL_MS = 1_000.0
"""A longer stall means that kernels were compiled, if no step takes so long."""

ORDINARY_TOKENS = (1024, 128)
NUM_ORDINARY = 400
AT_ONCE = 128
"""Requests under way while it is measured what vLLM sustains."""
ROOM = 512
"""Requests that a server takes at once: for an ordinary load."""
LOG_NAME = "pacing.jsonl"


def main() -> int:
    """Measure, print a table and write JSON."""
    options = _options()
    run = describe_run() | {"options": " ".join(sys.argv[1:])}
    deadline = time.monotonic() + 60 * options.minutes
    try:
        results = _begin(options.json, run)
        _check_order(options, results)
    except ValueError as error:
        sys.exit(f"error: {error}")
    status = 0
    with tempfile.TemporaryDirectory(prefix="mixed-") as temporary:
        work_dir = (options.work_dir or Path(temporary)).resolve()
        model = prepare(options.model, work_dir)
        with Progress(len(options.sides)) as progress:
            for side in options.sides:
                progress.begin(side)
                cells = _missing(options, model, side, results)
                if not any(cells):
                    continue
                budget = _Budget(deadline, results["seconds"])
                try:
                    for failure in _measure(options, model, side, cells, results, work_dir, budget):
                        progress.say(f"failed: {side}, {failure}")
                        status = 1
                except _NoTimeError:
                    progress.say("no time is left for it: run this again to go on")
                    return 3
                except ServerError as error:
                    progress.say(f"failed: {side}: {reason_of(error)}")
                    status = 1
    return status


class _NoTimeError(Exception):
    """What comes next would end too late."""


class _FailedError(Exception):
    """Requests didn't go as they have to for a figure."""


class _Budget:
    """How much time there is, and what parts of a server's measurement have taken at most."""

    def __init__(self, deadline: float, longest_s: dict[str, float]) -> None:
        self.deadline = deadline
        self._longest_s = longest_s

    @contextlib.contextmanager
    def part(self, name: str, then: str = "") -> Iterator[None]:
        """Do something, if there is time for it, and for what comes `then`."""
        start = time.monotonic()
        if start + sum(self._longest_s.get(it, 0.0) for it in (name, then)) > self.deadline:
            raise _NoTimeError
        yield
        self._longest_s[name] = max(self._longest_s.get(name, 0.0), time.monotonic() - start)


Cells = tuple[list[int], list[float]]
"""Numbers of streams, and parts of the rate, that a server is to be measured with."""


def _begin(path: Path | None, run: Row) -> Row:
    """Return the results so far: what the file has, if there is one, of one or more runs."""
    lists: Row = {"runs": [run], "mixed": [], "ordinary": []}
    empty: Row = {"run": run, **lists, "sustained": {}, "kv_cache_gib": {}, "seconds": {}}
    if path is None or not path.exists():
        return empty
    found = json.loads(path.read_text())
    if not isinstance(found, dict) or "mixed" not in found:
        raise ValueError(f"{path} holds results of something else")
    for name in ("commit", "gpu", "vllm"):
        if found["run"].get(name) != run[name]:
            raise ValueError(f"{path} holds results of another {name}: {found['run'].get(name)}")
    return empty | found | {"run": run, "runs": [*found.get("runs", [found["run"]]), run]}


def _check_order(options: argparse.Namespace, results: Row) -> None:
    if options.rates and options.model not in results["sustained"] and options.sides[0] != STANDARD:
        raise ValueError("--rates are parts of what vLLM sustains: --sides must begin with vllm")


def _missing(options: argparse.Namespace, model: Model, side: str, results: Row) -> Cells:
    """Return what has not been measured of a server."""

    def has(table: str, **key: Any) -> bool:
        key |= {"model": model.name, "side": side}
        return any(key.items() <= row.items() for row in _scalars(results[table]))

    long = options.long
    streams = [it for it in options.streams if long and not has("mixed", streams=it, long=long)]
    return streams, [part for part in options.rates if not has("ordinary", part=part)]


def _scalars(rows: list[Row]) -> list[Row]:
    """Return what tells rows apart."""
    names = ("model", "side", "streams", "long", "part")
    return [{name: row[name] for name in names if name in row} for row in rows]


def _measure(
    options: argparse.Namespace,
    model: Model,
    side: str,
    cells: Cells,
    results: Row,
    work_dir: Path,
    budget: _Budget,
) -> Iterator[str]:
    """Start a server, and measure what is missing; yield what fails, and why.

    Raises:
        ServerError: if the server doesn't come up.
        _NoTimeError: if there is no time for all of it.

    """
    directory = work_dir / side
    directory.mkdir(parents=True, exist_ok=True)
    start = _start(options, model, side, directory, results["run"]["gpu"] != NO_GPU)
    start = replace(start, kv_cache_gib=results["kv_cache_gib"].get(model.name))
    if start.has_gpu:
        wait_until_free(memory_of_gpus)
    row = {"model": model.name, "side": side}
    log = _StepLog(directory / LOG_NAME)
    numbers, parts = cells
    with contextlib.ExitStack() as stack:
        with budget.part("start", then="mixed" if numbers else "ordinary"):
            server = stack.enter_context(serve(start, directory, budget.deadline))
        results["kv_cache_gib"][model.name] = server.kv_cache_gib
        bench = _Bench(server, options)
        for streams in numbers:
            try:
                with budget.part("mixed"):
                    found = bench.mixed(streams) | {"steps": log.take()}
            except (_FailedError, OSError) as error:
                # A timeout has no words of its own.
                yield f"{streams} streams: {f'{error}' or 'it takes too long'}"
                continue
            results["mixed"].append(row | {"streams": streams, "long": options.long} | found)
            show(results, options.json)
        for part in parts:
            try:
                if model.name not in results["sustained"]:
                    if side != STANDARD:
                        raise _FailedError("what vLLM sustains isn't known")
                    with budget.part("sustained", then="ordinary"):
                        results["sustained"][model.name] = bench.sustained_rate()
                with budget.part("ordinary"):
                    found = bench.ordinary(part, results["sustained"][model.name])
                    found |= {"steps": log.take()}
            except (_FailedError, OSError) as error:
                yield f"at {part:g} of the rate: {error}"
                continue
            results["ordinary"].append(row | {"part": part} | found)
            show(results, options.json)


def _options() -> argparse.Namespace:
    names: Any = lambda text: tuple(text.split(","))  # noqa: E731
    rates: Any = lambda text: tuple(float(part) for part in text.split(",") if part)  # noqa: E731
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="as of bench.serving.decode")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, too")
    parser.add_argument("--sides", type=names, default=SIDES, metavar="A,...")
    numbers: Any = lambda text: tuple(map(int, names(text)))  # noqa: E731
    parser.add_argument("--streams", type=numbers, default=(16,), metavar="N,...")
    parser.add_argument("--stream-tokens", type=int, default=3_000, metavar="N", help="at most")
    parser.add_argument(
        "--long", type=int, default=100_000, metavar="TOKENS", help="0: no long prompt"
    )
    parser.add_argument("--short-every", type=float, default=0.5, metavar="SECONDS")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--rates", type=rates, default=(), metavar="PART,...")
    parser.add_argument("--num-ordinary", type=int, default=NUM_ORDINARY, metavar="N")
    parser.add_argument(
        "--sustain", type=float, default=20.0, metavar="SECONDS", help="for what vLLM sustains"
    )
    parser.add_argument(
        "--minutes", type=float, default=1e6, metavar="M", help="begin nothing that ends later"
    )
    parser.add_argument("--serve-args", default="", metavar="ARGS", help="more for `vllm serve`")
    parser.add_argument("--work-dir", type=Path, metavar="DIR", help=WORK_DIR)
    options = parser.parse_args()
    for side in options.sides:
        if not SIDE.fullmatch(side):
            parser.error(
                f"--sides: {side} is none of vllm, vllm-TOKENS, vllm-interval-STEPS,"
                " vllm-interval-STEPS-TOKENS, sparksched, paced-MS-SHARE"
            )
    return options


def _start(
    options: argparse.Namespace, model: Model, side: str, directory: Path, has_gpu: bool
) -> Start:
    kind, interval, values = parts_of(side)
    arguments, environment = options.serve_args, {}
    if interval:
        arguments += f" --prefill-schedule-interval={interval}"
    if kind == STANDARD and values:
        arguments += f" --long-prefill-token-threshold={values[0]}"
    elif kind == PACING:
        log = directory / LOG_NAME
        log.unlink(missing_ok=True)
        environment = {
            "SPARKSCHED_MAX_STALL_MS": values[0],
            "SPARKSCHED_PREFILL_SHARE": values[1],
            "SPARKSCHED_PACING_LOG": str(log),
        }
    longest = max(options.long + LONG_OUTPUT_TOKENS, STREAM_PROMPT_TOKENS + options.stream_tokens)
    max_model_len = max(longest + ORDINARY_TOKENS[1], sum(ORDINARY_TOKENS))
    if model.has_dummy_weights and max_model_len > model.config["max_position_embeddings"]:
        # With random weights a position says as little as another.
        override = json.dumps({"max_position_embeddings": max_model_len})
        arguments += f" --hf-overrides={shlex.quote(override)}"
    return Start(
        model=model,
        scheduler=STOCK if kind == STANDARD else OURS,
        # vLLM's CPU platform schedules synchronously, whatever it is asked for.
        mode=ASYNC if has_gpu else SYNC,
        max_num_seqs=ROOM if options.rates else max(64, 2 * max(options.streams)),
        max_model_len=max_model_len,
        has_gpu=has_gpu,
        extra_arguments=" ".join([*map(shlex.quote, ON_GPU if has_gpu else ()), arguments]),
        extra_environment=environment,
    )


@dataclass
class _Group:
    """Requests of one kind on their way."""

    recorder: Recorder
    streams: list[CompletionStream]

    def logs(self) -> list[StreamLog]:
        return self.recorder.logs()

    def hang_up(self) -> None:
        for stream in self.streams:
            stream.hang_up()

    async def wait(self) -> None:
        await asyncio.gather(*(stream.done for stream in self.streams))


class _Bench:
    """What is done with one server."""

    def __init__(self, server: Server, options: argparse.Namespace) -> None:
        self._server = server
        self._options = options

    # ---- a long prompt beside streams ----

    def mixed(self, streams: int) -> Row:
        """Return the rounds, and how long the long prompt takes alone: the median."""
        for number in range(MOST_WARM_UPS):
            if not _has_stalled(self._round(streams, "warm-up", streams, number)):
                break
        numbers = range(self._options.rounds)
        # Prompts of their own for each number of streams: the prefix cache is on.
        rounds = [self._round(streams, "round", streams, number) for number in numbers]
        alone = [self._alone("alone", streams, number) for number in numbers]
        return {"alone_s": statistics.median(alone), "rounds": rounds}

    def _round(self, num_streams: int, *seed: Any) -> Row:
        return asyncio.run(self._mixed_round(num_streams, seed))

    def _alone(self, *seed: Any) -> float:
        return asyncio.run(self._long_alone(seed))

    async def _long_alone(self, seed: Sequence[Any]) -> float:
        (log,) = await self._all(self._workload(1, self._options.long, LONG_OUTPUT_TOKENS, *seed))
        return _first_token_s(log)

    async def _mixed_round(self, num_streams: int, seed: Sequence[Any]) -> Row:
        options = self._options
        workload = self._workload(
            num_streams, STREAM_PROMPT_TOKENS, options.stream_tokens, "streams", *seed
        )
        running = asyncio.Event()
        streams = await self._send(workload, lambda event: running.set())
        shorts: list[_Group] = []
        try:
            await asyncio.wait_for(running.wait(), LATEST_S)
            await asyncio.sleep(SETTLE_S)
            workload = self._workload(1, options.long, LONG_OUTPUT_TOKENS, "long", *seed)
            began = clock()
            long = await self._send(workload)
            ended = asyncio.ensure_future(long.wait())
            while not ended.done() and clock() - began < LATEST_S:
                await asyncio.wait([ended], timeout=options.short_every)
                if ended.done():
                    break
                workload = self._workload(
                    1, SHORT_PROMPT_TOKENS, SHORT_OUTPUT_TOKENS, "short", len(shorts), *seed
                )
                shorts.append(await self._send(workload))
            await asyncio.wait_for(ended, 1.0)
            waiting = [asyncio.ensure_future(it.wait()) for it in shorts]
            if waiting:
                await asyncio.wait(waiting, timeout=LINGER_S)
        finally:
            for group in (streams, *shorts):
                group.hang_up()
        (long_log,) = long.logs()
        if any(_has_ended(log, long_log, options.stream_tokens) for log in streams.logs()):
            raise _FailedError("streams ended before the long prompt was through: --stream-tokens")
        short_logs = [log for it in shorts for log in it.logs()]
        return _evaluate(streams.logs(), long_log, short_logs, options.long)

    # ---- an ordinary load ----

    def sustained_rate(self) -> float:
        """Return how many ordinary requests a second are served while enough are under way."""
        seconds = self._options.sustain
        # The first time is for kernels.
        _, rate = (asyncio.run(self._sustain(seconds, turn)) for turn in range(2))
        if not rate:
            raise _FailedError(f"nobody got a token in {seconds / 2:g} s: --sustain is too short")
        return rate

    async def _sustain(self, seconds: float, turn: int) -> float:
        """Return the requests' worth of output tokens a second, of the second half of this time."""
        prompt_tokens, output_tokens = ORDINARY_TOKENS
        start = clock()
        middle, end = start + seconds / 2, start + seconds
        logs: list[StreamLog] = []

        async def keep_one_under_way(number: int) -> None:
            # In step, all would be computed at once, and then all decode: a few waves, no rate.
            wanted = 1 + number * output_tokens // AT_ONCE
            for count in itertools.count():
                if clock() >= end:
                    return
                seed = ("sustained", turn, number, count)
                logs.extend(await self._all(self._workload(1, prompt_tokens, wanted, *seed)))
                wanted = output_tokens

        await asyncio.gather(*(keep_one_under_way(number) for number in range(AT_ONCE)))
        return tokens_between(logs, middle, end) / output_tokens / (end - middle)

    def ordinary(self, part: float, sustained: float) -> Row:
        """Return how requests fare that come at random, at a part of a rate a second."""
        rate, seed = part * sustained, ("ordinary", part)
        workload = self._workload(self._options.num_ordinary, *ORDINARY_TOKENS)
        for number in range(MOST_ORDINARY_WARM_UPS):
            warm_up = workload.seeded(*seed, "warm-up", number)
            if self._arrivals(warm_up, rate, number)["silence_ms"] <= STALL_MS:
                break
        rounds = [
            self._arrivals(workload.seeded(*seed, "round", turn), rate, -1 - turn)
            for turn in range(self._options.rounds)
        ]
        return {"rate": rate, "warm_ups": number + 1, "rounds": rounds}

    def _arrivals(self, workload: Workload, rate: float, turn: int) -> Row:
        before = self._server.num_preempted()
        logs = asyncio.run(self._poisson(workload, rate, turn))
        start = min(log.sent_at for log in logs)
        end = max(log.times[-1] for log in logs)
        gaps = [gap for log in logs for gap in _gaps_ms(log)]
        return {
            "requests_per_s": len(logs) / (end - start),
            "ttft_ms": summary([1e3 * _first_token_s(log) for log in logs]),
            "gap_ms": summary(gaps),
            "silence_ms": _silence_ms(logs),
            "preempted": self._server.preempted_since(before),
        }

    async def _poisson(self, workload: Workload, rate: float, turn: int) -> list[StreamLog]:
        chance = random.Random(f"{workload.num_requests}, {turn}")
        requests = workload.requests()
        recorder = Recorder(len(requests), lambda event: None)
        loop = asyncio.get_running_loop()
        at = loop.time()
        sent = []
        for number, request in enumerate(requests):
            at += chance.expovariate(rate)
            await asyncio.sleep(at - loop.time())
            content = encode(request, self._server.start.model.name)
            stream = CompletionStream(number, content, recorder, loop.create_future())
            await loop.create_connection(stream.itself, "127.0.0.1", self._server.port)
            stream.send()
            sent.append(stream.done)
        await asyncio.gather(*sent)
        return recorder.logs()

    # ---- requests ----

    def _workload(
        self, num_requests: int, prompt_tokens: int, output_tokens: int, *seed: Any
    ) -> Workload:
        workload = Workload(
            num_requests,
            self._server.start.model.vocab_size,
            (prompt_tokens, prompt_tokens),
            (output_tokens, output_tokens),
        )
        return workload.seeded(*seed)

    async def _send(
        self, workload: Workload, notify: Callable[[str], None] = lambda event: None
    ) -> _Group:
        requests = workload.requests()
        contents = [encode(request, self._server.start.model.name) for request in requests]
        loop = asyncio.get_running_loop()
        recorder = Recorder(len(requests), notify)
        streams = [
            CompletionStream(number, content, recorder, loop.create_future())
            for number, content in enumerate(contents)
        ]
        for stream in streams:
            await loop.create_connection(stream.itself, "127.0.0.1", self._server.port)
            stream.send()
        return _Group(recorder, streams)

    async def _all(self, workload: Workload) -> list[StreamLog]:
        group = await self._send(workload)
        await group.wait()
        return group.logs()


# ---- evaluation ----


def _first_token_s(log: StreamLog) -> float:
    return float(log.times[0]) - log.sent_at


def _gaps_ms(log: StreamLog, start: float = 0.0, end: float = float("inf")) -> list[float]:
    """Return the times between outputs that came between two moments."""
    times = [float(it) for it in log.times]
    pairs = itertools.pairwise(times)
    return [1e3 * (now - before) for before, now in pairs if start <= now <= end]


def _silence_ms(logs: list[StreamLog]) -> float:
    """Return the longest time in which nobody got anything though somebody waited."""
    waiting = sorted((log.sent_at, float(log.times[-1])) for log in logs)
    before, longest, first = waiting[0][0], 0.0, 0
    for now in sorted({float(at) for log in logs for at in log.times}):
        while waiting[first][1] < now:
            first += 1
        longest = max(longest, now - max(before, waiting[first][0]))
        before = now
    return 1e3 * longest


def _has_ended(stream: StreamLog, long: StreamLog, num_tokens: int) -> bool:
    """Whether a stream had all its tokens before the long prompt's first one."""
    return bool(stream.num_tokens.sum() >= num_tokens and stream.times[-1] < long.times[0])


def _evaluate(
    streams: list[StreamLog], long: StreamLog, shorts: list[StreamLog], long_tokens: int
) -> Row:
    start, end = long.sent_at, float(long.times[0])
    before = tokens_between(streams, start - BEFORE_S, start)
    num_tokens = tokens_between(streams, start, end)
    of_shorts = sum(SHORT_PROMPT_TOKENS + SHORT_OUTPUT_TOKENS for log in shorts if log.times.size)
    gaps = [gap for log in streams for gap in _gaps_ms(log, start, end)]
    return {
        "before_tokens_per_s": before / BEFORE_S / len(streams),
        "stream_tokens_per_s": num_tokens / (end - start) / len(streams),
        "gap_ms": summary(gaps),
        "short_ttft_ms": summary([1e3 * _first_token_s(log) for log in shorts if log.times.size]),
        "long_ttft_s": end - start,
        "tokens_per_s": (num_tokens + of_shorts + long_tokens) / (end - start),
    }


def _has_stalled(found: Row) -> bool:
    """Whether something has held a round up for longer than any step takes."""
    return bool(found["gap_ms"].get("max", 0.0) > STALL_MS)


class _StepLog:
    """What paced prefill has decided in each step; nothing from other servers."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def take(self) -> list[Row]:
        """Return what steps took since the last call, by why they were and by size.

        `as_vllm`: those that neither a threshold nor throttling limits.
        """
        kinds = defaultdict(list)
        for step in self._new_steps():
            kinds[step["mode"], step["budget"]].append(step)
        return [
            {
                "mode": mode,
                "budget": budget,
                "steps": len(steps),
                "as_vllm": sum(not (it["threshold"] or it["throttled"]) for it in steps),
                "prompt_tokens": statistics.median(it["prompt_tokens"] for it in steps),
                "ms": summary([it["ms"] for it in steps]),
                "predicted_ms": statistics.median(it["predicted_ms"] for it in steps),
            }
            for (mode, budget), steps in sorted(kinds.items())
        ]

    def _new_steps(self) -> Iterator[Row]:
        if not self._path.exists():
            return
        text = self._path.read_bytes()[self._position :]
        # The last line may be cut off.
        whole = text[: text.rfind(b"\n") + 1]
        self._position += len(whole)
        yield from map(json.loads, whole.splitlines())


if __name__ == "__main__":
    sys.exit(main())
