"""Ends the engine when the process that has started it is gone.

vLLM's launcher watches engines and API servers, but nobody watches the launcher. Once it is killed,
they would go on for ever and keep the GPU.
"""

import multiprocessing
import os
import select
import signal
import threading
import time
from typing import TYPE_CHECKING, NoReturn

from vllm.logger import init_logger

from sparksched.engine.links import others_step_with
from sparksched.engine.notices import Notice

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCoreProc

logger = init_logger("vllm.sparksched.transport")

_GRACE_S = 1.5
"""How long the engine may take to end by itself: a step, or the end of its workers, can hang."""


def watch_launcher(engine: "EngineCoreProc") -> None:
    """End the engine as soon as the process that has started it has ended."""
    launcher = multiprocessing.parent_process()
    if launcher is None or launcher.pid is None:
        return  # a Ray actor, say, which Ray looks after
    descriptor: int | None = None
    try:
        descriptor = os.pidfd_open(launcher.pid)
    except ProcessLookupError:
        pass  # it has ended already
    except (AttributeError, OSError):
        # Some Pythons are compiled without it, and some containers forbid it. This pipe may tell
        # later: if children of the launcher's are forked, those that came after the engine hold its
        # other end, too.
        descriptor = launcher.sentinel
    threading.Thread(
        target=_wait_and_end, args=(engine, descriptor), name="LauncherThread", daemon=True
    ).start()


def _wait_and_end(engine: "EngineCoreProc", descriptor: int | None) -> None:
    if descriptor is not None:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll()
    if others_step_with(engine):
        logger.warning(
            "sparksched: the launcher is gone; the engine goes on for those of others, which step "
            "together with it, and has to be ended by hand"
        )
        return
    engine.input_queue.put_nowait((Notice.LAUNCHER_GONE, None))
    time.sleep(_GRACE_S)
    logger.error("sparksched: the engine hasn't ended by itself, and is killed")
    os.kill(os.getpid(), signal.SIGKILL)


def fail(engine: "EngineCoreProc") -> NoReturn:
    """Fail the engine's loop: API servers that are still there fail their requests and end."""
    engine.enable_fault_tolerance = False
    raise RuntimeError("sparksched: the process that has started this engine is gone")
