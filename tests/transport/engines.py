"""Real engines over a fake executor, each in a process of its own.

The processes are forked from one that has imported vLLM and started no threads, which takes a
fraction of a second instead of the many that the imports take. That process imports this module by
its name.
"""

import gc
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.utils import EngineHandshakeMetadata, EngineZmqAddresses
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.serial_utils import MsgpackEncoder

from testkit.executor import FakeExecutor
from testkit.preloaded import forkserver, settle

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0

STEP_S = 0.002
"""How long a step takes, unless a test asks for another pace."""


class PacedExecutor(FakeExecutor):
    """Takes some time for each step, and answers calls of tests."""

    def _init_executor(self) -> None:
        super()._init_executor()
        self._step_s = STEP_S
        self._fails = False
        self._num_sampled: Counter[str] = Counter()

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        time.sleep(self._step_s)
        if self._fails:
            raise RuntimeError("this step fails")
        return super().execute_model(scheduler_output, non_block)

    def note_step(self, step: SchedulerOutput) -> None:
        """Keep nothing: long runs would fill the memory."""

    def note_sample(self, grammar_output: GrammarOutput | None, output: ModelRunnerOutput) -> None:
        """Count the tokens of each request."""
        for request_id, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True):
            self._num_sampled[request_id] += len(tokens)

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        own = getattr(self, f"on_{method}", None) if isinstance(method, str) else None
        if own is not None:
            return [own(*args)]
        if callable(method):
            return [method(self, *args)]
        return super().collective_rpc(method, timeout, args, kwargs, non_block)

    def on_echo(self, value: Any) -> Any:
        return value

    def on_make_bytes(self, num_bytes: int) -> bytes:
        return bytes(num_bytes)

    def on_make_array(self, num_items: int) -> np.ndarray:
        return np.arange(num_items, dtype=np.int64)

    def on_raise(self, text: str) -> None:
        raise ValueError(text)

    def on_set_step_s(self, step_s: float) -> None:
        self._step_s = step_s

    def on_fail(self) -> None:
        self._fails = True

    def on_profile(self, *args: Any) -> None:
        self.calls.append(f"profile{args}")

    def on_garble(self) -> None:
        GarblingEncoder.garbles = True

    def on_get_num_sampled(self) -> dict[str, int]:
        return dict(self._num_sampled)

    def on_get_calls(self) -> list[str]:
        return list(self.calls)


class FrugalExecutor(PacedExecutor):
    """Takes no time for a step, and keeps nothing of any: for long runs."""

    def _init_executor(self) -> None:
        super()._init_executor()
        self._step_s = 0.0
        self._totals: Counter[str] = Counter()
        self._longest_gap_s = 0.0
        self._last_step_s = time.monotonic()

    def note_step(self, step: SchedulerOutput) -> None:
        """Count what happens."""
        now = time.monotonic()
        self._longest_gap_s = max(self._longest_gap_s, now - self._last_step_s)
        self._last_step_s = now
        self._totals["steps"] += 1
        self._totals["tokens"] += step.total_num_scheduled_tokens
        self._totals["preemptions"] += len(step.preempted_req_ids or ())

    def note_sample(self, grammar_output: GrammarOutput | None, output: ModelRunnerOutput) -> None:
        """Keep nothing."""

    def on_get_totals(self) -> dict[str, int]:
        return dict(self._totals)

    def on_take_longest_gap(self) -> float:
        """Return the longest time between two steps in seconds, since the last call."""
        longest_gap_s, self._longest_gap_s = self._longest_gap_s, 0.0
        return longest_gap_s

    def on_count_sequences(self) -> int:
        return self.device.num_sequences


class GarblingEncoder(MsgpackEncoder):
    """Encodes nonsense once it was told to."""

    garbles = False

    def encode(self, obj: Any) -> Any:
        return [b"\xc1 is no message pack"] if self.garbles else super().encode(obj)


# ----------------------------------------------------------------------------------------
# Processes
# ----------------------------------------------------------------------------------------


def start_process(
    target: Callable[..., None],
    log_path: Path,
    environment: Mapping[str, str],
    *args: Any,
) -> BaseProcess:
    """Start a function in a process with an environment and a log of its own."""
    process = forkserver.Process(target=enter, args=(target, log_path, dict(environment), args, {}))
    process.start()
    return process


def enter(
    target: Callable[..., None],
    log_path: Path,
    environment: dict[str, str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    settle(log_path, environment)
    target(*args, **kwargs)


def environment_with(**variables: str) -> dict[str, str]:
    """Return an environment in which sparksched is selected; an empty value means unset."""
    ours = {"VLLM_SCHEDULER": "sparksched", "SPARKSCHED_STRICT": "1", "VLLM_NO_USAGE_STATS": "1"}
    merged = {**os.environ, **ours, **variables}
    return {name: value for name, value in merged.items() if value}


def wait_until(condition: Callable[[], Any], timeout_s: float = 60.0, what: str = "") -> Any:
    """Wait until a condition holds, and return what it returned."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited for {timeout_s:g} s {what}"
        time.sleep(0.01)
    return value


def send_signal(pid: int, number: signal.Signals) -> None:
    """Send a signal; after SIGSTOP, wait until no thread of the process runs any more."""
    os.kill(pid, number)
    if number == signal.SIGSTOP:
        wait_until(lambda: set(_states_of_threads(pid)) == {"T"}, what="for a process to stop")


def _states_of_threads(pid: int) -> Iterator[str]:
    for stat in _told_of_threads(pid, "stat"):
        yield stat.rpartition(")")[2].split()[0]


def _told_of_threads(pid: int, name: str) -> Iterator[str]:
    """Yield what a file of each thread says; threads that end meanwhile are left out."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            yield (thread / name).read_text()


def thread_names(pid: int) -> list[str]:
    """Return the name of each thread of a process."""
    return [text.strip() for text in _told_of_threads(pid, "comm")]


def child_processes(pid: int) -> list[int]:
    """Return the processes that a process has started, through whichever thread."""
    return [int(child) for text in _told_of_threads(pid, "children") for child in text.split()]


@dataclass(frozen=True)
class Possessions:
    """What a process holds that something may have been forgotten of."""

    num_descriptors: int
    num_threads: int
    num_children: int
    num_mappings: int
    """Of shared memory that is ours."""

    def is_within(self, other: "Possessions") -> bool:
        """Whether nothing has been added to the other."""
        return all(getattr(self, it.name) <= getattr(other, it.name) for it in fields(self))

    def plus(self, other: "Possessions", count: int) -> "Possessions":
        """Return these and so many times the other."""
        return Possessions(
            *(getattr(self, it.name) + count * getattr(other, it.name) for it in fields(self))
        )


def possessions(pid: int) -> Possessions:
    """Count what a process holds, shared memory of rings among it."""
    directory = Path(f"/proc/{pid}")
    return Possessions(
        num_descriptors=len(list((directory / "fd").iterdir())),
        num_threads=len(list((directory / "task").iterdir())),
        num_children=len(child_processes(pid)),
        num_mappings=len(mappings(pid)),
    )


def mappings(pid: int) -> list[str]:
    """Return what a process has mapped of our shared memory: inode and name of each."""
    maps = (line.split(maxsplit=4) for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
    return [line[4] for line in maps if "memfd:sparksched" in line[4]]


def forkserver_pid() -> int:
    """Return the process that all engines and clients in other processes are children of."""
    pid: int = multiprocessing.forkserver._forkserver._forkserver_pid
    return pid


@contextmanager
def nothing_stays_behind() -> Iterator[None]:
    """Compare what this process, and the parent of the others, hold before and after.

    Of this process it is told which shared memory has been added: that of a test before this one
    may go meanwhile, and would make up for some that stays.
    """
    pids = [os.getpid(), forkserver_pid()]
    gc.collect()
    before = [possessions(pid) for pid in pids]
    mapped_before = set(mappings(pids[0]))
    yield
    gc.collect()

    def added() -> set[str]:
        return set(mappings(pids[0])) - mapped_before

    def is_clean() -> bool:
        now = map(possessions, pids)
        return not added() and all(map(Possessions.is_within, now, before))

    try:
        wait_until(is_clean)
    except AssertionError:
        now = [possessions(pid) for pid in pids]
        raise AssertionError(f"{before} became {now}, and there is {added()}") from None


# ----------------------------------------------------------------------------------------
# Engines
# ----------------------------------------------------------------------------------------


def unfinished_requests(self: EngineCoreProc) -> list[tuple[str, int]]:
    """Return id and client of all requests: a utility method for tests."""
    return [(it.request_id, it.client_index) for it in self.scheduler.requests.values()]


def ring_name(self: EngineCoreProc) -> str:
    """Return the name under which the engine waits for clients: a utility method for tests."""
    name: str = self.sparksched.offer.name
    return name


def run_engine(prepare: Callable[[], None] | None, kwargs: dict[str, Any]) -> None:
    """Do what the engine process of a server does, with a few more utility methods."""
    EngineCoreProc.unfinished_requests = unfinished_requests
    EngineCoreProc.ring_name = ring_name
    if prepare is not None:
        prepare()
    EngineCoreProc.run_engine_core(**kwargs)


@dataclass
class Engine:
    """A running engine process and the addresses of the sockets to its clients."""

    process: BaseProcess
    log_path: Path
    directory: Path
    inputs: list[str]
    outputs: list[str]

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def log_lines(self, text: str) -> list[str]:
        return [line for line in self.log.splitlines() if text in line]

    def wait_for_line(self, text: str) -> None:
        wait_until(lambda: self.log_lines(text), what=f"for {text!r} in {self.log_path}")

    def addresses(self, index: int) -> dict[str, str]:
        """Return what vLLM calls `client_addresses`."""
        return {"input_address": self.inputs[index], "output_address": self.outputs[index]}

    def signal(self, number: signal.Signals) -> None:
        send_signal(self.pid, number)

    def wait_for_exit(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Wait until the process ends by itself; return its exit status."""
        self.process.join(timeout_s)
        assert self.process.exitcode is not None, f"still running after {timeout_s:g} s"
        return self.process.exitcode

    def stop(self) -> None:
        """End the process, if it hasn't ended."""
        if self.process.is_alive():
            # Its parent, the fork server, may just have seen it end, and this process not yet.
            with suppress(ProcessLookupError):
                self.signal(signal.SIGCONT)
            self.process.kill()
        self.process.join()


@contextmanager
def running_engine(
    config: VllmConfig,
    *,
    num_clients: int = 1,
    prepare: Callable[[], None] | None = None,
    executor_class: type[FakeExecutor] = PacedExecutor,
    **variables: str,
) -> Iterator[Engine]:
    """Run an engine as long as the block lasts; `variables` are its environment's."""
    # Paths of Unix sockets are limited to about 100 bytes.
    with tempfile.TemporaryDirectory(prefix="rings-") as name, zmq.Context() as context:
        directory, log_path = Path(name), Path(name) / "engine.log"
        log_path.touch()
        with context.socket(zmq.ROUTER) as handshake:
            handshake.linger = 0
            handshake_address = f"ipc://{directory}/handshake"
            handshake.bind(handshake_address)
            arguments = {
                "vllm_config": config,
                "local_client": True,
                "handshake_address": handshake_address,
                "executor_class": executor_class,
                "log_stats": True,
            }
            environment = environment_with(**variables)
            process = start_process(run_engine, log_path, environment, prepare, arguments)
            inputs, outputs = (
                [f"ipc://{directory}/{kind}-{index}" for index in range(num_clients)]
                for kind in ("input", "output")
            )
            engine = Engine(process, log_path, directory, inputs, outputs)
            try:
                _shake_hands(handshake, engine)
                yield engine
            finally:
                engine.stop()
                lines = (it for it in engine.log.splitlines() if "with config: model=" not in it)
                print(*lines, sep="\n")


def _shake_hands(socket: zmq.Socket[bytes], engine: Engine) -> None:
    """Do what vLLM's `wait_for_engine_startup` does, for an engine that this process started."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        if not socket.poll(100):
            assert engine.process.is_alive(), f"an engine ended:\n{engine.log}"
            assert time.monotonic() < deadline, f"an engine doesn't start:\n{engine.log}"
            continue
        identity, payload = socket.recv_multipart()
        if msgspec.msgpack.decode(payload)["status"] == "READY":
            return
        addresses = EngineZmqAddresses(inputs=engine.inputs, outputs=engine.outputs)
        reply = EngineHandshakeMetadata(addresses=addresses, parallel_config={})
        socket.send_multipart([identity, msgspec.msgpack.encode(reply)])
