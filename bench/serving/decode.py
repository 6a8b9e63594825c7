"""What does serving cost? A real `vllm serve`, with vLLM's scheduler and with ours, under load.

For each model, mode and scheduler a server is started, and measured with all numbers of streams
before it is stopped. Two drivers: `http`, which streams completions from processes of its own, and
`asyncllm`, which consumes `AsyncLLM.generate()` in the API server's own process: token ids in and
out, no HTTP and no text. Each round sends its requests all at once. Rounds differ in their prompts,
which are the same for both schedulers.

- Prompts have 128 tokens. Rates and times between outputs are those of the time in which all
  streams decode; an output has several tokens where its reader was late.
- For how long the engine waits is noted in a round of its own (`bench.serving.engine_probe`).
- `--cores N` confines API server and engine, once they are up, and the load to other processors, if
  there are any.
- `--layout` spreads a model over several GPUs: `tp2` by tensor, `pp2` by pipeline, `dp2` by data
  parallelism, also combined, as `tp2dp2`. With several engines vLLM starts as many API servers;
  CPU times are those of all of them. A round begins once vLLM's balancer knows that the engines are
  idle. With pipeline stages requests decode in turns, in batches for a whole round. They are split
  alike with both schedulers: all are scheduled from the same step on, and steps have at most 2,048
  tokens.
- Engines on several GPUs spin while they wait for workers and for each other: their CPU time is
  there with and without.
- `--front-end python,rust` starts vLLM's API servers in Python and in Rust, each with both
  schedulers. `vllm-rs` is found by vLLM or named by VLLM_RUST_FRONTEND_PATH. It is driven over HTTP
  alone, and no probe looks into it or its engine: there are rates, times and CPU time.
- `--model NAME+ngram` speculates with n-grams, `NAME+eagle3` with a head of random weights. vLLM
  schedules n-grams synchronously: `--mode sync`.
- `--in-turn` has both schedulers' servers side by side, with half of the GPU's memory each, for
  small models. A round of one follows a round of the other, so that what changes with time changes
  both.
- `--compare-streams`, before anything else: whether both schedulers bring the same tokens over
  HTTP, sampled with a seed of each request's. Each server does it twice, to show what differs by
  itself.

Results are written to the file of `--json` after each cell. A run with the same file goes on where
the last one was stopped, and tries again what had failed. `--minutes` stops a run before what would
take longer, as far as it is known from servers and cells before.

    python -m bench.serving.decode
        --model tiny|gpt-oss-20b|gpt-oss-120b|Qwen2-1.5B|Qwen3-Next-quarter|DIRECTORY [--json FILE]
        [--concurrency N,...] [--schedulers stock,sparksched] [--mode async,sync] [--cores all,2]
        [--driver asyncllm,http] [--compare-streams] [--quick] [--layout 1,tp2,pp2,dp2]
        [--front-end python,rust] [--in-turn]
"""

import argparse
import itertools
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from bench.header import NO_GPU, describe_run
from bench.progress import Progress
from bench.report.tables import as_markdown
from bench.serving.benchmark import Benchmark, OutOfTimeError, Subject
from bench.serving.drivers import ASYNCLLM, DRIVERS, HTTP
from bench.serving.layouts import Layout, LayoutError
from bench.serving.measure import EFFORT, QUICK_EFFORT, Effort
from bench.serving.models import NAMES, ModelError
from bench.serving.options import WORK_DIR, names, numbers, refuse_unknown
from bench.serving.plan import ALL, Plan
from bench.serving.server import ASYNC, FRONT_ENDS, MODES, PYTHON, SIDES, SYNC
from bench.serving.store import Store, StoreError


def main() -> int:
    """Measure and write JSON; return the exit status: 3 if something is left for another run."""
    options = _options()
    signal.signal(signal.SIGTERM, _leave)
    run = describe_run()
    gpu = None if run["gpu"] == NO_GPU else str(run["gpu"])
    subjects = _subjects(options)
    plan = _plan(options, tuple(subjects), gpu)
    try:
        store = Store(options.json, run | {"options": " ".join(sys.argv[1:])})
    except StoreError as error:
        sys.exit(f"error: {error}")
    num_cells = sum(len(list(plan.cells(key))) for key in plan.servers())
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(num_cells))
        work_dir = options.work_dir
        if work_dir is None:
            work_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="decode-")))
        benchmark = Benchmark(
            plan=plan,
            subjects=subjects,
            effort=_effort(options),
            store=store,
            progress=progress,
            work_dir=work_dir.resolve(),
            gpu=gpu,
            serve_arguments=options.serve_args,
            deadline=time.monotonic() + 60 * options.minutes,
        )
        return _run(benchmark, options.json)


def _run(benchmark: Benchmark, path: Path | None) -> int:
    status = 0
    try:
        benchmark.run()
    except ModelError as error:
        sys.exit(f"error: {error}")
    except OutOfTimeError as error:
        benchmark.progress.say(f"{error}: run it again to go on")
        status = 3
    except KeyboardInterrupt:
        benchmark.progress.say("interrupted: run it again to go on")
        status = 3
    print(as_markdown({"this run": benchmark.store.result}))
    failed = [cell for cell in benchmark.store.result["cells"] if "error" in cell]
    if failed:
        print(f"{len(failed)} cells have failed; the first: {failed[0]['error']}", file=sys.stderr)
    return status or (1 if failed else 0)


def _leave(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    listed: dict[str, Any] = {"type": names, "metavar": "A,..."}
    parser.add_argument(
        "--model", required=True, help=f"{', '.join(NAMES)}, or a model's directory", **listed
    )
    parser.add_argument(
        "--concurrency", type=numbers, default=(1, 64, 256, 1024), metavar="N,...", help="streams"
    )
    parser.add_argument("--schedulers", default=SIDES, help=", ".join(SIDES), **listed)
    parser.add_argument("--mode", help="async, sync; default: what the machine can do", **listed)
    parser.add_argument("--cores", default=(ALL,), help="all, or how many processors", **listed)
    parser.add_argument(
        "--layout",
        type=_layouts,
        default=(Layout(),),
        metavar="A,...",
        help="1, tp2, pp2, dp2, ...",
    )
    parser.add_argument("--driver", default=(ASYNCLLM, HTTP), help=", ".join(DRIVERS), **listed)
    shown = ", ".join(FRONT_ENDS)
    parser.add_argument("--front-end", default=(PYTHON,), help=shown, **listed)
    parser.add_argument("--json", type=Path, metavar="FILE", help="results; to go on with, too")
    parser.add_argument("--quick", action="store_true", help="one short round, for a first look")
    parser.add_argument("--compare-streams", action="store_true", help="compare tokens")
    parser.add_argument("--in-turn", action="store_true", help="both servers at the same time")
    parser.add_argument("--rounds", type=int, metavar="N", help="of each cell")
    parser.add_argument("--tokens", type=int, metavar="N", help="of each stream")
    parser.add_argument(
        "--minutes", type=float, default=1e6, metavar="M", help="begin nothing that ends later"
    )
    parser.add_argument("--serve-args", default="", metavar="ARGS", help="more for `vllm serve`")
    parser.add_argument("--work-dir", type=Path, metavar="DIR", help=WORK_DIR)
    options = parser.parse_args()
    refuse_unknown(
        parser, options, schedulers=SIDES, mode=MODES, driver=DRIVERS, front_end=FRONT_ENDS
    )
    if any(it != ALL and not it.isdecimal() for it in options.cores):
        parser.error("--cores: all, or numbers")
    if options.in_turn and options.compare_streams:
        parser.error("--in-turn compares no streams")
    return options


def _layouts(text: str) -> tuple[Layout, ...]:
    try:
        return tuple(Layout.named(name) for name in names(text))
    except LayoutError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _subjects(options: argparse.Namespace) -> dict[str, Subject]:
    """Return the models in each layout, by what the result calls them."""
    return {
        layout.label(Path(source).name): Subject(source, layout)
        for source, layout in itertools.product(options.model, options.layout)
    }


def _plan(options: argparse.Namespace, models: tuple[str, ...], gpu: str | None) -> Plan:
    # vLLM's CPU platform schedules synchronously, whatever it is asked for.
    modes = options.mode or ((ASYNC,) if gpu else (SYNC,))
    return Plan(
        models=models,
        schedulers=options.schedulers,
        modes=modes,
        cores=options.cores,
        concurrencies=options.concurrency,
        drivers=options.driver,
        front_ends=options.front_end,
        output_tokens=options.tokens,
        is_quick=options.quick,
        compares_streams=options.compare_streams,
        takes_turns=options.in_turn,
    )


def _effort(options: argparse.Namespace) -> Effort:
    effort = QUICK_EFFORT if options.quick else EFFORT
    if options.rounds is None:
        return effort
    return replace(effort, rounds=options.rounds)


if __name__ == "__main__":
    sys.exit(main())
