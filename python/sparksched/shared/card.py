"""How an engine's metrics are found without asking a front end: a card in each engine's process.

A sealed memfd that the engine holds says what the engine is and where its page of metrics is. It
has no name in the file system, ends with the process, and can be opened by its user alone, through
`/proc`. So engines are found whatever front end they have, and whether it answers or not.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, Literal

import msgspec

from sparksched.shared.offer import EngineReport, pid_namespace

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCoreProc

NAME: Final = "sparksched-engine"
_LINK: Final = f"/memfd:{NAME} (deleted)"
_MAX_BYTES: Final = 1 << 16
_PROC: Final = Path("/proc")


class EngineCard(msgspec.Struct):
    """What an engine says of itself to whoever runs as the same user on the same machine."""

    pid: int
    pid_namespace: str
    """Where `pid` means something."""
    model_name: str
    engine: str
    """Its rank."""
    transport: Literal["shm", "zmq"]
    """What it offers."""
    report: EngineReport


def publish(
    engine: "EngineCoreProc", transport: Literal["shm", "zmq"], report: EngineReport
) -> BinaryIO:
    """Make the card of an engine, which is there as long as what this returns is open.

    Raises:
        OSError: if the system has no descriptor or memory for it, or Python no function.

    """
    card = EngineCard(
        pid=os.getpid(),
        pid_namespace=pid_namespace(),
        model_name=str(engine.vllm_config.model_config.served_model_name),
        engine=str(engine.engine_index),
        transport=transport,
        report=report,
    )
    if not hasattr(os, "memfd_create"):
        raise OSError("this Python was compiled without os.memfd_create")
    fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    file = os.fdopen(fd, "wb", buffering=0)
    file.write(msgspec.msgpack.encode(card))
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return file


def find() -> list[EngineCard]:
    """Return the cards of all engines of this user that can be seen here, by process id."""
    cards = {card.pid: card for card in _cards()}
    return [cards[pid] for pid in sorted(cards)]


def _cards() -> Iterator[EngineCard]:
    for process in _PROC.glob("[0-9]*"):
        # It may end at any moment, and another user's can't be looked into.
        with suppress(OSError):
            if process.stat().st_uid != os.geteuid():
                continue
            for descriptor in (process / "fd").iterdir():
                card = _read(descriptor)
                # A child that was forked has its parent's.
                if card is not None and str(card.pid) == process.name:
                    yield card


def _read(descriptor: Path) -> EngineCard | None:
    try:
        if os.readlink(descriptor) != _LINK:
            return None
        with descriptor.open("rb") as file:
            card = msgspec.msgpack.decode(file.read(_MAX_BYTES), type=EngineCard)
    except (OSError, msgspec.MsgspecError):  # another version's may look otherwise
        return None
    return card if card.pid_namespace == pid_namespace() else None
