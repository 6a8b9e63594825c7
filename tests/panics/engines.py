"""Engine and front-end processes get an extension that can be made to panic.

As in `extension.py`, nothing of sparksched is imported here.
"""

import asyncio
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vllm.v1.engine.core import EngineCoreProc

from .extension import load


def prepare_engine(extension: Path, entry: str | None = None) -> None:
    """Load the extension in an engine process; let an entry point panic from the beginning."""
    load(extension)
    EngineCoreProc.arm_panic = arm_panic
    EngineCoreProc.answer_later = answer_later
    EngineCoreProc.wake_later = wake_later
    if entry is not None:
        arm(entry)


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


def wake_later(engine: EngineCoreProc) -> None:
    """Let another thread put something into the engine's queue: a utility method."""
    import threading

    from vllm.v1.engine import EngineCoreRequestType

    item = (EngineCoreRequestType.WAKEUP, None)
    threading.Timer(0.2, engine.input_queue.put_nowait, [item]).start()


def run_front_end(
    extension: Path, config: Any, addresses: dict[str, str], entry: str, reports: Connection
) -> None:
    """Stream requests, let an entry point of the client panic, and report what became of them."""
    load(extension)
    from sparksched import plugin

    plugin.register()
    from . import front_end

    asyncio.run(front_end.stream_and_panic(config, addresses, entry, reports))


def run_sync_client(
    extension: Path, config: Any, addresses: dict[str, str], entry: str, reports: Connection
) -> None:
    """Do the same with a client that has no event loop."""
    load(extension)
    from sparksched import plugin

    plugin.register()
    from . import front_end

    front_end.read_and_panic(config, addresses, entry, reports)
