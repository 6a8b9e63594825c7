"""Sends the engine's outputs to its clients.

Read `OutputQueue` beside vLLM's `process_output_sockets`, in `vllm/v1/engine/core.py`.
"""

import queue
import threading
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.serial_utils import MsgpackEncoder

from sparksched import _core
from sparksched.engine.context import context_of
from sparksched.engine.encoder import request_ids_in
from sparksched.engine.notices import Notice
from sparksched.shared.offer import ENGINE_DEAD, OUTPUTS

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCoreProc

logger = init_logger("vllm.sparksched.transport")

_DROPPED_AT_A_TIME = 1 << 20
"""Bytes of messages to a client, on their way from its backlog to nowhere."""


class OutputQueue:
    """Stands in for the engine's output queue.

    Messages to clients that have a ring, or a socket of ours, are sent at once; the others go on to
    vLLM's own queue.
    """

    def __init__(self, engine: "EngineCoreProc", links: "_core.EngineLinks") -> None:
        self._engine = engine
        self._engine_index = engine.engine_index
        self._links = links
        self._attached: set[int] = set()
        self._zmq_queue: queue.Queue[Any] = engine.output_queue
        # vLLM's output thread takes from here; it may ask this object or the queue itself.
        self.get = self._zmq_queue.get
        # Encoders aren't thread-safe, and utility calls are answered by several threads.
        self._encoders = threading.local()
        self._clients = [_ClientState() for _ in engine.addresses.outputs]

    def encode_in_rust_for(self, client: int) -> None:
        """Have the scheduler write this client's outputs itself, if it can.

        Only the engine's loop may call this, for the scheduler belongs to it.
        """
        scheduler = context_of(self._engine).scheduler
        if scheduler is not None:
            scheduler.encode_outputs_for(client)

    def put_nowait(self, item: Any) -> None:
        """Send vLLM's `(client_index, EngineCoreOutputs)`, or the note that the engine is dead.

        A scheduler that writes a client's outputs itself has `StepOutputs` instead.
        """
        if isinstance(item, bytes):
            self._send_dead(item)
            return
        try:
            self._put(item)
        except Exception as error:
            # Not only the engine's loop puts: of an error in the callback of a future, say, nobody
            # else would learn.
            self._engine.input_queue.put_nowait((Notice.FAILED, error))
            raise

    def _put(self, item: tuple[int, Any]) -> None:
        client, outputs = item
        if isinstance(outputs, _core.StepOutputs):
            outputs.engine_index = self._engine_index
            if not self._links.send_outputs(client, OUTPUTS, outputs):
                self._lose(client, outputs.frames())
            return
        if client not in self._attached:
            if client < 0 or not self._links.is_attached(client):
                self._zmq_queue.put_nowait(item)
                return
            self._attached.add(client)
        outputs.engine_index = self._engine_index
        frames = self._encode(outputs)
        if not self._links.send(client, OUTPUTS, frames, regardless=_must_arrive(outputs)):
            self._lose(client, frames)

    def _encode(self, outputs: EngineCoreOutputs) -> Any:
        encoder: MsgpackEncoder | None = getattr(self._encoders, "value", None)
        if encoder is None:
            encoder = self._encoders.value = MsgpackEncoder()
        try:
            return encoder.encode(outputs)
        except Exception as error:
            call = outputs.utility_output
            if call is None:
                raise
            logger.exception("sparksched: the result of a utility call can't be sent")
            call.result = None
            call.failure_message = f"its result can't be sent: {error}"
            return encoder.encode(outputs)

    def _send_dead(self, note: bytes) -> None:
        try:
            for client in range(len(self._clients)):
                if self._links.is_attached(client):
                    self._links.send(client, ENGINE_DEAD, [note], regardless=True)
        except Exception:
            # These clients see the process end; others have to be told.
            logger.exception("sparksched: the end of the engine can't be sent")
        self._zmq_queue.put_nowait(note)

    def _lose(self, client: int, frames: Any) -> None:
        """Drop a message that a client doesn't take; the engine's loop will fail its requests.

        Its link accepts nothing more for this client until `unblock`, which may have come between
        the refusal and the lock: then there is nothing to lose.
        """
        state = self._clients[client]
        with state.lock:
            if state.lost is None:
                if self._links.send(client, OUTPUTS, frames):
                    return
                logger.warning(
                    "sparksched: API server %d takes no messages, or too slowly: %d MiB wait for "
                    "it; its requests fail, those of others go on",
                    client,
                    self._links.backlog_bytes(client) >> 20,
                )
                state.lost = set()
                self._engine.input_queue.put_nowait((Notice.CLIENT_BLOCKED, client))
            state.lost |= request_ids_in(frames)

    def drop_backlog(self, client: int, request_ids: list[str]) -> None:
        """Start to drop what waits for a client whose requests have ended: see `unblock`.

        In a thread of its own, because a gigabyte takes seconds.
        """
        state = self._clients[client]
        with state.lock:
            assert state.lost is not None
            state.lost.update(request_ids)
        thread = threading.Thread(
            target=self._run_drop, args=(client, state), name="RingDropThread", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # the process may have no more: seconds without a step are no end
            self._run_drop(client, state)

    def _run_drop(self, client: int, state: "_ClientState") -> None:
        try:
            # The last first: if the client reads again meanwhile, it gets what came before, and no
            # stream has a gap. What must arrive was sent regardless of the room, and stays.
            while messages := self._links.take_back_newest(client, max_bytes=_DROPPED_AT_A_TIME):
                lost = set().union(*(request_ids_in(message.frames) for message in messages))
                with state.lock:
                    assert state.lost is not None
                    state.lost |= lost
        except Exception as error:
            logger.exception("sparksched: the backlog of API server %d wasn't dropped", client)
            self._engine.input_queue.put_nowait((Notice.FAILED, error))
        else:
            self._engine.input_queue.put_nowait((Notice.BACKLOG_DROPPED, client))

    def unblock(self, client: int, request_ids: list[str]) -> None:
        """Tell a client, whenever it comes back, that its requests have failed."""
        state = self._clients[client]
        with state.lock:
            # Some have come since the others ended.
            failed = (state.lost or set()).union(request_ids)
            state.lost = None
            outputs = EngineCoreOutputs(
                engine_index=self._engine_index,
                finished_requests=failed,
                outputs=[
                    EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR)
                    for request_id in failed
                ],
            )
            self._links.send(client, OUTPUTS, self._encode(outputs), regardless=True)
            self._links.unblock(client)


class _ClientState:
    """What the output side knows of a client that has a link."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lost: set[str] | None = None
        """Requests whose messages were dropped and that are about to be failed; None if all is
        well."""


def _must_arrive(outputs: EngineCoreOutputs) -> bool:
    """Whether somebody waits for exactly this message."""
    return outputs.utility_output is not None or outputs.wave_complete is not None
