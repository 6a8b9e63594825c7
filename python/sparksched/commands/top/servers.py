"""Which servers of this user run on this machine, and where they listen."""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sparksched.commands.top.page import PageError, fetch

if TYPE_CHECKING:
    from sparksched.shared.card import EngineCard

_PROC: Final = Path("/proc")
_LISTENS: Final = "0A"
"""State of a socket in `/proc/net/tcp`."""
_INIT: Final = 1


@dataclass(frozen=True)
class Server:
    """Engines that one process has started."""

    pid: int
    """Of that process, as far as it is known; else of the engine."""
    engines: "tuple[EngineCard, ...]"
    url: str | None
    """Where its front end shows its metrics; None if that wasn't found."""

    @property
    def name(self) -> str:
        """What a user may call it."""
        return self.url or f"process {self.pid}"


def find_servers(cards: "Sequence[EngineCard]") -> list[Server]:
    """Return the servers of these engines, by process id."""
    by_pid: dict[int, list[EngineCard]] = {}
    for card in cards:
        by_pid.setdefault(_parent(card.pid) or card.pid, []).append(card)
    return [Server(pid, tuple(its), _url(pid, its)) for pid, its in sorted(by_pid.items())]


def _url(pid: int, engines: "Sequence[EngineCard]") -> str | None:
    """Return where a front end answers: the engines' parent, or another process that it started."""
    pids = {pid, *_children(pid)} - {card.pid for card in engines}
    models = {card.model_name for card in engines}
    for port in sorted(_listening_ports(pids)):
        url = f"http://localhost:{port}"
        with suppress(PageError):
            labels = fetch(url).labels("vllm:num_requests_running")
            if models & {its.get("model_name") for its in labels}:
                return url
    return None


def _parent(pid: int) -> int | None:
    """Return a process's parent; None if it is gone, or none that could have started a server."""
    with suppress(OSError, ValueError, IndexError):
        # A process's name, in parentheses, may have anything in it.
        parent = int((_PROC / f"{pid}/stat").read_text().rpartition(")")[2].split()[1])
        return parent if parent > _INIT else None
    return None


def _children(pid: int) -> Iterator[int]:
    for process in _PROC.glob("[0-9]*"):
        if _parent(int(process.name)) == pid:
            yield int(process.name)


def _listening_ports(pids: set[int]) -> set[int]:
    """Return the TCP ports on which one of these processes listens."""
    inodes = set()
    for pid in pids:
        with suppress(OSError):
            for descriptor in (_PROC / f"{pid}/fd").iterdir():
                with suppress(OSError):
                    inodes.add(os.readlink(descriptor))
    ports = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (_PROC / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and f"socket:[{fields[9]}]" in inodes:
                    ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports
