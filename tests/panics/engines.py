"""Engine and front-end processes get an extension that can be made to panic.

As in `extension.py`, nothing of sparksched is imported here.
"""

import asyncio
import functools
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from transport.engines import PacedExecutor
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.outputs import DraftTokenIds

from .extension import load


def prepare_engine(extension: Path, entry: str | None = None) -> None:
    """Load the extension in an engine process; let an entry point panic from the beginning."""
    load(extension)
    from sparksched.engine import core_proc as engine_side

    # So much is soon there of a client that reads nothing.
    engine_side.MAX_BACKLOG_BYTES = 1 << 16
    EngineCoreProc.arm_panic = arm_panic
    EngineCoreProc.answer_later = answer_later
    EngineCoreProc.wake_from_thread = wake_from_thread
    EngineCoreProc.change = change
    EngineCoreProc.fork = fork
    if entry is not None:
        arm(entry)


def prepare_talkative_engine(extension: Path) -> None:
    """Load the extension in an engine process that logs all that it can."""
    prepare_engine(extension)
    from transport.test_secrets import log_everything

    log_everything()


def arm(entry: str, at_end: bool = False, num_spared: int = 0) -> None:
    from sparksched import _core

    _core.arm_panic(entry, at_end=at_end, num_spared=num_spared)  # type: ignore[attr-defined]


def arm_panic(_engine: EngineCoreProc, entry: str, at_end: bool, num_spared: int) -> None:
    """Let an entry point panic from now on: a utility method."""
    arm(entry, at_end, num_spared)


def answer_later(_engine: EngineCoreProc) -> Any:
    """Return what another thread completes: a utility method."""
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(1).submit(time.sleep, 0.2)


def wake_from_thread(engine: EngineCoreProc, entry: str) -> None:
    """Let another thread put something into the engine's queue until that panics: a utility method.

    Armed by that thread, or the loop might be the first to come to that point.
    """
    import threading

    from vllm.v1.engine import EngineCoreRequestType

    def wake() -> None:
        time.sleep(0.2)
        arm(entry)
        while True:
            engine.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
            time.sleep(0.05)

    threading.Thread(target=wake, daemon=True).start()


def change(engine: EngineCoreProc, path: str, value: Any) -> None:
    """Set an attribute of the engine, or of what it has: a utility method."""
    *owners, name = path.split(".")
    setattr(functools.reduce(getattr, owners, engine), name, value)


def fork(_engine: EngineCoreProc) -> int:
    """Start a process that ends at once, and return how: a utility method."""
    pid = os.fork()
    if pid == 0:
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class DraftingExecutor(PacedExecutor):
    """Has drafts for each request, and never comes to verify them."""

    def note_step(self, step: SchedulerOutput) -> None:
        """Keep whose drafts are wanted."""
        self._drafted = list(step.num_scheduled_tokens)

    def on_take_draft_token_ids(self) -> DraftTokenIds:
        return DraftTokenIds(self._drafted, [[1, 2] for _ in self._drafted])


def _front_end(extension: Path) -> Any:
    """Load the extension and the plugin; return the module whose functions need them."""
    load(extension)
    from sparksched import plugin

    plugin.register()
    from . import front_end

    return front_end


def run_front_end(
    extension: Path, config: Any, addresses: dict[str, str], entry: str, reports: Connection
) -> None:
    """Stream requests, let an entry point of the client panic, and report what became of them."""
    asyncio.run(_front_end(extension).stream_and_panic(config, addresses, entry, reports))


def run_sync_client(
    extension: Path, config: Any, addresses: dict[str, str], entry: str, reports: Connection
) -> None:
    """Do the same with a client that has no event loop."""
    _front_end(extension).read_and_panic(config, addresses, entry, reports)


def run_watched_front_ends(
    extension: Path, config: Any, addresses: list[dict[str, str]], reports: Connection
) -> None:
    """Start front ends one after the other while entry points panic, and look at their metrics."""
    asyncio.run(_front_end(extension).start_watch_and_panic(config, addresses, reports))


def run_impatient_front_end(
    extension: Path, config: Any, addresses: dict[str, str], entry: str, reports: Connection
) -> None:
    """Send more than an engine that is stopped has room for."""
    asyncio.run(_front_end(extension).wait_for_room_and_panic(config, addresses, entry, reports))
