"""Processes that a benchmark starts and tells through pipes what to do."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from typing import Any

START_S = 300.0
"""The import of vLLM may take minutes on a busy machine."""
LATEST_S = 90.0
"""A command that takes longer will never end."""


class BenchmarkError(RuntimeError):
    """A process has died or has reported an error, or this machine won't do."""


class Worker:
    """The other end of a process that answers `(is_ok, result)` to `(command, arguments)`."""

    def __init__(
        self,
        context: ForkServerContext,
        name: str,
        serve: Callable[..., None],
        arguments: tuple[Any, ...],
    ) -> None:
        """Start `serve(pipe, *arguments)` in a process; `answer` then waits until it is up."""
        self._name = name
        self._pipe, theirs = context.Pipe()
        # No daemon: it may have children of its own.
        self._process = context.Process(target=serve, args=(theirs, *arguments), name=name)
        self._process.start()
        theirs.close()

    def tell(self, command: str, **arguments: Any) -> None:
        """Start a command; `answer` waits for its end."""
        self._send((command, arguments))

    def _send(self, message: tuple[str, dict[str, Any]] | None) -> None:
        try:
            self._pipe.send(message)
        except ConnectionError:
            raise self._death() from None

    def answer(self, timeout_s: float = LATEST_S) -> Any:
        """Return what the process says next, or raise BenchmarkError."""
        if not wait([self._pipe, self._process.sentinel], timeout_s):
            raise BenchmarkError(f"{self._name} hasn't answered for {timeout_s:g} s")
        try:
            is_ok, result = self._pipe.recv()
        except (EOFError, ConnectionError):
            raise self._death() from None
        if not is_ok:
            raise BenchmarkError(f"{self._name} has failed:\n{result}")
        return result

    def call(self, command: str, **arguments: Any) -> Any:
        """Run a command and return its result, or raise BenchmarkError."""
        self.tell(command, **arguments)
        return self.answer()

    def stop(self) -> None:
        """Have the process shut down, and wait for its end."""
        self._send(None)
        self.answer()
        self._process.join(LATEST_S)
        if self._process.exitcode != 0:
            raise self._death()

    def _death(self) -> BenchmarkError:
        self._process.join(1.0)
        return BenchmarkError(f"{self._name} has ended with exit code {self._process.exitcode}")

    def kill(self) -> None:
        """End the process and those of its group, if it leads one, as far as they still run."""
        assert self._process.pid is not None
        with suppress(ProcessLookupError, PermissionError):
            if os.getpgid(self._process.pid) == self._process.pid:
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._pipe.close()


@contextmanager
def running_workers(
    serve: Callable[..., None], arguments: Mapping[str, tuple[Any, ...]]
) -> Iterator[tuple[dict[str, Worker], dict[str, Any]]]:
    """Start a process for each name; yield them and what they say of themselves.

    At the end they shut down, or are killed after an error.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    context = multiprocessing.get_context("forkserver")
    # Imported once, and not in this process.
    context.set_forkserver_preload(["vllm.engine.arg_utils", "vllm.v1.engine.async_llm"])
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for name, it in arguments.items():
            workers[name] = Worker(context, name, serve, it)
            stack.callback(workers[name].kill)
        yield workers, {name: worker.answer(START_S) for name, worker in workers.items()}
        for worker in workers.values():
            worker.stop()
