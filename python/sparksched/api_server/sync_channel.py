"""Rings of a client without an event loop: a thread receives.

`SyncChannel._run` does what `process_outputs_socket` of vLLM's `SyncMPClient` does
(`vllm/v1/engine/core_client.py`). vLLM's own goes on beside it, for engines on ZMQ.
"""

import threading
from typing import TYPE_CHECKING, Any

from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.exceptions import EngineDeadError

from sparksched import _core
from sparksched.api_server.channel import MAX_MESSAGES, Channel

if TYPE_CHECKING:
    from vllm.v1.engine.core_client import MPClient, SyncMPClient


class SyncChannel(Channel):
    """Rings of a client without an event loop: a thread receives, as in vLLM."""

    def __init__(self, client: "SyncMPClient", rank: int, rings: "_core.ClientRings") -> None:
        super().__init__(client, rank, rings)
        self._room = threading.Condition()
        self._thread: threading.Thread | None = None

    def start_reading(self, client: "MPClient") -> None:
        """Start to receive, in a thread."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="EngineCoreRingThread", daemon=True
            )
            self._thread.start()

    def _run(self) -> None:
        while not self._has_ended:
            self._receive(MAX_MESSAGES)
            with self._room:
                self._room.notify_all()
            if not self._has_ended:
                self._wait()
        with self._room:
            self._room.notify_all()
        if not self._has_failed:
            # Somebody may wait for outputs that will never come.
            self._fail(EngineDeadError())
        self._fail_calls()

    def _wait(self) -> None:
        try:
            self.rings.wait()
        except Exception as error:
            self._give_up(error)

    def _deliver(self, outputs: EngineCoreOutputs) -> None:
        from vllm.v1.engine.core_client import _process_utility_output

        if outputs.utility_output is not None:
            _process_utility_output(outputs.utility_output, self._utility_results)
        else:
            self._outputs_queue.put_nowait(outputs)

    def close(self) -> None:
        """Say goodbye to the engine."""
        self._has_ended = True
        self.rings.close()
        with self._room:
            self._room.notify_all()

    def send(self, kind: int, frames: Any) -> None:
        """Send, and wait until all of it is in the ring.

        Raises:
            EngineDeadError: if the engine is gone, or goes meanwhile.

        """
        # Each thread waits for its own message, so no more than one a thread can pile up.
        try:
            ticket = self.rings.send(kind, frames)
        except ConnectionError as error:
            raise EngineDeadError from error
        with self._room:
            while not self._has_ended and self.rings.sent_before() <= ticket:
                self._room.wait()
        if self._has_ended:
            raise EngineDeadError
