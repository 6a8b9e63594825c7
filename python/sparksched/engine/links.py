"""An engine's links to all its clients, and what the loop does when one comes, lags or goes."""

import threading
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from sparksched import _core
from sparksched.engine.input import RingInput
from sparksched.engine.notices import Notice
from sparksched.engine.output_queue import OutputQueue

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCoreProc

logger = init_logger("vllm.sparksched.transport")

_LINGER_S = 4.0
"""How long an engine that stops waits for clients to take their last messages, as over ZMQ."""


class ClientLinks:
    """An engine's links to all its clients."""

    def __init__(self, engine: "EngineCoreProc", links: "_core.EngineLinks") -> None:
        self._engine = engine
        self._links = links
        self._output = OutputQueue(engine, links)
        engine.output_queue = self._output

    def close(self) -> None:
        """Say goodbye to all clients, once they have taken their last messages."""
        self._links.close(linger_s=_LINGER_S)

    def handle_notice(self, notice: Notice, value: Any) -> None:
        """Do in the engine's loop what only it may do: the scheduler belongs to its thread."""
        if notice is Notice.FAILED:
            # Recovery would wait for a command that only the thread that failed could receive.
            self._engine.enable_fault_tolerance = False
            raise RuntimeError("sparksched's transport failed") from value
        if notice is Notice.CLIENT_ATTACHED:
            self._output.encode_in_rust_for(value)
        elif notice is Notice.CLIENT_GONE:
            self._forget_client(value)
        elif notice is Notice.CLIENT_BLOCKED:
            self._output.drop_backlog(value, self._abort_requests_of(value))
        elif notice is Notice.BACKLOG_DROPPED:
            self._output.unblock(value, self._abort_requests_of(value))

    def _abort_requests_of(self, client: int) -> list[str]:
        requests = self._engine.scheduler.requests
        request_ids = [name for name, it in requests.items() if it.client_index == client]
        if request_ids:
            self._engine.abort_requests(request_ids)
        return request_ids

    def _forget_client(self, client: int) -> None:
        request_ids = self._abort_requests_of(client)
        if request_ids:
            logger.info(
                "sparksched: aborted %d requests of API server %d", len(request_ids), client
            )
        if self._links.is_deserted and self._engine.is_running():
            self._go_without_clients()

    def _go_without_clients(self) -> None:
        from vllm.v1.engine.core import EngineShutdownState

        if others_step_with(self._engine):
            logger.warning(
                "sparksched: the last API server is gone; the engine goes on for those of others, "
                "which step together with it, and has to be ended by hand"
            )
            return
        logger.info("sparksched: the last API server is gone; the engine stops")
        self._engine.shutdown_state = EngineShutdownState.REQUESTED


class RingLinks(ClientLinks):
    """Rings in both directions."""

    def __init__(self, engine: "EngineCoreProc", rings: "_core.EngineRings") -> None:
        super().__init__(engine, rings)
        self._input = RingInput(engine, rings)
        # What was put there so far, such as the failure of an executor, is not lost.
        while not engine.input_queue.empty():
            self._input.queue.put_nowait(engine.input_queue.get_nowait())
        engine.input_queue = self._input.queue

    def start(self) -> None:
        """Start to receive."""
        threading.Thread(target=self._input.run, name="RingInputThread", daemon=True).start()


def others_step_with(engine: "EngineCoreProc") -> bool:
    """Whether engines of other API servers wait for this one in their steps.

    Those of a mixture of experts do. With internal load balancing all have their API servers in
    common, and lose the last one together.
    """
    from vllm.v1.engine.core import DPEngineCoreProc

    return (
        isinstance(engine, DPEngineCoreProc)
        and engine.has_coordinator
        and engine.vllm_config.parallel_config.local_engines_only
    )
