"""What does `vllm bench` say? vLLM's own clients, on real servers with either scheduler.

Each server is started once, and measured with `vllm bench serve` in all cases before the next one
starts: vLLM's, then sparksched's. Prompts are random text of a made-up tokenizer, the same for both.

- `--cases`: tokens of a request. `1024/128` has 1,024 in and 128 out (`--dataset-name random`);
  `4096+256/128` has 4,096 that it shares with an eighth of the others, and 256 of its own
  (`prefix_repetition`).
- `--concurrency`: as fast as it goes, with so many at once (`--max-concurrency`).
- `--rates`: requests that come at random, as a Poisson process, at so many percent of the highest
  rate that vLLM's scheduler reached above, with the same front end, lengths and processors. The
  rate is kept in the file, so that sparksched is given the same one.
- CPU time is that of all threads of engine and API server from the first request to the last
  answer. `client` tells what the client's busiest thread took meanwhile: at 90 % of a processor the
  client is the limit. `--client rust` takes `vllm-rs bench serve`, which has more threads.
- Times between outputs are those that the client counts: an output has several tokens where its
  server was late with some (`tokens_per_output`).
- `--model NAME+embed` is asked for embeddings, of the inputs of each case.
- `--offline throughput,latency` runs these commands of `vllm bench`, without a server. Each starts
  an engine of its own.
- `--cores N` confines API server and engine, once they are warm, and the client to other
  processors, if there are any.

Before a server is measured it is warmed up with other prompts, until no kernel is compiled any more;
with a front end in Rust, where nobody tells, three times. A case in which something was compiled all the
same is measured again, once.

Results are written to the file of `--json` after each case. A run with the same file goes on where
the last one was stopped, and tries again what had failed. `--minutes` stops a run before what would
take longer, as far as it is known from servers and cases before.

    python -m bench.serving.vllm_bench --model gpt-oss-120b,Qwen2-1.5B,Qwen3-0.6B,Qwen3-0.6B+embed
        [--json FILE] [--cases 1024/128,8192/256,4096+256/128] [--concurrency 64,256,1024]
        [--rates 50,80,95] [--front-end python,rust] [--client python|rust] [--cores all,2]
        [--offline throughput,latency] [--no-serve] [--rounds N] [--waves N] [--minutes M]
"""

import argparse
import signal
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from bench.header import NO_GPU, describe_run
from bench.progress import Progress
from bench.report.pairs import VLLM_BENCH
from bench.report.tables import as_markdown
from bench.serving import vllm_client, vllm_offline
from bench.serving.benchmark import (
    CONTEXT_TOKENS,
    START_RESERVE,
    OutOfTimeError,
    TooFewCoresError,
    divide_cores,
)
from bench.serving.gpus import memory_of_gpus, wait_until_free
from bench.serving.measure import has_compiled, warm_up
from bench.serving.models import EMBED, Model, ModelError, prepare
from bench.serving.plan import ALL, ServerKey
from bench.serving.remote import RemoteError
from bench.serving.server import (
    ASYNC,
    FRONT_ENDS,
    PYTHON,
    SIDES,
    STOCK,
    SYNC,
    Server,
    ServerError,
    Start,
    serve,
)
from bench.serving.store import Store, StoreError
from bench.serving.vllm_cases import (
    NO_FRONT_END,
    NUM_PREFIXES,
    OFFLINE,
    SERVE,
    CaseError,
    CaseKey,
    Lengths,
    Plan,
    num_prompts,
)
from bench.serving.vllm_client import ClientError, Order

Row = dict[str, Any]

GENERATING = ("1024/128", "8192/256", "4096+256/128")
EMBEDDING = ("512/1",)
"""Cases if none are named."""
WARM_UP_TOKENS = 16
MOST_WARM_UP_TOKENS = 1 << 17
"""Of all prompts of a warm-up together."""
FAILURES = (ClientError, ServerError, RemoteError, TooFewCoresError)
MAX_REASON = 2000
"""Characters that are kept of a failure."""


def main() -> int:
    """Measure and write JSON; return the exit status: 3 if something is left for another run."""
    options = _options()
    signal.signal(signal.SIGTERM, _leave)
    run = describe_run()
    has_gpu = run["gpu"] != NO_GPU
    try:
        plans = {source: _plan(options, source, has_gpu) for source in options.model}
        store = Store(options.json, run | {"options": " ".join(sys.argv[1:])}, VLLM_BENCH)
    except (CaseError, StoreError) as error:
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
            seconds=options.seconds,
            serve_arguments=options.serve_args,
        )
        return _run(bench)


def _run(bench: "VllmBench") -> int:
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
    names: Any = lambda text: tuple(part for part in text.split(",") if part)  # noqa: E731
    numbers: Any = lambda text: tuple(map(int, names(text)))  # noqa: E731
    listed: dict[str, Any] = {"type": names, "metavar": "A,..."}
    parser.add_argument("--model", required=True, help="as of decode, and NAME+embed", **listed)
    parser.add_argument("--json", type=Path, metavar="FILE", help="results; to go on with, too")
    parser.add_argument("--cases", help="tokens: IN/OUT or SHARED+IN/OUT", **listed)
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
        "--seconds", type=float, default=20.0, metavar="S", help="of requests at a rate"
    )
    parser.add_argument(
        "--minutes", type=float, default=1e6, metavar="M", help="begin nothing that ends later"
    )
    parser.add_argument("--serve-args", default="", metavar="ARGS", help="more for the engine")
    parser.add_argument("--work-dir", type=Path, metavar="DIR", help="for logs")
    options = parser.parse_args()
    for name, allowed in (
        ("schedulers", SIDES),
        ("front_end", FRONT_ENDS),
        ("offline", OFFLINE),
    ):
        if unknown := set(getattr(options, name)) - set(allowed):
            option = f"--{name.replace('_', '-')}"
            parser.error(f"{option}: {', '.join(unknown)} is none of {', '.join(allowed)}")
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
        lengths=tuple(map(Lengths.named, cases)),
        concurrencies=options.concurrency,
        rates=options.rates,
        cores=options.cores,
        offline=options.offline,
        batch=options.batch,
        client=options.client,
    )


@dataclass
class VllmBench:
    """A run: what is asked for, where it goes, and when it has to end."""

    plans: dict[str, Plan]
    """By what the model was called."""
    store: Store
    progress: Progress
    work_dir: Path
    has_gpu: bool
    deadline: float
    """By `time.monotonic()`."""
    rounds: int = 1
    waves: float = 3.0
    seconds: float = 20.0
    """For how long requests come, where they come at a rate."""
    serve_arguments: str = ""

    def run(self) -> None:
        """Measure all that is not there yet.

        Raises:
            OutOfTimeError: if there is no time left.

        """
        for source, plan in self.plans.items():
            model = prepare(source, self.work_dir)
            for key in plan.servers():
                cases = [it for it in plan.cases(key) if not self.store.has_cell(it)]
                self.progress.skip(len(list(plan.cases(key))) - len(cases))
                if cases:
                    first_s = self.store.known_s(cases[0])
                    self._check_time(START_RESERVE * self.store.known_start_s() + first_s)
                    self._measure_server(plan, key, model, cases)
            for case in plan.offline_cases():
                if self.store.has_cell(case):
                    self.progress.skip(1)
                else:
                    self._measure_offline(plan, case, model)

    def _check_time(self, needed_s: float) -> None:
        if time.monotonic() + needed_s > self.deadline:
            raise OutOfTimeError("what is left of --minutes is too short for what comes next")

    def _start(self, plan: Plan, key: ServerKey, model: Model) -> Start:
        return Start(
            model=model,
            scheduler=key.scheduler,
            mode=key.mode,
            max_num_seqs=plan.max_num_seqs,
            max_model_len=max(CONTEXT_TOKENS, *(it.max_context for it in plan.lengths)),
            has_gpu=self.has_gpu,
            front_end=PYTHON if key.front_end == NO_FRONT_END else key.front_end,
            extra_arguments=self.serve_arguments,
        )

    def _wait_for_gpu(self) -> None:
        if self.has_gpu and not wait_until_free(memory_of_gpus):
            self.progress.say("the GPU's memory is in use; vLLM will say whether enough is left")

    # ---- servers ----

    def _measure_server(
        self, plan: Plan, key: ServerKey, model: Model, cases: list[CaseKey]
    ) -> None:
        start = self._start(plan, key, model)
        self._wait_for_gpu()
        self.progress.say(f"starting vllm serve: {start.label}")
        try:
            with serve(start, self.work_dir, self.deadline) as server:
                about = {"start_s": server.start_s, "max_model_len": start.max_model_len}
                self.store.put("servers", key, about)
                self._warm_up(plan, server, cases)
                for cores in dict.fromkeys(case.cores for case in cases):
                    chosen = [case for case in cases if case.cores == cores]
                    self._measure_confined(server, cores, chosen)
        except (ServerError, RemoteError) as error:
            self.progress.say(f"failed: {_reason(error)}")
            for case in cases:
                if not self.store.has_cell(case):
                    self.store.put_failure(case, {}, _reason(error))

    def _warm_up(self, plan: Plan, server: Server, cases: list[CaseKey]) -> None:
        """Have kernels compiled: of batches of all sizes, and of the cases' prompts."""
        most = max((*plan.concurrencies, NUM_PREFIXES))
        short = Lengths(WARM_UP_TOKENS, WARM_UP_TOKENS)
        cases_lengths = [Lengths.named(it) for it in dict.fromkeys(it.lengths for it in cases)]
        for lengths in (short, *cases_lengths):
            shortened = replace(lengths, output_tokens=min(lengths.output_tokens, WARM_UP_TOKENS))
            fitting = MOST_WARM_UP_TOKENS // (lengths.prefix_tokens + lengths.input_tokens)
            most_at_once = min(most, max(fitting, NUM_PREFIXES))
            case = replace(
                cases[0], lengths=shortened.name, concurrency=most_at_once, rate_percent=None
            )
            send = partial(self._send, server, case, None, num_prompts(case, 1.0), None, "warm-up")
            try:
                warm_up(server, send)
            except ClientError as error:
                self.progress.say(f"the warm-up has failed: {_reason(error)}")

    def _measure_confined(self, server: Server, cores: str, cases: list[CaseKey]) -> None:
        try:
            ours, others = divide_cores(cores)
        except TooFewCoresError as error:
            for case in cases:
                self.store.put_failure(case, {}, _reason(error))
            return
        if ours is not None:
            server.confine(ours)
        for case in cases:
            self._check_time(self.store.known_s(case))
            self.progress.begin(case.label)
            begun = time.monotonic()
            try:
                rate = self._rate(case)
                rounds = [
                    self._measure_round(server, case, rate, others, number)
                    for number in range(self.rounds)
                ]
            except ClientError as error:
                self.store.put_failure(case, {}, _reason(error))
                self.progress.say(f"failed: {_reason(error)}")
                if not server.is_healthy():
                    log = server.launched.log_path
                    raise ServerError(f"{error}; the server is gone: {log}") from None
                continue
            found = {"request_rate": rate, "seconds": time.monotonic() - begun, "cpus": ours}
            self.store.put_cell(case, found | {"rounds": rounds})

    def _rate(self, case: CaseKey) -> float | None:
        """Return the requests a second of a case; None: as fast as it goes."""
        if case.rate_percent is None:
            return None
        highest = reached(self.store.result["cells"], case)
        if highest is None:
            raise ClientError(
                "the rate that vLLM's scheduler reaches isn't known: measure it first, with "
                "--schedulers stock and --concurrency"
            )
        return highest * case.rate_percent / 100

    def _measure_round(
        self,
        server: Server,
        case: CaseKey,
        rate: float | None,
        cores: set[int] | None,
        number: int,
    ) -> Row:
        if rate is None:
            count = num_prompts(case, self.waves)
        else:
            count = num_prompts(case, rate * self.seconds)
        has_compiled(server)
        found = self._send(server, case, rate, count, cores, number)
        if has_compiled(server):
            found = self._send(server, case, rate, count, cores, number, "again")
            found["has_compiled"] = has_compiled(server)
        return found

    def _send(
        self,
        server: Server,
        case: CaseKey,
        rate: float | None,
        count: int,
        cores: set[int] | None,
        *seed: Any,
    ) -> Row:
        order = Order(
            base_url=server.launched.base_url,
            model=server.start.model,
            lengths=Lengths.named(case.lengths),
            num_prompts=count,
            seed=case.seed(*seed),
            concurrency=case.concurrency,
            rate=rate,
        )
        folder = server.launched.log_path.parent
        return vllm_client.run(order, case.client, server.processes(), folder, cores)

    # ---- engines without a server ----

    def _measure_offline(self, plan: Plan, case: CaseKey, model: Model) -> None:
        self._check_time(self.store.known_s(case))
        self.progress.begin(case.label)
        self._wait_for_gpu()
        begun = time.monotonic()
        folder = self.work_dir / f"{model.name}-{case.server.scheduler}-{case.command}"
        start = self._start(plan, case.server, model)
        prompts = round(self.waves * plan.max_num_seqs)
        try:
            found = vllm_offline.run(case, start, prompts, folder, self.deadline)
        except ClientError as error:
            self.store.put_failure(case, {}, _reason(error))
            self.progress.say(f"failed: {_reason(error)}")
        else:
            seconds = time.monotonic() - begun
            self.store.put_cell(case, {"seconds": seconds, "rounds": [found]})


def reached(cells: list[Row], case: CaseKey) -> float | None:
    """Return the highest rate of requests of vLLM's scheduler, of lengths, front end and processors
    as in a case, by any number at once; None if it wasn't measured."""
    same = ("model", "mode", "front_end", "command", "lengths", "cores", "client")
    wanted = {name: case.as_row()[name] for name in same} | {"scheduler": STOCK}
    rates = [
        statistics.median(it["requests_per_s"] for it in cell["rounds"])
        for cell in cells
        if all(cell.get(name) == value for name, value in wanted.items())
        and cell.get("rate_percent") is None
        and cell.get("rounds")
    ]
    return max(rates, default=None)


def _reason(error: Exception) -> str:
    return f"{error}"[-MAX_REASON:]


if __name__ == "__main__":
    sys.exit(main())
