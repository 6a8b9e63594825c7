"""Which servers of this user run on this machine, and where they listen."""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import psutil

from sparksched.commands.top.page import Page, PageError, fetch, parse
from sparksched.shared.card import EngineCard, find

_INIT: Final = 1


@dataclass(frozen=True)
class Server:
    """Engines of one model that one process has started."""

    pid: int
    """Of that process, as far as it is known; else of the engine."""
    engines: tuple[EngineCard, ...]
    url: str | None
    """Where its front end shows its metrics; None if that wasn't found."""

    @property
    def name(self) -> str:
        """What a user may call it."""
        return self.url or f"process {self.pid}"


def find_servers(cards: Sequence[EngineCard]) -> list[Server]:
    """Return the servers of these engines, by process id and model."""
    found: dict[tuple[int, str], list[EngineCard]] = {}
    for card in cards:
        found.setdefault((_parent(card.pid) or card.pid, card.model_name), []).append(card)
    return [Server(pid, tuple(its), _url(pid, its)) for (pid, _), its in sorted(found.items())]


def servers_here(pid: int | None) -> list[Server]:
    """Return this user's servers on this machine, or those that a process belongs to.

    Raises:
        PageError: if it belongs to none.

    """
    servers = find_servers(find())
    if pid is None:
        return servers
    its = [it for it in servers if pid in (it.pid, *(card.pid for card in it.engines))]
    if its:
        return its
    found = ", ".join(str(card.pid) for server in servers for card in server.engines)
    raise PageError(f"process {pid} is no engine with sparksched; there are: {found or 'none'}")


def page_of(server: Server) -> Page:
    """Return the page of a server, with what it lacks of its engines.

    vLLM's Rust front end knows nothing of ours, and another server may have no page at all.

    Raises:
        PageError: if its front end doesn't answer, or its engines are gone.

    """
    if server.url is None:
        return local_page(server.engines)
    page = fetch(server.url)
    if not page.labels("sparksched:info"):
        local = local_page(server.engines)
        page.samples |= {
            name: its for name, its in local.samples.items() if name.startswith("sparksched:")
        }
    return page


def local_page(engines: Sequence[EngineCard]) -> Page:
    """Return what `sparksched metrics` shows of some engines.

    Raises:
        PageError: if they are gone.

    """
    from sparksched.commands import local_engines  # imports vLLM

    text = local_engines.page(lambda: [card for card in find() if card in engines])
    if not text:
        raise PageError("its engine is gone")
    return parse(text, time.monotonic())


def _url(pid: int, engines: Sequence[EngineCard]) -> str | None:
    """Return where a front end answers: the engines' parent, or another process that it started."""
    pids = ({pid} | _children(pid)) - {card.pid for card in engines}
    for port in sorted(_listening_ports(pids)):
        url = f"http://localhost:{port}"
        with suppress(PageError):
            labels = fetch(url).labels("vllm:num_requests_running")
            if engines[0].model_name in {its.get("model_name") for its in labels}:
                return url
    return None


def _parent(pid: int) -> int | None:
    """Return a process's parent; None if it is gone, or none that could have started a server."""
    with suppress(psutil.Error):
        parent = psutil.Process(pid).ppid()
        return parent if parent > _INIT else None
    return None


def _children(pid: int) -> set[int]:
    with suppress(psutil.Error):
        return {child.pid for child in psutil.Process(pid).children()}
    return set()


def _listening_ports(pids: set[int]) -> set[int]:
    """Return the TCP ports on which one of these processes listens."""
    ports = set()
    for pid in pids:
        with suppress(psutil.Error):
            for socket in psutil.Process(pid).net_connections("tcp"):
                if socket.status == psutil.CONN_LISTEN:
                    ports.add(socket.laddr.port)
    return ports
