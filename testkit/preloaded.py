"""vLLM's command line in a process that needn't import vLLM, which takes 10 seconds.

It is forked from one that has done so, and has started no threads: multiprocessing's forkserver.
"""

import faulthandler
import importlib
import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from subprocess import TimeoutExpired
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

DOZING = Path(__file__).parent / "dozing"
"""What has all that is spawned doze where it spins."""

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


class Command:
    """A run of `vllm ARGUMENTS`; like a `Popen`, as far as servers need that."""

    def __init__(
        self,
        arguments: Sequence[str],
        log_path: Path,
        environment: Mapping[str, str],
        *,
        forks: bool,
    ) -> None:
        """Start it, in a session of its own and the directory of its log.

        All of its processes doze while they wait for each other, where vLLM's spin: several servers
        share two processors. One that `forks` has its engine and workers forked; else it spawns
        them.
        """
        self._process = forkserver.Process(
            target=_enter, args=(list(arguments), log_path, dict(environment), forks)
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
            raise TimeoutExpired("vllm", timeout)
        return status


def _enter(arguments: list[str], log_path: Path, environment: dict[str, str], forks: bool) -> None:
    os.setsid()
    os.chdir(log_path.parent)
    os.environ.clear()
    os.environ.update(environment)
    with log_path.open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    faulthandler.enable()
    # A tracker of its own: it removes the shared memory of those that are killed.
    resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]
    importlib.import_module("testkit.dozing.sitecustomize")
    search_path = (str(DOZING), os.environ.get("PYTHONPATH"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, search_path))
    if forks:
        fork_workers()
    sys.argv = ["vllm", *arguments]
    from vllm.entrypoints.cli.main import main

    main()


def fork_workers() -> None:
    """Have vLLM fork in this process, where it spawns on a CPU, to import nothing again."""
    from vllm.platforms.cpu import CpuPlatform

    check_and_update_config = CpuPlatform.check_and_update_config

    def check_and_fork(config: "VllmConfig") -> None:
        check_and_update_config(config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = staticmethod(check_and_fork)
