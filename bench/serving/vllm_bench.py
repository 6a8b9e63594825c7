"""What does `vllm bench` say? vLLM's own clients, on real servers with either scheduler.

Each server is started once, and measured with `vllm bench serve` in all cases before the next one
starts: vLLM's, then sparksched's. Prompts are random text, the same for both.

- `--cases`: tokens of a request. `1024/128` has 1,024 in and 128 out (`--dataset-name random`);
  `4096+256/128` has 4,096 that it shares with an eighth of the others, and 256 of its own
  (`prefix_repetition`). A case may have loads of its own: `8192/256:64:80%`.
- `--concurrency`: as fast as it goes, with so many at once (`--max-concurrency`).
- `--rates`: requests that come at random, as a Poisson process, at so many percent of the highest
  rate that vLLM's scheduler reached above, with the same front end, lengths and processors. The
  rate is kept in the file, so that sparksched is given the same one.
- CPU time is that of all threads of engine and API server from the first request to the last
  answer. `client` tells what the client's busiest thread took of a processor meanwhile, or would
  have taken: at 90 % the client is the limit. `--client rust` takes `vllm-rs bench serve`, which
  has more threads.
- Times between outputs are those that the client counts: an output has several tokens where its
  server was late with some (`tokens_per_output`).
- `--model NAME+embed` is asked for embeddings, of the inputs of each case.
- `--offline throughput,latency` runs these commands of `vllm bench`, without a server. Each starts
  an engine of its own.
- `--cores N` confines API server and engine, once they are warm, and the client to other
  processors, if there are any.

Before a server is measured it is warmed up with other prompts, until no kernel is compiled any
more; with a front end in Rust, where nobody tells, three times. A case in which something was
compiled all the same is measured again, once. A case in which a request fails has no figures.

Results are written to the file of `--json` after each case. A run with the same file goes on where
the last one was stopped, and tries again what had failed. `--minutes` stops a run before what would
take longer, as far as it is known from servers and cases before. sparksched's server is given the
cases that vLLM's has been measured in, and vLLM's ends with as much time left as that takes.
A command without a server is run with both schedulers, or with neither.

The cases of the report, with `--least 400 --waves 2 --seconds 12 --minutes 9 --json FILE`, or, on
an H200 with the small model, `--least 200`:

- loads: `--model Qwen3-0.6B --front-end rust --client rust
  --cases 1024/128:1:64:256:1024:50%:80%:95%,8192/256:64:80%,4096+256/128:256`;
  `--model Qwen2-1.5B,gpt-oss-120b --cases 1024/128:256:80%`
- few processors: `--model Qwen2-1.5B --cores all,4,2,1 --cases 1024/128:256`, and gpt-oss-20b
- embeddings: `--model Qwen3-0.6B+embed --cases 512/1:1:64:256:1024`
- without a server: `--model Qwen3-0.6B --no-serve --offline latency,throughput --cases 1024/128`
- another release of vLLM: the same in an environment that has it

    python -m bench.serving.vllm_bench --model gpt-oss-120b,Qwen2-1.5B,Qwen3-0.6B,Qwen3-0.6B+embed
        [--json FILE] [--cases 1024/128,8192/256,4096+256/128] [--concurrency 64,256,1024]
        [--rates 50,80,95] [--front-end python,rust] [--client python|rust] [--cores all,2]
        [--offline throughput,latency] [--no-serve] [--rounds N] [--waves N] [--least N]
        [--minutes M]
"""

import argparse
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

from bench.header import NO_GPU, describe_run
from bench.progress import Progress
from bench.report.pairs import VLLM_BENCH
from bench.report.tables import as_markdown
from bench.serving.benchmark import OutOfTimeError
from bench.serving.models import EMBED, ModelError
from bench.serving.options import WORK_DIR, names, numbers, refuse_unknown
from bench.serving.plan import ALL
from bench.serving.server import ASYNC, FRONT_ENDS, PYTHON, RUST, SIDES, SYNC
from bench.serving.store import Store, StoreError
from bench.serving.vllm_cases import OFFLINE, CaseError, Plan, Wanted
from bench.serving.vllm_client import ClientError, rust_program
from bench.serving.vllm_runs import VllmBench

GENERATING = ("1024/128", "8192/256", "4096+256/128")
EMBEDDING = ("512/1",)
"""Cases if none are named."""


def main() -> int:
    """Measure and write JSON; return the exit status: 3 if something is left for another run."""
    options = _options()
    signal.signal(signal.SIGTERM, _leave)
    run = describe_run()
    has_gpu = run["gpu"] != NO_GPU
    try:
        if options.client == RUST:
            rust_program()
        plans = {source: _plan(options, source, has_gpu) for source in options.model}
        store = Store(options.json, run | {"options": " ".join(sys.argv[1:])}, VLLM_BENCH)
    except (CaseError, ClientError, StoreError) as error:
        sys.exit(f"error: {error}")
    total = sum(
        len(list(plan.offline_cases())) + sum(len(list(plan.cases(it))) for it in plan.servers())
        for plan in plans.values()
    )
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(total))
        work_dir = options.work_dir
        if work_dir is None:
            work_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vllm-bench-")))
        bench = VllmBench(
            plans=plans,
            store=store,
            progress=progress,
            work_dir=work_dir.resolve(),
            has_gpu=has_gpu,
            deadline=time.monotonic() + 60 * options.minutes,
            rounds=options.rounds,
            waves=options.waves,
            least=options.least,
            seconds=options.seconds,
            serve_arguments=options.serve_args,
        )
        return _run(bench)


def _run(bench: VllmBench) -> int:
    status = 0
    try:
        bench.run()
    except ModelError as error:
        sys.exit(f"error: {error}")
    except OutOfTimeError as error:
        bench.progress.say(f"{error}: run it again to go on")
        status = 3
    except KeyboardInterrupt:
        bench.progress.say("interrupted: run it again to go on")
        status = 3
    print(as_markdown({"this run": bench.store.result}))
    has_failed = any("error" in cell for cell in bench.store.result["cells"])
    return status or int(has_failed)


def _leave(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    listed: dict[str, Any] = {"type": names, "metavar": "A,..."}
    parser.add_argument("--model", required=True, help="as of decode, and NAME+embed", **listed)
    parser.add_argument("--json", type=Path, metavar="FILE", help="results; to go on with, too")
    parser.add_argument("--cases", help="IN/OUT or SHARED+IN/OUT, then :N or :P%%", **listed)
    parser.add_argument(
        "--concurrency", type=numbers, default=(64, 256, 1024), metavar="N,...", help="at once"
    )
    parser.add_argument(
        "--rates", type=numbers, default=(), metavar="PERCENT,...", help="of what vLLM reaches"
    )
    parser.add_argument("--schedulers", default=SIDES, help=", ".join(SIDES), **listed)
    parser.add_argument("--front-end", default=(PYTHON,), help=", ".join(FRONT_ENDS), **listed)
    parser.add_argument("--client", default=PYTHON, choices=FRONT_ENDS)
    parser.add_argument("--cores", default=(ALL,), help="all, or how many processors", **listed)
    parser.add_argument("--offline", default=(), help=", ".join(OFFLINE), **listed)
    parser.add_argument("--no-serve", action="store_true", help="only what --offline names")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="of latency")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="of each case")
    parser.add_argument(
        "--waves", type=float, default=3.0, metavar="N", help="requests for each one at once"
    )
    parser.add_argument(
        "--least", type=int, default=200, metavar="N", help="requests of a case at least"
    )
    parser.add_argument(
        "--seconds", type=float, default=20.0, metavar="S", help="of requests at a rate"
    )
    parser.add_argument(
        "--minutes", type=float, default=1e6, metavar="M", help="begin nothing that ends later"
    )
    parser.add_argument("--serve-args", default="", metavar="ARGS", help="more for the engine")
    parser.add_argument("--work-dir", type=Path, metavar="DIR", help=WORK_DIR)
    options = parser.parse_args()
    refuse_unknown(parser, options, schedulers=SIDES, front_end=FRONT_ENDS, offline=OFFLINE)
    if any(it != ALL and not it.isdecimal() for it in options.cores):
        parser.error("--cores: all, or numbers")
    return options


def _plan(options: argparse.Namespace, source: str, has_gpu: bool) -> Plan:
    is_pooling = source.endswith(f"+{EMBED}")
    cases = options.cases or (EMBEDDING if is_pooling else GENERATING)
    # vLLM's CPU platform schedules synchronously, and so does vLLM by default where it embeds.
    return Plan(
        model=Path(source).name,
        mode=ASYNC if has_gpu and not is_pooling else SYNC,
        schedulers=options.schedulers,
        front_ends=() if options.no_serve else options.front_end,
        wanted=tuple(Wanted.named(it, options.concurrency, options.rates) for it in cases),
        cores=options.cores,
        offline=options.offline,
        batch=options.batch,
        client=options.client,
    )


if __name__ == "__main__":
    sys.exit(main())
