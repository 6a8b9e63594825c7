"""Processes that start without the 8 seconds that an import of vLLM takes.

The first is forked from one that has imported vLLM, and has started no threads: multiprocessing's
forkserver. What it would spawn, it forks.
"""

import faulthandler
import gc
import importlib
import multiprocessing
import os
import runpy
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing import resource_tracker, util
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any, NoReturn

from prometheus_client import values

forkserver = multiprocessing.get_context("forkserver")
forkserver.set_forkserver_preload(
    [
        "vllm.entrypoints.cli.main",
        "vllm.entrypoints.openai.api_server",
        "vllm.v1.engine.core",
        "vllm.v1.engine.async_llm",
        "vllm.v1.engine.core_client",
        "vllm.v1.executor.multiproc_executor",
        "vllm.v1.worker.cpu_worker",
        "vllm.platforms.cpu",
    ]
)

NAP_S = 1e-4


def start() -> None:
    """Start the first process, and wait until it has imported vLLM.

    Whoever starts a process waits for that, and on a busy machine without bytecode it takes
    minutes: no test's time may go on it.
    """
    process = forkserver.Process(target=gc.collect)
    process.start()
    process.join()


class Command:
    """A run of a module's `main()`; like a `Popen`, as far as servers need that."""

    def __init__(
        self, module: str, arguments: Sequence[str], log_path: Path, environment: Mapping[str, str]
    ) -> None:
        """Start it, in a process group of its own and the directory of its log."""
        self._process = forkserver.Process(
            target=_enter, args=(module, list(arguments), log_path, dict(environment))
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return its exit status if it has ended; negative after a signal."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; return its exit status.

        Raises:
            TimeoutExpired: if it runs for longer than so many seconds.

        """
        self._process.join(timeout)
        status = self._process.exitcode
        if status is None:
            assert timeout is not None
            raise TimeoutExpired(self._process.name, timeout)
        return status


def _enter(module: str, arguments: list[str], log_path: Path, environment: dict[str, str]) -> None:
    os.setpgid(0, 0)
    os.chdir(log_path.parent)
    settle(log_path, environment)
    faulthandler.enable()
    # A tracker of its own: it removes the shared memory of those that are killed.
    resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]
    _customize()
    # vLLM's processes yield the processor in a loop while they wait for each other. A dozen of them
    # on two processors can keep Linux 6.18 from running anything else, for minutes.
    os.sched_yield = lambda: time.sleep(NAP_S)
    _fork_what_is_spawned()
    sys.argv = [module, *arguments]
    importlib.import_module(module).main()


def settle(log_path: Path, environment: Mapping[str, str]) -> None:
    """Give a process that was just forked an environment and a log of its own."""
    # An engine collects garbage as it starts. It needn't scan vLLM's modules each time.
    gc.freeze()
    os.environ.clear()
    os.environ.update(environment)
    with log_path.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


def _customize() -> None:
    """Run the first `sitecustomize.py` on PYTHONPATH, as Python does before all other imports."""
    for folder in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        customization = Path(folder) / "sitecustomize.py"
        if customization.exists():
            runpy.run_path(str(customization))
            return


def _fork_what_is_spawned() -> None:
    """Have multiprocessing fork this process where it would start Python anew.

    As with `spawn`, a child unpickles what it is for, and has those of its parent's descriptors
    that it would have then: it neither keeps a socket alive nor hides a death. Its memory and
    modules are its parent's, so it doesn't show whether the plugin is loaded anew.
    """
    start = util.spawnv_passfds

    def fork(path: Any, arguments: list[Any], passed: Sequence[int]) -> int:
        command = [os.fsdecode(it) for it in arguments]
        if command[-1] != "--multiprocessing-fork":  # a resource tracker
            return int(start(path, arguments, passed))
        child = os.fork()
        if child == 0:
            _be_spawned(command, frozenset(passed))
        return child

    util.spawnv_passfds = fork  # type: ignore[assignment]


def _be_spawned(command: list[str], passed: frozenset[int]) -> NoReturn:
    """Be the process that a command of multiprocessing's would have started."""
    status = 1
    try:
        _reset_signals()
        _let_go_of_all_but(passed)
        # Chosen on import, before it was known whether several processes write metrics.
        values.ValueClass = values.get_value_class()  # type: ignore[no-untyped-call]
        *_, program, flag = command  # after `-c`
        sys.argv = ["-c", flag]
        exec(program, {})
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _reset_signals() -> None:
    """Handle signals as a new Python does: the parent's functions are not for this process."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _let_go_of_all_but(passed: frozenset[int]) -> None:
    """Replace other descriptors by one that leads nowhere.

    They aren't closed: inherited objects may yet close these numbers, which would by then be
    something else's.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor != nothing and descriptor not in passed:
            os.dup2(nothing, descriptor, inheritable=False)
