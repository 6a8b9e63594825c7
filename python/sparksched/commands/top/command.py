"""The command: it looks again and again, and says so when the server is away."""

import argparse
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from sparksched.commands import number
from sparksched.commands.top.page import Change, Page, PageError, address, fetch
from sparksched.commands.top.screen import WIDTH, render, render_servers

if TYPE_CHECKING:
    from sparksched.commands.top.servers import Server
    from sparksched.shared.card import EngineCard

DEFAULT_URL: Final = "http://localhost:8000"

DESCRIPTION = """\
Shows what a vLLM server does, from its /metrics page: requests, tokens and latencies, and with
sparksched what its steps and its rings take. The exit status is 1 if no vLLM server is there."""


def add_to(commands: Any) -> None:
    """Add the command to a parser's."""
    parser = commands.add_parser(
        "top", help="show what a running server does", description=DESCRIPTION
    )
    parser.add_argument(
        "url",
        nargs="?",
        type=_url,
        help=f"if not given: this user's servers on this machine, or else {DEFAULT_URL}",
    )
    parser.add_argument("--pid", type=int, help="of several servers, that of this process")
    parser.add_argument(
        "--interval",
        type=number(float, 0.1, 3600),
        default=2.0,
        metavar="SECONDS",
        help="2 if not given",
    )
    parser.add_argument("--once", action="store_true", help="one interval, and no more")
    parser.set_defaults(run=run)


def _url(value: str) -> str:
    try:
        return address(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(parsed: argparse.Namespace) -> int:
    """Look and show, until the user has seen enough; return the exit status."""
    try:
        pictures = _pictures(parsed)
    except PageError as error:
        print(f"sparksched top: {error}", file=sys.stderr)
        return 1
    with suppress(KeyboardInterrupt), _screen(parsed) as show:
        for picture, notice in pictures:
            show(picture)
            if parsed.once:
                return int(bool(notice))
    return 0


def _pictures(parsed: argparse.Namespace) -> Iterator[tuple[RenderableType, str]]:
    """Find what to look at, and have a first look; return what is to be shown, with notices.

    Raises:
        PageError: if that is not there.

    """
    if parsed.url is not None:
        return _of_server(parsed.url, functools.partial(fetch, parsed.url), parsed.interval)
    from sparksched.commands.top.servers import page_of, servers_here

    servers = servers_here(parsed.pid)
    if len(servers) > 1:
        return _of_servers(servers, parsed.interval)
    if servers:
        (server,) = servers
        return _of_server(server.name, functools.partial(page_of, server), parsed.interval)
    try:
        return _of_server(DEFAULT_URL, functools.partial(fetch, DEFAULT_URL), parsed.interval)
    except PageError as error:
        nobody = "no engine with sparksched was found among this user's processes either"
        raise PageError(f"{error}; {nobody}") from None


def _of_server(
    name: str, fetch_page: Callable[[], Page], interval_s: float
) -> Iterator[tuple[RenderableType, str]]:
    try:
        first = fetch_page()
    except PageError as error:
        raise PageError(f"{name}: {error}") from error
    looks = watch(fetch_page, interval_s, first)
    return ((render(name, change, notice), notice) for change, notice in looks)


def watch(
    fetch_page: Callable[[], Page], interval_s: float, before: Page
) -> Iterator[tuple[Change | None, str]]:
    """Look at a server once in each interval, for ever.

    Yields the last change that is known, and a notice if there is no news.
    """
    change: Change | None = None
    page: Page | None = before
    away_since = ""
    while True:
        time.sleep(interval_s)
        try:
            now = fetch_page()
        except PageError as error:
            away_since = away_since or time.strftime("%H:%M:%S")
            yield change, f"The server is away since {away_since}: {error}. Still trying."
            page = None
            continue
        # What came back may be another server, whose counters begin again.
        change = Change(page or now, now)
        page, away_since = now, ""
        yield change, ""


def _of_servers(
    servers: "Sequence[Server]", interval_s: float
) -> Iterator[tuple[RenderableType, str]]:
    """Look at each engine by itself."""
    engines = [(server, card) for server in servers for card in server.engines]
    before = [_page_if_there(card) for _, card in engines]
    while True:
        time.sleep(interval_s)
        now = [_page_if_there(card) for _, card in engines]
        rows = [
            (*engine, Change(old, new) if old and new else None)
            for engine, old, new in zip(engines, before, now, strict=True)
        ]
        before = now
        yield render_servers(rows), ""


def _page_if_there(card: "EngineCard") -> Page | None:
    from sparksched.commands.top.servers import local_page

    try:
        return local_page([card])
    except PageError:
        return None


@contextmanager
def _screen(parsed: argparse.Namespace) -> Iterator[Callable[[RenderableType], None]]:
    """Yield what shows a picture: over the one before on a terminal, else below it."""
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    if not sys.stdout.isatty() or parsed.once:
        yield console.print
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        live.update(Text(f"sparksched top\nlooking for {parsed.interval:g} s"), refresh=True)
        yield functools.partial(live.update, refresh=True)
