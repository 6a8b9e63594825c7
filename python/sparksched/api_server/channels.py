"""Connects a client to the engines that it can reach through rings; says why others stay on ZMQ."""

from typing import TYPE_CHECKING

from vllm.logger import init_logger

from sparksched import _core, environment
from sparksched.api_server import metrics, shown_engines
from sparksched.api_server.async_channel import AsyncChannel
from sparksched.api_server.channel import Channel
from sparksched.api_server.metrics import ShownEngine
from sparksched.api_server.sync_channel import SyncChannel
from sparksched.shared.offer import Offer, host_identity

if TYPE_CHECKING:
    from vllm.v1.engine.core_client import MPClient

logger = init_logger("vllm.sparksched.transport")


def connect_all(client: "MPClient") -> "Channels":
    """Connect to the engines that offer rings; say which ones stay on ZMQ, and why."""
    # Only the asyncio client has more than one engine, or is one of several.
    is_async = hasattr(client, "_ensure_output_queue_task")
    make_channel = AsyncChannel if is_async else SyncChannel
    client_index = getattr(client, "client_index", 0)
    found = Channels({})
    try:
        for engine, offer in client.sparksched_offers.items():
            rank = int.from_bytes(engine, "little")
            rings = _connect_or_explain(rank, offer, client_index)
            if rings is not None:
                found.channels[engine] = make_channel(client, rank, rings)
    except BaseException:
        found.close()
        raise
    return found


def _connect_or_explain(
    rank: int, offer: Offer | None, client_index: int
) -> "_core.ClientRings | None":
    try:
        rings = _connect(offer, client_index)
    except ConnectionError as error:
        if environment.transport() == "shm":
            raise RuntimeError(
                f"{environment.TRANSPORT}=shm, but engine {rank} can't be reached through "
                f"shared memory: {error}"
            ) from error
        logger.info("sparksched: messages to engine %d go over ZMQ: %s", rank, error)
        return None
    logger.info(
        "sparksched: messages to engine %d go through shared memory (2 rings of %d MiB)",
        rank,
        rings.ring_bytes >> 20,
    )
    return rings


def _connect(offer: Offer | None, client_index: int) -> "_core.ClientRings":
    if offer is None:
        raise ConnectionError("it runs without sparksched")
    if offer.name is None:
        raise ConnectionError(offer.reason)
    if (chosen := environment.transport()) in ("zmq", "libzmq"):
        raise ConnectionError(f"{environment.TRANSPORT}={chosen}")
    if offer.host != host_identity():
        raise ConnectionError("it runs on another host")
    return _core.ClientRings(
        offer.name,
        client_index=client_index,
        stuck_after_s=environment.stuck_after_s(),
    )


class Channels:
    """A client's rings to all its engines."""

    def __init__(self, channels: "dict[bytes, Channel]") -> None:
        self.channels = channels
        """By the identity that vLLM's sockets know the engine by."""
        self.is_draining = False
        """Whether the client waits for its last answers: then engines may say goodbye."""
        self._shown: list[ShownEngine] = []

    def show_metrics_of(self, client: "MPClient") -> None:
        """Show the client's engines in vLLM's metrics, as long as this is open.

        An error is logged: a server that can't be watched is better than none.
        """
        ranks = {channel.rank for channel in self.channels.values()}
        try:
            self._shown = shown_engines.show_engines(client, ranks)
        except Exception:
            logger.exception("sparksched: there will be no metrics of engines")

    def start_reading(self, client: "MPClient") -> None:
        """Start to receive, if that is possible already: asyncio needs a running loop."""
        for channel in self.channels.values():
            channel.start_reading(client)

    def stuck_engine(self) -> tuple[int, float] | None:
        """Return an engine whose process doesn't run, and for how many seconds; or None."""
        for channel in self.channels.values():
            seconds = channel.rings.stuck_for_s
            if seconds is not None:
                return channel.rank, seconds
        return None

    def close(self) -> None:
        """Say goodbye to all engines. Any thread may call this."""
        while self._shown:
            metrics.hide(self._shown.pop())
        for channel in self.channels.values():
            try:
                channel.close()
            except Exception:
                logger.exception("sparksched: the rings to engine %d weren't closed", channel.rank)
        # They refer to the client's resources, which refer to this: vLLM's sockets and threads
        # would wait for another collection of garbage. Others may be looking at the old ones.
        self.channels = {}
