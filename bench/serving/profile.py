"""Where does the engine's loop spend its time? By py-spy, while all streams of a server decode.

For each front end and number of streams, servers with either scheduler are looked at 500 times a
second for some seconds, while all streams run. A sample of the loop's thread belongs
to the innermost of its functions that is known: one of vLLM's model runner or executor, of a
scheduler, or of what receives and sends messages. All else is the loop itself. Samples in which it
sleeps, because there is no request, don't count.

py-spy is no requirement of this project: `pip install py-spy`, or `--py-spy` names it. It needs the
right to look into other processes of the user (`ptrace_scope`, or root).

    python -m bench.serving.profile --model Qwen2-1.5B [--json FILE] [--front-end rust,python]
        [--concurrency 256,1] [--tokens N] [--seconds S] [--py-spy PATH]

Results are written after each case; a run with the same file goes on with it.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from bench.header import NO_GPU, describe_run
from bench.report.pairs import PROFILE, PROFILES
from bench.report.tables import as_markdown
from bench.serving.drivers import HttpDriver, running_loaders
from bench.serving.gpus import memory_of_gpus, wait_until_free
from bench.serving.measure import warm_up_with
from bench.serving.models import Model, prepare
from bench.serving.options import names, numbers, refuse_unknown
from bench.serving.plan import PROMPT_TOKENS, ServerKey
from bench.serving.remote import RemoteError
from bench.serving.server import (
    ASYNC,
    FRONT_ENDS,
    RUST,
    SIDES,
    SYNC,
    Server,
    ServerError,
    Start,
    serve,
)
from bench.serving.store import Store
from bench.serving.streams import FIRST_END, RUNNING
from bench.serving.workload import Workload

RATE_HZ = 500
END_S = 60.0
LOOP = re.compile(r"\brun_busy_loop ")
"""The function that is in all samples of the loop's thread."""
SLEEPING = re.compile(r"\b(wait|get) \((threading|queue)\.py")
"""What is innermost where the loop has nothing to do: py-spy doesn't always see that it sleeps."""
WAITS = re.compile(r"\b(get_output|synchronize|_wait_for_response) ")
"""Functions in which the loop waits for the GPU, or for a worker that does."""
WAITING, REST = "waiting", "rest"
GROUPS = {
    "runner": re.compile(r"vllm/v1/(worker|executor|sample|spec_decode|attention)/"),
    "queues": re.compile(
        r"sparksched/engine/(input|output|clients|sockets|launcher|encoder)\.py|"
        r"sparksched/shared/|vllm/v1/serial_utils\.py|\b_process_input_queue |\(queue\.py"
    ),
    "scheduler": re.compile(r"sparksched/|vllm/v1/core/|vllm/v1/structured_output/"),
}
"""What functions belong to, by name and file. The first that fits counts."""


def split(stacks: str) -> dict[str, float]:
    """Return the percent of the loop's samples in each group, and how many samples there are.

    Args:
        stacks: What py-spy writes with `--format raw`: a line for each stack, outermost first, the
            functions with file and line, separated by `;`, then how often it was seen.

    Raises:
        ValueError: if the loop is in none.

    """
    counts: Counter[str] = Counter()
    for line in stacks.splitlines():
        stack, _, number = line.rpartition(" ")
        functions = stack.split(";")
        group = _group_of(functions)
        is_asleep = group != WAITING and SLEEPING.search(functions[-1])
        if any(map(LOOP.search, functions)) and not is_asleep:
            counts[group] += int(number)
    total = counts.total()
    if not total:
        raise ValueError("the engine's loop is in no sample")
    shares = {name: 100 * counts[name] / total for name in (*GROUPS, WAITING, REST)}
    return shares | {"samples": float(total)}


def _group_of(functions: list[str]) -> str:
    if any(map(WAITS.search, functions)):
        return WAITING
    for function in reversed(functions):
        for name, pattern in GROUPS.items():
            if pattern.search(function):
                return name
    return REST


class Profiler:
    """Has py-spy look at a process for some seconds, once all streams run."""

    def __init__(self, program: str, pid: int, seconds: int, path: Path) -> None:
        """Look at this process, and write the samples to a file."""
        self._command = [
            *(program, "record", f"--pid={pid}", f"--rate={RATE_HZ}", f"--duration={seconds}"),
            *("--format=raw", f"--output={path}"),
        ]
        self._path = path
        self._process: subprocess.Popen[str] | None = None
        self._is_late = True

    def __call__(self, event: str) -> None:
        """Take notice of RUNNING or FIRST_END."""
        if event == RUNNING:
            self._process = subprocess.Popen(
                self._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        elif event == FIRST_END and self._process is not None:
            self._is_late = self._process.poll() is None

    def stacks(self) -> str:
        """Return the samples, or end this program with the reason why there are none."""
        if self._process is None:
            sys.exit("error: the streams didn't run side by side")
        try:
            said, _ = self._process.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            sys.exit("error: py-spy doesn't end")
        if not self._path.exists():
            sys.exit(f"error: py-spy wrote nothing: {said.strip()}")
        if self._is_late:
            sys.exit("error: streams ended while py-spy looked: more --tokens, or fewer --seconds")
        return self._path.read_text()


def main() -> int:
    """Measure and write JSON."""
    options = _options()
    program = shutil.which(options.py_spy)
    if program is None:
        sys.exit(f"error: there is no {options.py_spy}: pip install py-spy, or --py-spy PATH")
    try:
        return _run(options, program)
    except (RemoteError, ServerError, ValueError) as error:
        sys.exit(f"error: {error}")


def _run(options: argparse.Namespace, program: str) -> int:
    run = describe_run()
    store = Store(options.json, run | {"options": " ".join(sys.argv[1:])}, PROFILE)
    with tempfile.TemporaryDirectory(prefix="profile-") as scratch:
        work_dir = options.work_dir or Path(scratch)
        model = prepare(options.model, work_dir)
        mode = ASYNC if run["gpu"] != NO_GPU else SYNC
        for front_end in options.front_end:
            for scheduler in SIDES:
                key = ServerKey(model.name, scheduler, mode, front_end)
                counts = [
                    it for it in options.concurrency if not store.has(PROFILES, key, concurrency=it)
                ]
                if counts:
                    _measure_server(options, program, store, model, work_dir.resolve(), key, counts)
    print(as_markdown({"this run": store.result}))
    return 0


def _measure_server(
    options: argparse.Namespace,
    program: str,
    store: Store,
    model: Model,
    work_dir: Path,
    key: ServerKey,
    counts: list[int],
) -> None:
    start = Start(
        model=model,
        scheduler=key.scheduler,
        mode=key.mode,
        max_num_seqs=max(counts),
        max_model_len=PROMPT_TOKENS + options.tokens + 1,
        has_gpu=key.mode == ASYNC,
        front_end=key.front_end,
        extra_arguments=options.serve_args,
    )
    if start.has_gpu:
        wait_until_free(memory_of_gpus)
    print(f"starting vllm serve: {start.label}", file=sys.stderr, flush=True)
    with serve(start, work_dir) as server, running_loaders(max(counts), None) as loaders:
        for count in counts:
            path = work_dir / f"{key.scheduler}-{key.front_end}-{count}.txt"
            found = _profile(server, HttpDriver(server, loaders), count, options, program, path)
            store.put(PROFILES, key, {"split": found}, concurrency=count)


def _profile(
    server: Server,
    driver: HttpDriver,
    count: int,
    options: argparse.Namespace,
    program: str,
    path: Path,
) -> dict[str, float]:
    prompt, tokens = (PROMPT_TOKENS, PROMPT_TOKENS), (options.tokens, options.tokens)
    workload = Workload(count, server.start.model.vocab_size, prompt, tokens)
    warm_up_with(server, driver, workload, "profile")
    (engine,) = [it for it in server.processes() if it.role == "engine"]
    profiler = Profiler(program, engine.pid, options.seconds, path)
    driver.run(workload.seeded("profile"), profiler)
    return split(profiler.stacks())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="as of bench.serving.decode")
    parser.add_argument("--json", type=Path, metavar="FILE", help="results; to go on with, too")
    parser.add_argument("--front-end", type=names, default=(RUST,), metavar="A,...")
    parser.add_argument("--concurrency", type=numbers, default=(256, 1), metavar="N,...")
    parser.add_argument("--tokens", type=int, default=2048, metavar="N", help="of each stream")
    parser.add_argument("--seconds", type=int, default=2, metavar="S", help="of samples")
    parser.add_argument("--py-spy", default="py-spy", metavar="PATH")
    parser.add_argument("--serve-args", default="", metavar="ARGS", help="more for `vllm serve`")
    parser.add_argument("--work-dir", type=Path, metavar="DIR", help="for logs and samples")
    options = parser.parse_args()
    refuse_unknown(parser, options, front_end=FRONT_ENDS)
    return options


if __name__ == "__main__":
    sys.exit(main())
