"""The file that shows a difference again: a recording of the engine since it was started.

It is begun with the engine and is without tokens. It has no name until there is a difference, so
that nothing stays behind otherwise, however the engine ends. The engine's loop never waits for it.
"""

import functools
import os
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheConfig

from sparksched import environment
from sparksched.trace.record.attach import recorded_methods
from sparksched.trace.record.copy_calls import Recorder
from sparksched.trace.settings import UnrecordableError

logger = init_logger("vllm.sparksched")

NO_RECORDING: Final = "there is no recording of it"

Method = TypeVar("Method", bound=Callable[..., Any])


class Reproducer:
    """Records our scheduler, as long as that can be done and there is room.

    With `SPARKSCHED_RECORD` there is a recording already, and one is enough.
    """

    def __init__(
        self,
        scheduler: Any,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        block_size: int,
        hash_block_size: int,
    ) -> None:
        self._recording: Any = None
        self._recorder: Recorder | None = None
        if environment.recording() is not None:
            return
        name = f"sparksched-verify-{os.getpid()}-{secrets.token_hex(4)}.trace"
        self._path = Path(tempfile.gettempdir()) / name
        try:
            self._recorder = Recorder(
                self._path,
                vllm_config,
                kv_cache_config,
                block_size,
                hash_block_size,
                is_named=False,
            )
        except (UnrecordableError, OSError) as error:
            logger.warning("sparksched: a difference would have no reproducer: %s", error)
            return
        self._recording = recorded_methods(self._recorder, scheduler)

    def recorded(self, name: str, method: Method) -> Method:
        """Return a method of our scheduler, or of what it asks, whose calls are recorded."""
        if self._recording is None:
            return method
        return functools.partial(getattr(self._recording, name), method)  # type: ignore[return-value]

    def keep(self, difference: str) -> str:
        """End the recording with what differs; return in words where it will be.

        The log says when it is there.
        """
        if self._recording is None or self._recorder is None:
            return self._elsewhere()
        self._recorder.difference(difference)
        self._let_go()
        if not self._recorder.keep("the schedulers differ", self._tell):
            return self._elsewhere()
        return f"its recording will be at {self._path}"

    def _tell(self, problem: str | None) -> None:
        if problem is None:
            logger.info(
                "sparksched: the difference is recorded; to see it again: sparksched replay %s",
                self._path,
            )
        else:
            logger.warning("sparksched: the recording of the difference is lost: %s", problem)

    @staticmethod
    def _elsewhere() -> str:
        if environment.recording() is None:
            return NO_RECORDING
        return f"to see it again: replay what {environment.RECORD} has recorded"

    def close(self) -> None:
        """Wait a little for what is kept; if nothing is, the recording is gone."""
        if self._recording is not None:
            self._let_go()
        if self._recorder is not None:
            self._recorder.close()

    def discard(self) -> None:
        """End the recording without a wait: nobody looks for differences any more."""
        if self._recording is not None and self._recorder is not None:
            self._let_go()
            self._recorder.give_up("nothing is verified any more")

    def _let_go(self) -> None:
        recording, self._recording = self._recording, None
        recording.gates.remove()
