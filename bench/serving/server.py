"""A real `vllm serve` as a child process, with the benchmark's probes in it."""

import functools
import http.client
import json
import math
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

from bench.header import ROOT
from bench.serving import stacks
from bench.serving.api_server import address_of
from bench.serving.excerpt import log_excerpt
from bench.serving.layouts import Layout
from bench.serving.models import TINY, Model
from bench.serving.remote import Remote, gather
from bench.serving.threads import Process, children_of

STOCK, OURS = SIDES = ("stock", "sparksched")
"""vLLM's scheduler and sockets, and sparksched's."""
ASYNC, SYNC = MODES = ("async", "sync")

START_S = 600.0
SETTLE_S = 30.0
POLL_S = 0.1
ENGINE_LABEL = re.compile(r'\bengine="([^"]*)"')
HOOKS = Path(__file__).resolve().parent / "hooks"

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_COLOR": "0",
    "SPARKSCHED_STRICT": "1",  # an error instead of a fallback
}
CPU_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB
# vLLM binds each process to processors of its own, and there may be fewer than processes.
CPU_ENVIRONMENT_OF_MANY = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
CPU_ARGUMENTS = ("--dtype=float32", "--enforce-eager", "--block-size=32")

STAGED_TOKENS = 2048
"""Of a step, with pipeline stages. What is scheduled in the same step decodes in the same steps:
prompts that all fit into one would leave the other stages without work."""
FEW_GRAPHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Batch sizes for which CUDA graphs are captured: vLLM's default are many more, and take minutes"""


Metrics = dict[str, dict[str, float]]
"""By name, and by engine; those of no engine by an empty name."""


class ServerError(RuntimeError):
    """The server didn't come up, died, or isn't what was asked for."""


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
    extra_arguments: str = ""

    @property
    def label(self) -> str:
        """What to call it."""
        return f"{self.layout.label(self.model.name)}, {self.scheduler}, {self.mode}"


@dataclass
class Server:
    """A running server."""

    start: Start
    process: subprocess.Popen[bytes]
    port: int
    log_path: Path
    trace_dir: Path
    start_s: float = 0.0
    described: dict[str, Any] = field(default_factory=dict)
    """What the first API server tells of itself and of the engines."""
    remotes: list[Remote] = field(default_factory=list)
    """The API servers' ears for the benchmark."""
    address: str = ""
    """What the addresses begin with that its processes listen at."""

    @property
    def remote(self) -> Remote:
        """The first API server's ear, for what concerns all engines."""
        return self.remotes[0]

    def processes(self) -> list[Process]:
        """Return API servers, engines, workers if they are processes of their own, and others."""
        fronts = [remote.call("describe") for remote in self.remotes]
        engines = fronts[0]["engines"]
        found = [self._process("API server", it["pid"], it["threads"]) for it in fronts]
        found += [
            self._process("engine", it["pid"], _with_int_keys(it["threads"])) for it in engines
        ]
        workers = [pid for it in engines for pid in children_of(it["pid"])]
        found += [self._process("worker", pid) for pid in workers]
        known = {it.pid for it in found}
        others = [pid for pid in children_of(self.process.pid) if pid not in known]
        return found + [self._process("other", pid) for pid in others]

    def _process(self, role: str, pid: int, names: dict[int, str] | None = None) -> Process:
        return Process(role, pid, names or {}, stacks.address_of(self.address, pid))

    def confine(self, cores: list[int]) -> None:
        """Confine all threads of all of its processes to some processors."""
        for process in self.processes():
            process.confine(cores)

    def settle(self) -> None:
        """Wait until each API server would spread requests over idle engines."""
        for remote in self.remotes:
            remote.send("settle")
        gather(self.remotes, SETTLE_S, lambda event: None)

    def metrics(self) -> Metrics:
        """Return vLLM's counters."""
        return read_metrics(self._get("/metrics").decode())

    def _get(self, path: str) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise ServerError(f"{path} answered {response.status}")
            return response.read()
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{path}: {error}") from None
        finally:
            connection.close()

    def log_excerpt(self) -> str:
        """Return where the log is, and the part that most likely tells what went wrong."""
        return f"from {self.log_path}: {log_excerpt(self.log_path.read_text(errors='replace'))}"

    def is_healthy(self) -> bool:
        """Whether it serves."""
        with suppress(ServerError):
            self._get("/health")
            return True
        return False


def read_metrics(text: str) -> Metrics:
    """Return the numbers of a page by name and by engine, summed over all other labels."""
    found: Metrics = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            name, _, labels = series.partition("{")
            engine = ENGINE_LABEL.search(labels)
            of_name = found.setdefault(name, {})
            key = engine[1] if engine else ""
            of_name[key] = of_name.get(key, 0.0) + float(value)
    return found


def _with_int_keys(names: dict[str, str]) -> dict[int, str]:
    return {int(key): name for key, name in names.items()}


@contextmanager
def serve(start: Start, work_dir: Path, deadline: float = math.inf) -> Iterator[Server]:
    """Start a server, wait until it serves, and stop it at the end.

    Args:
        start: What it is to be.
        work_dir: For its log and its traces.
        deadline: By `time.monotonic()`: it has failed if it doesn't serve by then.

    Raises:
        ServerError: if it doesn't come up, or isn't what was asked for.

    """
    directory = work_dir / start.label.replace(", ", "-").replace(" ", "")
    directory.mkdir(parents=True, exist_ok=True)
    trace_dir = directory / "traces"
    # Socket paths are short: the work directory may not be.
    with tempfile.TemporaryDirectory() as socket_dir:
        address = os.path.join(socket_dir, "control")
        port = _free_port()
        log_path = directory / "serve.log"
        process = _launch(start, port, address, log_path, trace_dir)
        server = Server(start, process, port, log_path, trace_dir, address=address)
        with _guarded(process):
            _connect(server, address, min(deadline, time.monotonic() + START_S))
            _check(server)
            yield server


def _launch(
    start: Start, port: int, address: str, log_path: Path, trace_dir: Path
) -> subprocess.Popen[bytes]:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("VLLM_SCHEDULER", "VLLM_PLUGINS")
    }
    environment |= ENVIRONMENT
    if not start.has_gpu:
        environment |= CPU_ENVIRONMENT
        environment |= CPU_ENVIRONMENT_OF_MANY if start.layout.num_gpus > 1 else {}
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(HOOKS), os.environ.get("PYTHONPATH", "")])
    )
    environment["SPARKSCHED_BENCH_CONTROL"] = address
    if start.scheduler == OURS:
        environment["VLLM_SCHEDULER"] = "sparksched"
    with log_path.open("wb") as log:
        return subprocess.Popen(
            _command(start, port, trace_dir),
            env=environment,
            cwd=log_path.parent,  # not the repository, whose directories could shadow packages
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=0,  # to be stopped as a whole
        )


def _command(start: Start, port: int, trace_dir: Path) -> list[str]:
    model = start.model
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model.directory)),
        *(f"--served-model-name={model.name}", "--host=127.0.0.1", f"--port={port}"),
        f"--max-num-seqs={start.max_num_seqs}",
        f"--max-model-len={start.max_model_len}",
        "--async-scheduling" if start.mode == ASYNC else "--no-async-scheduling",
        "--disable-uvicorn-access-log",
        # Costs nothing until a trace is asked for.
        "--profiler-config.profiler=torch",
        f"--profiler-config.torch_profiler_dir={trace_dir}",
        "--profiler-config.torch_profiler_with_stack=false",
        "--profiler-config.torch_profiler_dump_cuda_time_total=false",
        "--profiler-config.ignore_frontend=true",
    ]
    if model.has_dummy_weights:
        command.append("--load-format=dummy")
    if start.has_gpu:
        sizes = [size for size in FEW_GRAPHS if size <= start.max_num_seqs]
        sizes += [start.max_num_seqs] if start.max_num_seqs not in sizes else []
        command += [
            "--gpu-memory-utilization=0.85",
            f"--compilation-config={json.dumps({'cudagraph_capture_sizes': sizes})}",
        ]
        if model.name == TINY:
            command += ["--enforce-eager", "--dtype=bfloat16"]
    else:
        command += CPU_ARGUMENTS
    if start.layout.num_stages > 1:
        command.append(f"--max-num-batched-tokens={max(STAGED_TOKENS, start.max_num_seqs)}")
    return command + start.layout.arguments + shlex.split(start.extra_arguments)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _connect(server: Server, address: str, deadline: float) -> None:
    begun = time.monotonic()
    first = address_of(address, 0)
    _wait_until(lambda: os.path.exists(first) and server.is_healthy(), server, deadline)
    server.start_s = time.monotonic() - begun
    server.remotes.append(_remote(first, 0))
    server.described = server.remote.call("describe")
    for index in range(1, server.described["num_api_servers"]):
        # One that is healthy was enough so far.
        listens_at = address_of(address, index)
        _wait_until(functools.partial(os.path.exists, listens_at), server, deadline)
        server.remotes.append(_remote(listens_at, index))


def _wait_until(is_up: Callable[[], bool], server: Server, deadline: float) -> None:
    begun = time.monotonic()
    while not is_up():
        status = server.process.poll()
        if status is not None:
            raise ServerError(f"vllm serve ended with status {status}; {server.log_excerpt()}")
        if time.monotonic() > deadline:
            waited_s = time.monotonic() - begun
            raise ServerError(f"not healthy after {waited_s:.0f} s; {server.log_excerpt()}")
        time.sleep(POLL_S)


def _remote(address: str, index: int) -> Remote:
    return Remote(f"API server {index}", Client(address, family="AF_UNIX"))


def _check(server: Server) -> None:
    """Raise ServerError if this isn't the scheduler or the mode that was asked for."""
    for engine in server.described["engines"]:
        _check_engine(server, engine)


def _check_engine(server: Server, engine: dict[str, Any]) -> None:
    start = server.start
    is_ours = engine["scheduler"].startswith("sparksched.")
    if is_ours != (start.scheduler == OURS):
        runs = f"the engine runs {engine['scheduler']}, not {start.scheduler}"
        raise ServerError(f"{runs}; {server.log_excerpt()}")
    if engine["is_async"] != (start.mode == ASYNC):
        actual = ASYNC if engine["is_async"] else SYNC
        raise ServerError(f"{start.mode} scheduling isn't available here: the engine runs {actual}")


@contextmanager
def _guarded(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Stop the whole process group at the end, also if this process is killed."""
    command = [sys.executable, "-m", "bench.serving.guard", str(process.pid)]
    guard = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        assert guard.stdin is not None
        guard.stdin.close()
        process.wait()
        guard.wait()
