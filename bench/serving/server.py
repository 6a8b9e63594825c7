"""A real `vllm serve`, with the benchmark's probes in it where its front end is Python."""

import functools
import json
import math
import os
import re
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench.serving.api_server import address_of
from bench.serving.layouts import Layout
from bench.serving.models import TINY, Model
from bench.serving.remote import Remote, gather
from bench.serving.threads import Process, children_of
from testkit.server import Server as Launched
from testkit.server import ServerError
from testkit.server import serve as launch

STOCK, OURS = SIDES = ("stock", "sparksched")
"""vLLM's scheduler and sockets, and sparksched's."""
ASYNC, SYNC = MODES = ("async", "sync")
PYTHON, RUST = FRONT_ENDS = ("python", "rust")
"""vLLM's API server in Python, and `vllm-rs`, into which no probe can look."""

START_S = 600.0
SETTLE_S = 30.0
POLL_S = 0.1
HOOKS = Path(__file__).resolve().parents[1] / "hooks"

# vLLM binds each process to processors of its own, and there may be fewer than processes.
CPU_ENVIRONMENT_OF_MANY = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
KEEP_ALIVE_S = "3600"
"""For how long a connection may be idle. vLLM's 5 s end while clients wait for the next request at
a rate; one that is sent at that moment fails, and with it the case."""
STAGED_TOKENS = 2048
"""Of a step, with pipeline stages. What is scheduled in the same step decodes in the same steps:
prompts that all fit into one would leave the other stages without work."""
FEW_GRAPHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Batch sizes for which CUDA graphs are captured: vLLM's default are many more, and take minutes"""
PREEMPTIONS = "vllm:num_preemptions_total"
MEMORY_LEFT = re.compile(r"Available KV cache memory: ([\d.]+) GiB")
"""What each worker says on a GPU, unless it was given a size."""


@dataclass(frozen=True)
class Start:
    """What a server is to be."""

    model: Model
    scheduler: str
    mode: str
    max_num_seqs: int
    max_model_len: int
    has_gpu: bool
    layout: Layout = field(default_factory=Layout)
    front_end: str = PYTHON
    extra_arguments: str = ""
    extra_environment: Mapping[str, str] = field(default_factory=dict)
    kv_cache_gib: float | None = None
    """Memory of each GPU for the KV cache; None: vLLM takes what it finds.

    A server that compiles its kernels finds less than the next one, and so would run fewer requests
    at once: servers that are compared get what the first one had.
    """

    @property
    def label(self) -> str:
        """What to call it."""
        rust = ", Rust front end" if self.front_end == RUST else ""
        return f"{self.layout.label(self.model.name)}, {self.scheduler}, {self.mode}{rust}"


@dataclass
class Server:
    """A running server."""

    start: Start
    launched: Launched
    start_s: float
    described: dict[str, Any] = field(default_factory=dict)
    """What the first API server tells of itself and of the engines."""
    remotes: list[Remote] = field(default_factory=list)
    """The API servers' ears for the benchmark; none if it is in Rust."""

    @property
    def remote(self) -> Remote:
        """The first API server's ear, for what concerns all engines."""
        return self.remotes[0]

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.launched.base_url.rpartition(":")[2])

    @property
    def kv_cache_gib(self) -> float | None:
        """Memory of each GPU for the KV cache; None: it isn't known, as on a CPU."""
        found = map(float, MEMORY_LEFT.findall(self.launched.log))
        return self.start.kv_cache_gib or min(found, default=None)

    def num_preempted(self) -> int | None:
        """Return how many requests had to give back what they had of the KV cache, so far."""
        try:
            return round(self.launched.metric(PREEMPTIONS))
        except (KeyError, httpx.HTTPError):
            return None

    def preempted_since(self, before: int | None) -> int | None:
        """Return how many more than `before`, as `num_preempted()` had it; None: it isn't told."""
        now = self.num_preempted()
        return None if now is None or before is None else now - before

    def processes(self) -> list[Process]:
        """Return API servers, engines, workers if they are processes of their own, and others."""
        if not self.remotes:
            return [_guessed(pid) for pid in children_of(self.launched.process.pid)]
        fronts = [remote.call("describe") for remote in self.remotes]
        engines = fronts[0]["engines"]
        found = [Process("API server", it["pid"]) for it in fronts]
        found += [Process("engine", it["pid"]) for it in engines]
        workers = [pid for it in engines for pid in children_of(it["pid"])]
        found += [Process("worker", pid) for pid in workers]
        known = {it.pid for it in found}
        others = [pid for pid in children_of(self.launched.process.pid) if pid not in known]
        return found + [Process("other", pid) for pid in others]

    def confine(self, cores: list[int]) -> None:
        """Confine all threads of all of its processes to some processors."""
        for process in [*self.processes(), Process("launcher", self.launched.process.pid)]:
            process.confine(cores)

    def settle(self) -> None:
        """Wait until each API server would spread requests over idle engines."""
        for remote in self.remotes:
            remote.send("settle")
        gather(self.remotes, SETTLE_S, lambda event: None)

    def is_healthy(self) -> bool:
        """Whether it serves."""
        try:
            return httpx.get(f"{self.launched.base_url}/health", timeout=10).is_success
        except httpx.HTTPError:
            return False


def _guessed(pid: int) -> Process:
    """Return a process with the role that its name tells."""
    try:
        process = psutil.Process(pid)
        name = " ".join([process.name(), *process.cmdline()])
    except psutil.Error:
        name = ""
    roles = {"EngineCor": "engine", "vllm-rs": "API server", "Worker": "worker"}
    return Process(next((role for it, role in roles.items() if it in name), "other"), pid)


@contextmanager
def serve(start: Start, work_dir: Path, deadline: float = math.inf) -> Iterator[Server]:
    """Start a server, wait until it serves, and stop it at the end.

    Args:
        start: What it is to be.
        work_dir: For its log.
        deadline: By `time.monotonic()`: it has failed if it doesn't serve by then.

    Raises:
        ServerError: if it doesn't come up, or isn't what was asked for.

    """
    directory = work_dir / start.label.replace(", ", "-").replace(" ", "")
    directory.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    deadline = min(deadline, begun + START_S)
    # Socket paths are short: the work directory may not be.
    with tempfile.TemporaryDirectory() as socket_dir:
        address = os.path.join(socket_dir, "control")
        with launch(
            start.model.directory,
            directory / "serve.log",
            scheduler="sparksched" if start.scheduler == OURS else None,
            name=start.model.name,
            is_on_cpu=not start.has_gpu,
            arguments=arguments_of(start),
            environment=_environment(start, address),
            start_timeout_s=max(0.0, deadline - begun),
        ) as launched:
            server = Server(start, launched, time.monotonic() - begun)
            if start.front_end == PYTHON:
                _connect(server, address, deadline)
            check(server)
            yield server


def _environment(start: Start, address: str) -> dict[str, str]:
    environment = hooked_environment() | {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": KEEP_ALIVE_S}
    if not start.has_gpu and start.layout.num_gpus > 1:
        environment |= CPU_ENVIRONMENT_OF_MANY
    if start.front_end == RUST:
        environment["VLLM_USE_RUST_FRONTEND"] = "1"
    else:
        environment["SPARKSCHED_BENCH_CONTROL"] = address
    return environment | start.extra_environment


def hooked_environment() -> dict[str, str]:
    """Return what has a process of vLLM's end with this one, and take no scheduler but ours."""
    search_path = [str(HOOKS), os.environ.get("PYTHONPATH", "")]
    return {
        "SPARKSCHED_STRICT": "1",
        "SPARKSCHED_BENCH_PARENT": str(os.getpid()),
        "PYTHONPATH": os.pathsep.join(filter(None, search_path)),
    }


def arguments_of(start: Start) -> list[str]:
    """Return what `vllm serve` is given besides the model and the port."""
    return [*engine_arguments_of(start), "--disable-uvicorn-access-log"]


def engine_arguments_of(start: Start) -> list[str]:
    """Return what an engine is given, also where no server is around it."""
    model = start.model
    arguments = [
        f"--max-num-seqs={start.max_num_seqs}",
        f"--max-model-len={start.max_model_len}",
        "--async-scheduling" if start.mode == ASYNC else "--no-async-scheduling",
    ]
    if model.has_dummy_weights:
        arguments.append("--load-format=dummy")
    if model.is_pooling:
        arguments.append("--runner=pooling")
    if start.has_gpu:
        # Also of a step in which a request joins those that decode.
        sizes = {size for size in FEW_GRAPHS if size < 2 * start.max_num_seqs}
        sizes.add(start.max_num_seqs)
        captured = sorted(model.tokens_a_step * size for size in sizes)
        arguments += [
            "--gpu-memory-utilization=0.85",
            f"--compilation-config={json.dumps({'cudagraph_capture_sizes': captured})}",
        ]
        if start.kv_cache_gib is not None:
            arguments.append(f"--kv-cache-memory-bytes={round(start.kv_cache_gib * 2**30)}")
        if model.name == TINY:
            arguments += ["--enforce-eager", "--dtype=bfloat16"]
    else:
        # Of vLLM's own default, where the launcher's is for tests.
        arguments.append(f"--max-num-batched-tokens={max(4096, start.max_num_seqs)}")
    if model.speculation is not None:
        arguments.append(f"--speculative-config={json.dumps(model.speculation)}")
    if start.layout.num_stages > 1:
        arguments.append(f"--max-num-batched-tokens={max(STAGED_TOKENS, start.max_num_seqs)}")
    return arguments + start.layout.arguments + shlex.split(start.extra_arguments)


def _connect(server: Server, address: str, deadline: float) -> None:
    """Connect to the API servers, all of which listen at addresses of their own."""
    index, number = 0, 1
    while index < number:
        listens_at = address_of(address, index)
        _wait_until(functools.partial(os.path.exists, listens_at), server, deadline)
        remote = Remote(f"API server {index}", Client(listens_at, family="AF_UNIX"))
        server.remotes.append(remote)
        if index == 0:
            server.described = remote.call("describe")
            number = server.described["num_api_servers"]
        index += 1


def _wait_until(is_up: Callable[[], bool], server: Server, deadline: float) -> None:
    while not is_up():
        status = server.launched.process.poll()
        log = server.launched.log_path
        if status is not None:
            raise ServerError(f"vllm serve ended with status {status}; see {log}")
        if time.monotonic() > deadline:
            raise ServerError(f"an API server doesn't listen to the benchmark; see {log}")
        time.sleep(POLL_S)


def check(server: Server) -> None:
    """Raise ServerError if this isn't the scheduler or the mode that was asked for."""
    start = server.start
    if not server.remotes and server.launched.runs_sparksched != (start.scheduler == OURS):
        raise ServerError(f"the engine doesn't run {start.scheduler}: {server.launched.log_path}")
    for engine in server.described.get("engines", ()):
        is_ours = engine["scheduler"].startswith("sparksched.")
        if is_ours != (start.scheduler == OURS):
            runs = f"the engine runs {engine['scheduler']}, not {start.scheduler}"
            raise ServerError(f"{runs}; see {server.launched.log_path}")
        if engine["is_async"] != (start.mode == ASYNC):
            actual = ASYNC if engine["is_async"] else SYNC
            asked = f"{start.mode} scheduling isn't available here"
            raise ServerError(f"{asked}: the engine runs {actual}")
