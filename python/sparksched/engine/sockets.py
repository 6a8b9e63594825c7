"""Sends outputs to clients on this host that stay on ZMQ, from the engine's loop itself.

vLLM hands each output from the loop to a thread, which needs the interpreter's lock. That thread
hands it to one of libzmq's, which keeps any number of them. Requests still come through vLLM's own
sockets.
"""

import threading
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from sparksched import _core, environment
from sparksched.engine.links import ClientLinks
from sparksched.engine.notices import Notice
from sparksched.shared.offer import MAX_BACKLOG_BYTES, MAX_SLOW_BACKLOG_BYTES

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCoreProc

logger = init_logger("vllm.sparksched.transport")


def sockets_to_clients(engine: "EngineCoreProc") -> "_core.EngineSockets | None":
    """Return sockets to the clients of an engine without rings, or None if vLLM's have to do."""
    if environment.transport() == "libzmq":
        return None
    if engine.vllm_config.parallel_config.enable_elastic_ep:
        return None
    addresses = list(engine.addresses.outputs)
    try:
        sockets = _core.EngineSockets(
            addresses,
            max_idle_backlog_bytes=MAX_BACKLOG_BYTES,
            max_backlog_bytes=MAX_SLOW_BACKLOG_BYTES,
            stuck_after_s=environment.stuck_after_s(),
        )
    except ConnectionError as error:
        logger.warning("sparksched: outputs go through vLLM's own sockets: %s", error)
        return None
    # All are on one host, or none is: vLLM gives them addresses of one kind.
    return sockets if all(map(sockets.is_attached, range(len(addresses)))) else None


class SocketLinks(ClientLinks):
    """Sockets of ours for outputs; vLLM's for requests."""

    def __init__(self, engine: "EngineCoreProc", sockets: "_core.EngineSockets") -> None:
        """Take over the outputs of an engine whose loop hasn't begun."""
        super().__init__(engine, sockets)
        self._sockets = sockets
        for client in range(len(engine.addresses.outputs)):
            self._output.encode_in_rust_for(client)

    def start(self) -> None:
        """Start to connect, and to look after the clients."""
        threading.Thread(target=self._run, name="SocketThread", daemon=True).start()

    def _run(self) -> None:
        try:
            while events := self._sockets.wait():
                for client, reason in events:
                    self._note(client, reason)
        except Exception as error:
            logger.exception("sparksched: the thread of the sockets failed")
            self._engine.input_queue.put_nowait((Notice.FAILED, error))

    def _note(self, client: int, reason: str | None) -> None:
        if reason is None:
            logger.info("sparksched: outputs go straight to API server %d", client)
            return
        logger.info("sparksched: API server %d is gone: %s", client, reason)
        self._engine.input_queue.put_nowait((Notice.CLIENT_GONE, client))
