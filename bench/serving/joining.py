"""When do requests get their first token that join others? A real server, over HTTP.

Streams decode side by side, as many as `--concurrency` says. Beside them single requests come at
random, as a Poisson process. Each server is measured with all numbers of streams and all lengths of
joining prompts before the next one starts: vLLM, then sparksched. Rounds without joining requests
come first: they tell how long a round takes. Then come rounds of warm-up, with joining requests,
until nothing compiles any more; over the Rust front end, where nobody tells, until no stream has
stood still for half a second.

- `ttft_ms`: from sending a joining request to its first token.
- `output_gap_ms`, `tokens_per_s`: of the streams, while all of them decode.
- `preempted`: requests of a round that had to give back their part of the KV cache, the most.
- `gpu`: for what share of the time the GPU was idle, by a trace of a round of its own.

A step with a prompt in it takes longer: `--rate` times its time should be well below 1. Where the
KV cache is full, requests wait for room: give it enough with `--serve-args`. All servers get as
much memory for it as the first one found.

Each case of each server is shown, and goes into the file of `--json`, as soon as it is measured. A
run with the same file goes on where the last one was stopped.

    python -m bench.serving.joining --model gpt-oss-120b [--json FILE] [--concurrency 64,256]
        [--prompts 128,2048] [--front-end python,rust] [--rate 5] [--rounds N] [--tokens N]
        [--minutes M]
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.header import NO_GPU, describe_run
from bench.progress import Progress
from bench.report.show import show
from bench.report.tables import JOINING_SIDES
from bench.serving import gpu_trace
from bench.serving.drivers import ROUND_S, HttpDriver, running_loaders
from bench.serving.evaluate import evaluate, summary
from bench.serving.gpu_trace import GpuTrace
from bench.serving.gpus import memory_of_gpus, wait_until_free
from bench.serving.measure import warm_up
from bench.serving.models import Model, prepare
from bench.serving.options import WORK_DIR, names, numbers
from bench.serving.plan import OUTPUT_TOKENS, PROMPT_TOKENS
from bench.serving.remote import Remote, gather
from bench.serving.server import ASYNC, FRONT_ENDS, OURS, STOCK, SYNC, Server, Start, serve
from bench.serving.streams import RUNNING
from bench.serving.workload import Workload

Row = dict[str, Any]

ROOM_TO_JOIN = 64
"""How many more requests than streams a server takes at once."""
JOINING_TOKENS = 4
CASE = ("streams", "prompt_tokens")
"""What the numbers of a case are."""
STALL_MS = 500.0
SHARE_OF_ROUND = 0.85
"""For how much of the time in which the streams decode requests join: it varies."""


def main() -> int:
    """Measure, print a table and write JSON; return 3 if something is left for another run."""
    options = _options()
    deadline = time.monotonic() + 60 * options.minutes
    run = describe_run() | {"options": " ".join(sys.argv[1:])}
    cells = _measured_before(options.json)
    longest_s = 0.0
    with tempfile.TemporaryDirectory(prefix="joining-") as temporary:
        work_dir = (options.work_dir or Path(temporary)).resolve()
        model = prepare(options.model, work_dir)
        cases = list(itertools.product(options.concurrency, options.prompts))
        servers = list(itertools.product(options.front_end, JOINING_SIDES))
        with Progress(len(servers)) as progress:
            for front_end, side in servers:
                left = [case for case in cases if side not in cells.get((front_end, *case), ())]
                if not left:
                    progress.skip(1)
                    continue
                begun = time.monotonic()
                if begun + longest_s > deadline:
                    progress.say("what is left of --minutes is too short: run it again to go on")
                    return 3
                progress.begin(f"{front_end} front end: {side}")
                traces = work_dir / "traces" / f"{front_end} {side}"
                start = _start(options, model, side, front_end, run["gpu"] != NO_GPU, traces)
                start = replace(start, kv_cache_gib=_kv_cache_gib(cells.values()))
                with _started(start, side, work_dir) as server:
                    about = {"model": model.name, "kv_cache_gib": server.kv_cache_gib}
                    for case, found in _measure(server, options, left, traces):
                        cell = cells.setdefault((front_end, *case), {})
                        cell |= dict(zip(CASE, case, strict=True))
                        cell |= about | {"front_end": front_end, side: found}
                        show({"run": run, "joining": list(cells.values())}, options.json)
                longest_s = max(longest_s, time.monotonic() - begun)
    return 0


def _measured_before(path: Path | None) -> dict[tuple[Any, ...], Row]:
    """Return what an earlier run with the same file has measured, by front end and case."""
    if path is None or not path.exists():
        return {}
    rows: list[Row] = json.loads(path.read_text())["joining"]
    return {tuple(row[name] for name in ("front_end", *CASE)): row for row in rows}


def _kv_cache_gib(cells: Iterable[Row]) -> float | None:
    """Return the memory for the KV cache that the first server had; None: not known."""
    return next((it["kv_cache_gib"] for it in cells if it.get("kv_cache_gib")), None)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="as of bench.serving.decode")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, too")
    parser.add_argument("--concurrency", type=numbers, default=(64, 256), metavar="N,...")
    parser.add_argument("--prompts", type=numbers, default=(128, 2048), metavar="TOKENS,...")
    parser.add_argument("--front-end", type=names, default=FRONT_ENDS, metavar="A,...")
    parser.add_argument("--rate", type=float, default=5.0, help="joining requests a second")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--tokens", type=int, metavar="N", help="of each stream")
    parser.add_argument(
        "--minutes", type=float, default=1e6, metavar="M", help="begin no server that ends later"
    )
    parser.add_argument("--serve-args", default="", metavar="ARGS", help="more for `vllm serve`")
    parser.add_argument("--work-dir", type=Path, metavar="DIR", help=WORK_DIR)
    return parser.parse_args()


def _start(
    options: argparse.Namespace,
    model: Model,
    side: str,
    front_end: str,
    has_gpu: bool,
    traces: Path,
) -> Start:
    profiler = gpu_trace.arguments_of(traces) if has_gpu else ""
    return Start(
        model=model,
        scheduler=STOCK if side == JOINING_SIDES[0] else OURS,
        # vLLM's CPU platform schedules synchronously, whatever it is asked for.
        mode=ASYNC if has_gpu else SYNC,
        max_num_seqs=max(options.concurrency) + ROOM_TO_JOIN,
        max_model_len=max(options.prompts) + max(_num_tokens(options, 1), 2 * PROMPT_TOKENS),
        has_gpu=has_gpu,
        front_end=front_end,
        extra_arguments=f"{options.serve_args} {profiler}",
    )


@contextmanager
def _started(start: Start, side: str, work_dir: Path) -> Iterator[Server]:
    if start.has_gpu:
        wait_until_free(memory_of_gpus)
    with serve(start, work_dir / side) as server:
        yield server


def _num_tokens(options: argparse.Namespace, concurrency: int) -> int:
    tokens: int | None = options.tokens
    return tokens or next(tokens for most, tokens in OUTPUT_TOKENS if concurrency <= most)


def _measure(
    server: Server, options: argparse.Namespace, cases: list[tuple[int, int]], traces: Path
) -> Iterator[tuple[tuple[int, int], Row]]:
    """Yield each case, and what was measured."""
    with (
        running_loaders(max(options.concurrency), None) as loaders,
        running_loaders(1, None) as (joiner,),
    ):
        driver = HttpDriver(server, loaders)
        for streams, prompt_tokens in cases:
            tokens = _num_tokens(options, streams)
            vocab_size = server.start.model.vocab_size
            prompts = (PROMPT_TOKENS, PROMPT_TOKENS)
            alone = Workload(streams, vocab_size, prompts, (tokens, tokens))
            seconds = _seconds_of(driver, alone)
            joining = Workload(
                max(1, round(options.rate * seconds)),
                vocab_size,
                (prompt_tokens, prompt_tokens),
                (JOINING_TOKENS, JOINING_TOKENS),
            )
            send = partial(_round, driver, joiner, alone, joining, seconds)
            warm_up(server, partial(send, "warm-up"), has_stalled)
            rounds = [send(number) for number in range(options.rounds)]
            found = _summary(rounds)
            if server.start.has_gpu:
                trace = GpuTrace(server.port, traces)
                send("trace", on_running=trace.start)
                found["gpu"] = trace.evaluate()
            yield (streams, prompt_tokens), found


def _seconds_of(driver: HttpDriver, workload: Workload) -> float:
    """Return for how long requests may join a round; the first of two compiles."""
    for number in range(2):
        logs = driver.run(workload.seeded("alone", number), lambda event: None)
        found = evaluate(logs)
    return SHARE_OF_ROUND * float(found["end_s"] - found["start_s"])


def _round(
    driver: HttpDriver,
    joiner: Remote,
    alone: Workload,
    joining: Workload,
    seconds: float,
    *seed: Any,
    on_running: Callable[[], None] = lambda: None,
) -> Row:
    """Measure one round, in which requests join for so many seconds; its prompts are its own."""
    workload, joining = (it.seeded(alone.num_requests, *seed) for it in (alone, joining))
    server = driver.server

    def begin_to_join(event: str) -> None:
        if event == RUNNING:
            joiner.send(
                "join",
                port=server.port,
                model=server.start.model.name,
                workload=joining,
                seconds=seconds,
            )
            on_running()

    before = server.num_preempted()
    found = evaluate(driver.run(workload, begin_to_join))
    joined = gather([joiner], ROUND_S, lambda event: None)[0]
    return found | {
        "ttft_ms": [1e3 * (log.times[0] - log.sent_at) for log in joined],
        "preempted": server.preempted_since(before),
    }


def has_stalled(found: Row) -> bool:
    """Whether something has held a round up for long: a kernel that was compiled, most likely."""
    gaps: Row = found["output_gap_ms"]
    return bool(gaps["max"] > STALL_MS)


def _summary(rounds: list[Row]) -> Row:
    """Return the medians of rounds, and the percentiles of all that has joined."""
    gaps = {
        at: statistics.median(it["output_gap_ms"][at] for it in rounds) for at in ("p50", "p99")
    }
    return {
        "ttft_ms": summary([time_ms for it in rounds for time_ms in it["ttft_ms"]]),
        "output_gap_ms": gaps,
        "tokens_per_s": statistics.median(it["tokens_per_s"] for it in rounds),
        "preempted": max((it["preempted"] for it in rounds), key=lambda it: it or 0),
    }


if __name__ == "__main__":
    sys.exit(main())
