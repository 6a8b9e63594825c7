"""The command: it looks again and again, and says so when the server is away."""

import argparse
import dataclasses
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from sparksched.commands.top.interval import Interval, between
from sparksched.commands.top.page import NoAnswerError, Page, PageError, address, fetch, parse
from sparksched.commands.top.screen import WIDTH, render, render_servers

if TYPE_CHECKING:
    from sparksched.commands.top.servers import Server
    from sparksched.shared.card import EngineCard

DEFAULT_URL: Final = "http://localhost:8000"
MIN_INTERVAL_S: Final = 0.1
MAX_INTERVAL_S: Final = 3600.0

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
        "--interval", type=_interval, default=2.0, metavar="SECONDS", help="2 if not given"
    )
    parser.add_argument("--once", action="store_true", help="one interval, and no more")
    parser.add_argument("--json", action="store_true", help="for programs: an object a line")
    parser.set_defaults(run=run)


def _url(value: str) -> str:
    try:
        return address(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _interval(value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not MIN_INTERVAL_S <= seconds <= MAX_INTERVAL_S:
        raise argparse.ArgumentTypeError(
            f"{value!r} is not a number of seconds from {MIN_INTERVAL_S:g} to {MAX_INTERVAL_S:g}"
        )
    return seconds


@dataclasses.dataclass(frozen=True)
class Look:
    """What was seen at the end of an interval."""

    interval: Interval | None
    """The last that is known; None if there is none yet."""
    problem: str = ""
    """Why there is no news."""


def run(parsed: argparse.Namespace) -> int:
    """Look and show, until the user has seen enough; return the exit status."""
    try:
        looks = _looks(parsed)
    except PageError as error:
        print(f"sparksched top: {error}", file=sys.stderr)
        return 1
    try:
        with _screen(parsed) as show:
            for shown in looks:
                show(shown)
                if parsed.once:
                    return int(shown.has_failed)
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:
        # Whoever reads has seen enough. What is still to be written goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return 0


@dataclasses.dataclass(frozen=True)
class Shown:
    """What is shown at once."""

    picture: RenderableType
    value: object
    """The same for a program."""
    has_failed: bool = False


def _looks(parsed: argparse.Namespace) -> Iterator[Shown]:
    """Find what to look at, and have a first look.

    Raises:
        PageError: if that is not there.

    """
    if parsed.url is not None:
        return _looks_at(parsed.url, functools.partial(fetch, parsed.url), parsed.interval)
    servers = _servers_here(parsed.pid)
    if len(servers) > 1:
        return _looks_at_servers(servers, parsed.interval)
    if servers:
        return _looks_at(servers[0].name, functools.partial(page_of, servers[0]), parsed.interval)
    try:
        return _looks_at(DEFAULT_URL, functools.partial(fetch, DEFAULT_URL), parsed.interval)
    except PageError as error:
        nobody = "no engine with sparksched was found among this user's processes either"
        raise type(error)(f"{error}; {nobody}") from None


def _servers_here(pid: int | None) -> "list[Server]":
    """Return this user's servers on this machine, or those that a process belongs to.

    Raises:
        PageError: if it belongs to none.

    """
    from sparksched.commands.top.servers import find_servers
    from sparksched.shared.card import find

    servers = find_servers(find())
    if pid is None:
        return servers
    if started := [server for server in servers if server.pid == pid]:
        return started
    for server in servers:
        engines = tuple(card for card in server.engines if card.pid == pid)
        if engines:
            whole = len(engines) == len(server.engines)
            return [server if whole else dataclasses.replace(server, engines=engines, url=None)]
    found = ", ".join(str(card.pid) for server in servers for card in server.engines)
    raise PageError(f"process {pid} is no engine with sparksched; there are: {found or 'none'}")


def page_of(server: "Server") -> Page:
    """Return the page of a server, with what it lacks of its engines.

    vLLM's Rust front end knows nothing of ours, and another server may have no page at all.

    Raises:
        PageError: if its front end doesn't answer, or its engines are gone.

    """
    if server.url is None:
        return _local_page(server.engines)
    page = fetch(server.url)
    if not page.labels("sparksched:info"):
        local = _local_page(server.engines)
        page.samples |= {
            name: its for name, its in local.samples.items() if name.startswith("sparksched:")
        }
    return page


def _local_page(engines: "Sequence[EngineCard]") -> Page:
    """Return what `sparksched metrics` shows of some engines."""
    from sparksched.commands import local_engines  # imports vLLM

    wanted = {local_engines.key(card) for card in engines}
    text = local_engines.page(lambda card: local_engines.key(card) in wanted)
    if not text:
        raise NoAnswerError("its engine is gone")
    return parse(text, time.monotonic())


def _looks_at(name: str, fetch_page: Callable[[], Page], interval_s: float) -> Iterator[Shown]:
    try:
        first = fetch_page()
    except PageError as error:
        raise type(error)(f"{name}: {error}") from error
    return (_shown(name, look) for look in watch(fetch_page, interval_s, first))


def _looks_at_servers(servers: "Sequence[Server]", interval_s: float) -> Iterator[Shown]:
    """Look at each engine by itself."""
    engines = [(server, card) for server in servers for card in server.engines]
    before: list[Page | None] = [_page_if_there(card) for _, card in engines]
    while True:
        time.sleep(interval_s)
        now = [_page_if_there(card) for _, card in engines]
        intervals = [
            None if old is None or new is None else between(old, new)
            for old, new in zip(before, now, strict=True)
        ]
        before = now
        rows = [(*engine, it) for engine, it in zip(engines, intervals, strict=True)]
        yield Shown(
            render_servers(rows),
            [
                {
                    "model_name": card.model_name,
                    "engine": card.engine,
                    "pid": card.pid,
                    "server_pid": server.pid,
                    "url": server.url,
                    "interval": interval and dataclasses.asdict(interval),
                }
                for server, card, interval in rows
            ],
        )


def _page_if_there(card: "EngineCard") -> Page | None:
    try:
        return _local_page([card])
    except NoAnswerError:
        return None


def watch(fetch_page: Callable[[], Page], interval_s: float, before: Page) -> Iterator[Look]:
    """Look at a server once in each interval, for ever."""
    last: Interval | None = None
    page: Page | None = before
    away_since = ""
    while True:
        time.sleep(interval_s)
        try:
            now = fetch_page()
        except PageError as error:
            away_since = away_since or time.strftime("%H:%M:%S")
            verb = "doesn't answer" if isinstance(error, NoAnswerError) else "is no vLLM server"
            yield Look(last, f"The server {verb} since {away_since}: {error}. Still trying.")
            page = None
            continue
        # What came back may be another server, whose counters begin again.
        last = between(page or now, now)
        page, away_since = now, ""
        yield Look(last)


@contextmanager
def _screen(parsed: argparse.Namespace) -> Iterator[Callable[[Shown], None]]:
    """Yield what shows a look: over the one before on a terminal, else below it."""
    if parsed.json:
        yield lambda shown: print(json.dumps(shown.value), flush=True)
        return
    if not sys.stdout.isatty() or parsed.once:
        console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
        yield lambda shown: console.print(shown.picture)
        return
    with Live(console=Console(), screen=True, auto_refresh=False) as live:
        live.update(Text(f"sparksched top\nlooking for {parsed.interval:g} s"), refresh=True)
        yield lambda shown: live.update(shown.picture, refresh=True)


def _shown(name: str, look: Look) -> Shown:
    if look.interval is None:
        return Shown(Text(f"sparksched top  {name}\n{look.problem}"), {"error": look.problem}, True)
    value = {"error": look.problem} if look.problem else dataclasses.asdict(look.interval)
    return Shown(render(name, look.interval, look.problem), value, bool(look.problem))
