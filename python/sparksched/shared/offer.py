"""What an engine and its clients tell each other before there are rings, and if there are none."""

import dataclasses
import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import msgspec
import vllm.envs
from vllm.v1.engine import EngineCoreReadyResponse, EngineCoreRequestType
from vllm.version import __version__ as vllm_version

from sparksched import __version__, _core, environment

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

os.register_at_fork(after_in_child=_core.note_fork)

MAX_BACKLOG_BYTES: Final = 64 << 20
"""What may wait behind a full ring, apart from one message that may be larger."""

MAX_SLOW_BACKLOG_BYTES: Final = 1 << 30
"""The same for an API server that reads, only too slowly: that is no reason to fail requests.

A fast engine can be minutes ahead of a busy API server. vLLM's sockets keep any number of messages.
"""

OUTPUTS: Final = 0
"""Kind of a message to a client: vLLM's `EngineCoreOutputs`."""

ENGINE_DEAD: Final = 1
"""Kind of the engine's last message to a client after a fatal error."""

REQUEST_TYPES: Final = {
    request_type.value[0]: request_type
    for request_type in (
        EngineCoreRequestType.ADD,
        EngineCoreRequestType.ABORT,
        EngineCoreRequestType.UTILITY,
    )
}
"""Kinds of messages to an engine: the byte that vLLM sends as a frame of its own."""


RUST_FRONT_END: Final = "vLLM's Rust front end speaks ZMQ only"


def why_no_rings(parallel_config: "ParallelConfig") -> str | None:
    """Return why an engine of this configuration offers no rings, or None."""
    if (chosen := environment.transport()) in ("zmq", "libzmq"):
        return f"{environment.TRANSPORT}={chosen}"
    if vllm.envs.VLLM_USE_RUST_FRONTEND:
        return RUST_FRONT_END
    if parallel_config.enable_elastic_ep:
        return "elastic expert parallelism changes the set of engines"
    return None


class MetersOffer(msgspec.Struct):
    """Where the page is on which an engine counts: see `sparksched.engine.meters`."""

    pid: int
    fd: int
    """The engine's descriptor of it."""
    id: bytes
    """16 bytes that the page begins with, and no other."""
    pid_namespace: str
    """Where `pid` means something: compare with `pid_namespace()`."""


class EngineReport(msgspec.Struct):
    """What an engine says of itself."""

    scheduler: Literal["sparksched", "vllm"]
    fallback_feature: str = ""
    """What made it use vLLM's scheduler, if it does and something did."""
    fallback_reason: str = ""
    version: str = __version__
    """The engine's sparksched: another one may have other things elsewhere on a page of meters."""
    vllm_version: str = vllm_version
    meters: MetersOffer | None = None


class Offer(msgspec.Struct):
    """An engine's rings, or the reason why it has none."""

    name: str | None = None
    """The name under which the engine waits for clients, in the host's abstract namespace."""
    host: str = ""
    """Where that name means something: compare with `host_identity()`."""
    reason: str | None = None
    """Why there are no rings. Exactly one of `name` and `reason` is given."""
    engine: EngineReport = msgspec.field(default_factory=lambda: EngineReport("vllm"))


@dataclasses.dataclass
class ReadyResponse(EngineCoreReadyResponse):  # type: ignore[misc]
    """vLLM's ready response with an offer. Clients without sparksched ignore the field."""

    sparksched_offer: Offer | None = None


class _OfferAndRank(msgspec.Struct):
    data_parallel_rank: int
    sparksched_offer: Offer | None = None


def with_offer(response: EngineCoreReadyResponse, offer: Offer) -> ReadyResponse:
    """Return the same response with an offer in it."""
    fields = {field.name: getattr(response, field.name) for field in dataclasses.fields(response)}
    return ReadyResponse(**fields, sparksched_offer=offer)


def read_offer(payload: bytes) -> tuple[int, Offer | None]:
    """Return the rank of the engine that sent a ready response, and its offer if it made one."""
    decoded = msgspec.msgpack.decode(payload, type=_OfferAndRank)
    return decoded.data_parallel_rank, decoded.sparksched_offer


def make_rings(name: str, num_clients: int) -> "_core.EngineRings":
    """Make an engine's end of its rings, as the environment says.

    Raises:
        ConnectionError: if the system has no memory, sockets or threads for it.

    """
    return _core.EngineRings(
        name,
        num_clients=num_clients,
        ring_bytes=environment.ring_bytes(),
        max_idle_backlog_bytes=MAX_BACKLOG_BYTES,
        max_backlog_bytes=MAX_SLOW_BACKLOG_BYTES,
        stuck_after_s=environment.stuck_after_s(),
    )


@functools.cache
def host_identity() -> str:
    """Name the host and its network namespace: abstract names are known within these."""
    return _namespace("net")


@functools.cache
def pid_namespace() -> str:
    """Name the host and the namespace in which process ids of this family mean something."""
    return _namespace("pid")


def _namespace(kind: str) -> str:
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        # Without /proc nothing is known to be local.
        return f"process {os.getpid()}"
    return f"{boot_id} {namespace}"
