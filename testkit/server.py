"""Runs `vllm serve` as a child process for as long as a `with` block lasts."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import httpx

PROGRAM = "vllm.entrypoints.cli.main"
MODEL_NAME = "tiny"
START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 20.0
ABORT_TIMEOUT_S = 5.0
LOG_EXCERPT_LINES = 200
SPARKSCHED_LINE = "scheduling in Rust"

CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_COLOR": "0",
    "PYTHONFAULTHANDLER": "1",
}
# Small enough that a few dozen requests queue and are prefilled in chunks.
CPU_ARGUMENTS = (
    "--dtype=float32",
    "--enforce-eager",
    "--max-model-len=1024",
    "--max-num-seqs=16",
    "--max-num-batched-tokens=256",
    "--block-size=32",
    "--disable-uvicorn-access-log",
)


class Process(Protocol):
    """A command that runs: a `Popen`, or what stands in for one."""

    pid: int

    def poll(self) -> int | None:
        """Return its exit status if it has ended."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; return its exit status."""


class ServerError(RuntimeError):
    """The server didn't come up, or died."""


@dataclass(frozen=True)
class Server:
    """A running server."""

    base_url: str
    log_path: Path
    process: Process
    model: str = MODEL_NAME

    @property
    def log(self) -> str:
        """All that the server and its engine have printed so far."""
        return self.log_path.read_text(errors="replace")

    @property
    def runs_sparksched(self) -> bool:
        """Whether the engine said that it schedules in Rust."""
        return SPARKSCHED_LINE in self.log

    def metric(self, name: str) -> float:
        """Return the sum over the series of a Prometheus metric, or raise KeyError."""
        text = httpx.get(f"{self.base_url}/metrics", timeout=60).raise_for_status().text
        values = [
            float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if line.startswith((f"{name}{{", f"{name} "))
        ]
        if not values:
            raise KeyError(name)
        return sum(values)

    def wait_until_idle(self, timeout_s: float = 60.0) -> None:
        """Wait until no request runs or waits, by the server's own metrics."""
        deadline = time.monotonic() + timeout_s
        gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        while any(self.metric(gauge) for gauge in gauges):
            if time.monotonic() > deadline:
                raise ServerError(f"requests are still running or waiting after {timeout_s:.0f} s")
            time.sleep(0.2)


@contextmanager
def serve(
    model_dir: Path,
    log_path: Path,
    *,
    scheduler: str | None = None,
    name: str = MODEL_NAME,
    is_on_cpu: bool = True,
    is_preloaded: bool = False,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    start_timeout_s: float = START_TIMEOUT_S,
) -> Iterator[Server]:
    """Start `vllm serve` on a free local port, wait until it is healthy, and stop it at the end.

    `scheduler` becomes VLLM_SCHEDULER; None means vLLM's own. `name` is what the model is served
    as. On a CPU there are arguments for tiny models; `arguments` follow them, so they win.

    One that `is_preloaded` is up in a third of the time: see `start()`.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "VLLM_SCHEDULER"}
    chosen = {} if scheduler is None else {"VLLM_SCHEDULER": scheduler}
    variables = {**inherited, **CPU_ENVIRONMENT, **chosen, **(environment or {})}
    with reserved_port() as port:
        command = [
            *("serve", str(model_dir.resolve())),
            *(f"--served-model-name={name}", "--host=127.0.0.1", f"--port={port}"),
            *(CPU_ARGUMENTS if is_on_cpu else ()),
            *arguments,
        ]
        process = start(PROGRAM, command, log_path, variables, is_preloaded=is_preloaded)
        server = Server(f"http://127.0.0.1:{port}", log_path, process, name)
        try:
            _wait_until_healthy(server, start_timeout_s)
            yield server
        finally:
            stop(process)


def start(
    module: str,
    arguments: Sequence[str],
    log_path: Path,
    environment: Mapping[str, str],
    *,
    is_preloaded: bool,
) -> Process:
    """Start a module's `main()` in a process group of its own and the directory of its log.

    Not in a session of its own: Linux shares processors among sessions (autogroup), and one in
    which vLLM's processes yield in a loop can keep a client in another from running for seconds.

    One that `is_preloaded`, and whatever it spawns, is a fork of a process that has imported vLLM.
    With UNFORKED=1 nothing is, as with users.
    """
    if is_preloaded and os.environ.get("UNFORKED") != "1":
        from testkit.preloaded import Command

        return Command(module, arguments, log_path, environment)
    with log_path.open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env=environment,
            cwd=log_path.parent,  # not the repository, whose directories could shadow packages
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=0,  # to be stopped as a whole
        )


@contextmanager
def reserved_port() -> Iterator[int]:
    """Keep a local port for a listener that may reuse its address, as vLLM's and ZMQ's do.

    The system gives it to nobody who asks for any port, or connects, before the listener is up.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def _wait_until_healthy(server: Server, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not _is_healthy(server.base_url):
        status = server.process.poll()
        if status is not None:
            raise ServerError(f"vllm serve ended with status {status}:\n{_log_excerpt(server)}")
        if time.monotonic() > deadline:
            _abort(server.process)
            raise ServerError(
                f"vllm serve was not healthy after {timeout_s:.0f} s:\n{_log_excerpt(server)}"
            )
        time.sleep(0.25)


def _is_healthy(base_url: str) -> bool:
    try:
        return httpx.get(f"{base_url}/health", timeout=5).is_success
    except httpx.TransportError:
        return False


def _log_excerpt(server: Server) -> str:
    """Return the part of the log that most likely tells what went wrong.

    One traceback follows another when a process of vLLM's fails, and the first has the cause.
    """
    lines = server.log.splitlines()
    begins = ("Traceback (most recent", "Fatal Python error")
    tracebacks = (at for at, line in enumerate(lines) if any(it in line for it in begins))
    start = next(tracebacks, max(0, len(lines) - LOG_EXCERPT_LINES))
    return "\n".join([f"from {server.log_path}:", *lines[start : start + LOG_EXCERPT_LINES]])


def _abort(process: Process) -> None:
    """End the whole process group, each with its threads' stacks in the log."""
    _signal_group(process, signal.SIGABRT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(ABORT_TIMEOUT_S)


def stop(process: Process) -> None:
    """Stop the whole process group: kindly first, so that engine and worker can clean up."""
    _signal_group(process, signal.SIGTERM)
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
    finally:
        # Also after a clean exit: whatever of the group outlived its leader must not stay.
        _signal_group(process, signal.SIGKILL)
        process.wait()


def _signal_group(process: Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # nobody is left in the group
        os.killpg(process.pid, number)
