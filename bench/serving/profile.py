"""Where does the engine's loop spend its time? By py-spy, while all streams of a server decode.

For each front end and number of streams, servers with either scheduler are looked at 500 times a
second for some seconds, while all streams run; then these hang up. A sample of the loop's thread
belongs to the innermost of its functions that is known: one of vLLM's model runner or executor, of
a scheduler, or of what receives and sends messages. All else is the loop itself. Samples in which
it sleeps, because there is no request, don't count.

py-spy is no requirement of this project: `pip install py-spy`, or `--py-spy` names it. It needs the
right to look into other processes of the user (`ptrace_scope`, or root).

    python -m bench.serving.profile --model Qwen2-1.5B [--json FILE] [--front-end rust,python]
        [--concurrency 256,1] [--tokens N] [--seconds S] [--minutes M] [--py-spy PATH]

Results are written after each case; a run with the same file goes on with it, and tries again what
had failed. `--minutes` starts no server that would end later; the exit status is 3 then.
"""

import argparse
import itertools
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from bench.header import NO_GPU, describe_run
from bench.report.pairs import PROFILE, PROFILES
from bench.report.tables import as_markdown
from bench.serving.benchmark import reason_of
from bench.serving.drivers import HttpDriver, running_loaders
from bench.serving.gpus import memory_of_gpus, wait_until_free
from bench.serving.measure import warm_up_with
from bench.serving.models import Model, ModelError, prepare
from bench.serving.options import WORK_DIR, names, numbers, refuse_unknown
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
from bench.serving.store import Store, StoreError
from bench.serving.streams import RUNNING
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


class ProfileError(RuntimeError):
    """py-spy has seen nothing, or for too short a time."""


def split(stacks: str) -> dict[str, float]:
    """Return the percent of the loop's samples in each group, and how many samples there are.

    Args:
        stacks: What py-spy writes with `--format raw`: a line for each stack, outermost first, the
            functions with file and line, separated by `;`, then how often it was seen.

    Raises:
        ProfileError: if the loop is in none.

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
        raise ProfileError("the engine's loop is in no sample")
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


def sample(program: str, pid: int, seconds: int, path: Path) -> str:
    """Have py-spy look at a process for some seconds; return its samples.

    Raises:
        ProfileError: if there are none.

    """
    command = [
        *(program, "record", f"--pid={pid}", f"--rate={RATE_HZ}", f"--duration={seconds}"),
        *("--format=raw", f"--output={path}"),
    ]
    path.unlink(missing_ok=True)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=seconds + END_S
        )
    except subprocess.TimeoutExpired:
        raise ProfileError("py-spy doesn't end") from None
    if not path.exists():
        raise ProfileError(f"py-spy wrote nothing: {done.stdout}{done.stderr}".strip())
    return path.read_text()


class _LookedError(Exception):
    """All has been seen: the streams need not go on."""

    def __init__(self, stacks: str) -> None:
        super().__init__()
        self.stacks = stacks


def main() -> int:
    """Measure and write JSON; return the exit status: 3 if something is left for another run."""
    options = _options()
    program = shutil.which(options.py_spy)
    if program is None:
        sys.exit(f"error: there is no {options.py_spy}: pip install py-spy, or --py-spy PATH")
    try:
        return _run(options, program)
    except (ModelError, StoreError) as error:
        sys.exit(f"error: {error}")


def _run(options: argparse.Namespace, program: str) -> int:
    run = describe_run()
    deadline = time.monotonic() + 60 * options.minutes
    store = Store(options.json, run | {"options": " ".join(sys.argv[1:])}, PROFILE)
    status = 0
    with tempfile.TemporaryDirectory(prefix="profile-") as scratch:
        work_dir = options.work_dir or Path(scratch)
        model = prepare(options.model, work_dir)
        mode = ASYNC if run["gpu"] != NO_GPU else SYNC
        for front_end, scheduler in itertools.product(options.front_end, SIDES):
            key = ServerKey(model.name, scheduler, mode, front_end)
            counts = [
                it for it in options.concurrency if not store.has(PROFILES, key, concurrency=it)
            ]
            if not counts:
                continue
            if time.monotonic() + store.last_start_s(model.name) > deadline:
                _say("what is left of --minutes is too short: run it again to go on")
                status = 3
                break
            profiling = _Profiling(options, program, store, work_dir.resolve(), deadline)
            profiling.measure(key, model, counts)
    print(as_markdown({"this run": store.result}))
    return status or int(any("error" in row for row in store.result.get(PROFILES, ())))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class _Profiling:
    """A run: what is asked for, where it goes, and when it has to end."""

    options: argparse.Namespace
    program: str
    store: Store
    work_dir: Path
    deadline: float
    """By `time.monotonic()`."""

    def measure(self, key: ServerKey, model: Model, counts: list[int]) -> None:
        """Start a server, and look at its engine with each number of streams."""
        start = Start(
            model=model,
            scheduler=key.scheduler,
            mode=key.mode,
            max_num_seqs=max(counts),
            max_model_len=PROMPT_TOKENS + self.options.tokens + 1,
            has_gpu=key.mode == ASYNC,
            front_end=key.front_end,
            extra_arguments=self.options.serve_args,
        )
        if start.has_gpu:
            wait_until_free(memory_of_gpus)
        _say(f"starting vllm serve: {start.label}")
        try:
            with serve(start, self.work_dir, self.deadline) as server:
                self.store.put("servers", key, {"start_s": server.start_s})
                for count in counts:
                    self._keep(key, count, server)
        except ServerError as error:
            for count in counts:
                if not self.store.has(PROFILES, key, concurrency=count):
                    self._fail(key, count, error)

    def _keep(self, key: ServerKey, count: int, server: Server) -> None:
        _say(f"profile: {server.start.label}, streams: {count}")
        try:
            found = split(self._stacks(server, count))
        except (ProfileError, RemoteError) as error:
            self._fail(key, count, error)
            if not server.is_healthy():
                log = server.launched.log_path
                raise ServerError(f"{error}; the server is gone: {log}") from None
        else:
            self.store.put(PROFILES, key, {"split": found}, concurrency=count)

    def _fail(self, key: ServerKey, count: int, error: Exception) -> None:
        reason = reason_of(error)
        _say(f"failed: {reason}")
        self.store.put(PROFILES, key, {"error": reason}, concurrency=count)

    def _stacks(self, server: Server, count: int) -> str:
        """Return samples of the engine while all streams run, and have these hang up."""
        prompt, tokens = (PROMPT_TOKENS, PROMPT_TOKENS), (self.options.tokens, self.options.tokens)
        workload = Workload(count, server.start.model.vocab_size, prompt, tokens)
        engine = next((it for it in server.processes() if it.role == "engine"), None)
        if engine is None:
            raise ProfileError("no process is called an engine")
        path = self.work_dir / f"{server.start.scheduler}-{server.start.front_end}-{count}.txt"

        def look(event: str) -> None:
            if event == RUNNING:
                stacks = sample(self.program, engine.pid, self.options.seconds, path)
                if any(loader.connection.poll() for loader in loaders):
                    raise ProfileError("streams ended while py-spy looked: more --tokens")
                raise _LookedError(stacks)

        try:
            with running_loaders(count, None) as loaders:
                driver = HttpDriver(server, loaders)
                warm_up_with(server, driver, workload, "profile")
                driver.run(workload.seeded("profile"), look)
        except _LookedError as looked:
            return looked.stacks
        raise ProfileError("the streams didn't run side by side")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="as of bench.serving.decode")
    parser.add_argument("--json", type=Path, metavar="FILE", help="results; to go on with, too")
    parser.add_argument("--front-end", type=names, default=(RUST,), metavar="A,...")
    parser.add_argument("--concurrency", type=numbers, default=(256, 1), metavar="N,...")
    parser.add_argument(
        "--tokens", type=int, default=16384, metavar="N", help="of each stream at most"
    )
    parser.add_argument("--seconds", type=int, default=2, metavar="S", help="of samples")
    parser.add_argument(
        "--minutes", type=float, default=1e6, metavar="M", help="start no server that ends later"
    )
    parser.add_argument("--py-spy", default="py-spy", metavar="PATH")
    parser.add_argument("--serve-args", default="", metavar="ARGS", help="more for `vllm serve`")
    parser.add_argument("--work-dir", type=Path, metavar="DIR", help=WORK_DIR)
    options = parser.parse_args()
    refuse_unknown(parser, options, front_end=FRONT_ENDS)
    return options


if __name__ == "__main__":
    sys.exit(main())
