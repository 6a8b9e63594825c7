"""vLLM's own client, `vllm bench serve`: its command, what it takes of a processor, what it found.

There are two of them: one in Python, and `vllm-rs bench serve`, which vLLM runs instead if
VLLM_USE_RUST_BENCH is set. Both have the same options and write the same file.
"""

import json
import multiprocessing
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, Protocol

import psutil

from bench.serving.evaluate import missing
from bench.serving.models import Model
from bench.serving.server import RUST
from bench.serving.threads import Process, Snapshot, cpu_between
from bench.serving.vllm_cases import NUM_PREFIXES, Lengths

Row = dict[str, Any]

BUSY_PERCENT = 90.0
"""Of a processor: a client with a thread that takes more, or waits for it, is the limit."""
LIMIT_S = 900.0
POLL_S = 0.05
BEGINS = re.compile(r"starting main benchmark run", re.IGNORECASE)
ENDS = re.compile(r"benchmark result", re.IGNORECASE)
PERCENTILES = {"p50": 50, "p99": 99}
LOG_LINES = 20

_preloading = multiprocessing.get_context("forkserver")
_preloading.set_forkserver_preload(
    [
        "vllm.entrypoints.cli.main",
        "vllm.entrypoints.cli.serve",
        "vllm.entrypoints.cli.benchmark.main",
        "vllm.benchmarks.serve",
        "vllm.tokenizers",
    ]
)


def preload() -> None:
    """Begin to import the client in Python, which takes long: a server may start meanwhile."""
    forkserver.ensure_running()


class ClientError(RuntimeError):
    """The client has failed, or its requests have."""


class _Running(Protocol):
    pid: int | None

    @property
    def exitcode(self) -> int | None:
        """Its status, if it has ended."""


@dataclass(frozen=True)
class Order:
    """What the client is to send."""

    base_url: str
    model: Model
    lengths: Lengths
    num_prompts: int
    seed: int
    concurrency: int | None = None
    """Requests at once; None: as many as come."""
    rate: float | None = None
    """Requests a second, as a Poisson process; None: as fast as it goes."""

    def arguments(self, folder: Path, file: str) -> list[str]:
        """Return the arguments of `vllm bench serve`, which writes its result to a file."""
        pooling = self.model.is_pooling
        given = {
            "backend": "openai-embeddings" if pooling else "openai",
            "endpoint": "/v1/embeddings" if pooling else "/v1/completions",
            "base-url": self.base_url,
            "model": self.model.name,
            "tokenizer": self.model.directory.resolve(),
            "num-prompts": self.num_prompts,
            "seed": self.seed,
            "max-concurrency": self.concurrency,
            "request-rate": self.rate,
            "percentile-metrics": "e2el" if pooling else "ttft,tpot,itl,e2el",
            "metric-percentiles": ",".join(map(str, PERCENTILES.values())),
            "result-dir": folder,
            "result-filename": file,
        }
        given |= _dataset(self.lengths)
        options = [f"--{name}={value}" for name, value in given.items() if value is not None]
        return [*options, "--ignore-eos", "--save-result", "--save-detailed", "--disable-tqdm"]


def _dataset(lengths: Lengths) -> Row:
    if not lengths.prefix_tokens:
        return {
            "dataset-name": "random",
            "random-input-len": lengths.input_tokens,
            "random-output-len": lengths.output_tokens,
        }
    return {
        "dataset-name": "prefix_repetition",
        "prefix-repetition-prefix-len": lengths.prefix_tokens,
        "prefix-repetition-suffix-len": lengths.input_tokens,
        "prefix-repetition-num-prefixes": NUM_PREFIXES,
        "prefix-repetition-output-len": lengths.output_tokens,
    }


@dataclass
class Watch:
    """What server and client take of the processors while the client's requests run."""

    server: list[Process]
    client: Process
    before: Snapshot | None = None
    after: Snapshot | None = None
    of_client: list[Snapshot] = field(default_factory=list)

    def look(self, log: str) -> None:
        """Take notice of what the client has said so far."""
        if self.before is None and BEGINS.search(log):
            self.before = Snapshot.take(self.server)
        if self.before is not None and self.after is None:
            self.of_client.append(Snapshot.take([self.client]))
            if ENDS.search(log):
                self.after = Snapshot.take(self.server)

    def evaluate(self, duration_s: float, output_tokens: int, requests: int) -> Row:
        """Return CPU time by role, and what of a processor the client's busiest thread has taken.

        Args:
            duration_s: For how long the requests ran, by the client.
            output_tokens: How many tokens they got; 0: they got something else.
            requests: How many they were.

        """
        if self.before is None or self.after is None:
            return {"cpu": missing("the client didn't say when it began and ended")}
        shares = cpu_between(self.server, self.before, self.after)
        seconds = self.after.at - self.before.at
        us = {role: it["percent"] / 100 * seconds * 1e6 for role, it in shares.items()}
        found: Row = {"us_per_request": {role: it / requests for role, it in us.items()}}
        if output_tokens:
            found["us_per_token"] = {role: it / output_tokens for role, it in us.items()}
        scaled = {role: it["percent"] * seconds / duration_s for role, it in shares.items()}
        return {"cpu": found | {"percent": scaled}, "client": self._client(duration_s)}

    def _client(self, duration_s: float) -> Row:
        """Return what the client took while its requests ran, without what it computes then."""
        alive = [it for it in self.of_client if it.cpu_s[0]]
        in_time = [it for it in alive if it.at <= alive[0].at + duration_s]
        if len(in_time) < 2:
            return missing("the requests were answered too soon")
        share = cpu_between([self.client], in_time[0], in_time[-1])[self.client.role]
        busiest = share["busiest"]
        return {"busiest_percent": busiest, "is_limit": busiest >= BUSY_PERCENT}


def run(
    order: Order,
    kind: str,
    processes: list[Process],
    folder: Path,
    cores: set[int] | None,
    deadline: float,
) -> Row:
    """Have a client send requests, and return what it found and what it cost.

    Args:
        order: What it is to send.
        kind: The one in Python or in Rust.
        processes: The server's.
        folder: For its log and result.
        cores: The processors that it may use; None: all.
        deadline: By `time.monotonic()`: it is ended then.

    Raises:
        ClientError: if it fails, or one of its requests has.

    """
    folder.mkdir(parents=True, exist_ok=True)
    log_path, result_path = folder / "client.log", folder / "client.json"
    log_path.write_text("")
    result_path.unlink(missing_ok=True)
    arguments = order.arguments(folder, result_path.name)
    with _started(arguments, kind, log_path, cores) as client:
        assert client.pid is not None
        # On processors that others use as well, it may be the limit and still get little of one.
        watch = Watch(processes, Process("client", client.pid, wants=True))
        deadline = min(deadline, time.monotonic() + LIMIT_S)
        while client.exitcode is None:
            watch.look(log_path.read_text(errors="replace"))
            if time.monotonic() > deadline:
                raise ClientError(f"vLLM's client didn't end in time; see {log_path}")
            time.sleep(POLL_S)
        if watch.before is not None:
            # It may have ended right after its last words.
            watch.look(log_path.read_text(errors="replace"))
        if client.exitcode or not result_path.exists():
            raise ClientError(_last_words(log_path, client.exitcode))
    found = figures(json.loads(result_path.read_text()), order.num_prompts)
    result_path.unlink()
    cost = watch.evaluate(found["duration_s"], found.get("output_tokens", 0), found["completed"])
    return found | cost


def figures(result: Mapping[str, Any], num_prompts: int) -> Row:
    """Return the figures of the client's result file.

    Raises:
        ClientError: if not all requests were answered.

    """
    completed = int(result["completed"])
    if completed != num_prompts:
        reason = next(filter(None, result.get("errors") or ()), "nothing says why")
        said = str(reason).strip().splitlines()[-1]
        raise ClientError(f"{num_prompts - completed} of {num_prompts} requests failed: {said}")
    found: Row = {
        "duration_s": float(result["duration"]),
        "completed": completed,
        "requests_per_s": float(result["request_throughput"]),
        "input_tokens": int(result["total_input_tokens"]),
    }
    if tokens := int(result.get("total_output_tokens") or 0):
        found |= {"output_tokens": tokens, "tokens_per_s": float(result["output_throughput"])}
        if itls := result.get("itls"):
            # An output has several tokens where the server was late with some of them. `vllm-rs`
            # ends a stream with one that has none.
            outputs = completed + sum(map(len, itls))
            found["tokens_per_output"] = tokens / outputs
    for name in ("ttft", "tpot", "itl", "e2el"):
        times = {at: result.get(f"p{number}_{name}_ms") for at, number in PERCENTILES.items()}
        if all(it is not None for it in times.values()):
            found[f"{name}_ms"] = {at: float(it) for at, it in times.items() if it is not None}
    return found


def _last_words(log_path: Path, status: int | None) -> str:
    lines = log_path.read_text(errors="replace").splitlines()[-LOG_LINES:]
    return "\n".join([f"vLLM's client ended with status {status}; {log_path}:", *lines])


@contextmanager
def _started(
    arguments: Sequence[str], kind: str, log_path: Path, cores: set[int] | None
) -> Iterator[_Running]:
    """Start a client, and end it if it still runs."""
    client: _Running
    if kind == RUST:
        client = _Command([rust_program(), "bench", "serve", *arguments], log_path, cores)
    else:
        process = _preloading.Process(
            target=_bench, args=([*arguments], log_path, cores), daemon=True
        )
        process.start()
        client = process
    try:
        yield client
    finally:
        if client.exitcode is None:
            with suppress(psutil.Error):
                psutil.Process(client.pid).kill()


class _Command:
    """A program that runs, like a process of multiprocessing's."""

    def __init__(self, command: list[str], log_path: Path, cores: set[int] | None) -> None:
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env=os.environ | {"NO_COLOR": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.pid: int | None = self._process.pid
        if cores is not None:
            os.sched_setaffinity(self._process.pid, cores)

    @property
    def exitcode(self) -> int | None:
        return self._process.poll()


def _bench(arguments: list[str], log_path: Path, cores: set[int] | None) -> None:
    """Be `vllm bench serve`, in a process that was forked from one that has imported it."""
    if cores is not None:
        os.sched_setaffinity(0, cores)
    # A connection for each request at once.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.chdir(log_path.parent)
    with log_path.open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    from vllm.entrypoints.cli import main

    sys.argv = ["vllm", "bench", "serve", *arguments]
    main.main()


def rust_program() -> str:
    """Return where `vllm-rs` is: VLLM_RUST_FRONTEND_PATH says it, or it lies in vLLM's package.

    Raises:
        ClientError: if there is none.

    """
    named = os.environ.get("VLLM_RUST_FRONTEND_PATH", "auto")
    if named.lower() in ("auto", "1", "true"):
        found = find_spec("vllm")
        named = str(Path(str(found and found.origin)).parent / "vllm-rs")
    if not os.access(named, os.X_OK):
        raise ClientError(f"there is no vllm-rs: {named}; VLLM_RUST_FRONTEND_PATH may name one")
    return named
