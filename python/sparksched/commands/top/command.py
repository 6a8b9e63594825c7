"""The command: it looks again and again, and says so when the server is away."""

import argparse
import dataclasses
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from sparksched.commands.top.interval import Interval, between
from sparksched.commands.top.page import NoAnswerError, Page, PageError, address, fetch, parse
from sparksched.commands.top.view import WIDTH, render

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
        help=f"if not given: {DEFAULT_URL}, and the engines of this user on this machine",
    )
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
    fetch_page: Callable[[], Page]
    fetch_page = fetch_here if parsed.url is None else functools.partial(fetch, parsed.url)
    parsed.url = parsed.url or DEFAULT_URL
    try:
        first = fetch_page()
    except PageError as error:
        print(f"sparksched top: {parsed.url}: {error}", file=sys.stderr)
        return 1
    looks = watch(fetch_page, parsed.interval, first)
    try:
        with _screen(parsed) as show:
            for look in looks:
                show(look)
                if parsed.once:
                    return int(bool(look.problem))
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:
        # Whoever reads has seen enough. What is still to be written goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return 0


def fetch_here() -> Page:
    """Return the page of the usual server, with what it lacks of this user's engines here.

    vLLM's Rust front end knows nothing of ours, and another server may have no page at all.

    Raises:
        PageError: if there is neither a server nor an engine.

    """
    try:
        page = fetch(DEFAULT_URL)
    except PageError:
        local = local_page()
        if local is None:
            raise
        return local
    if not page.labels("sparksched:info") and (local := local_page()):
        page.samples |= {
            name: its for name, its in local.samples.items() if name.startswith("sparksched:")
        }
    return page


def local_page() -> Page | None:
    """Return the page that `sparksched metrics` shows; None if no engine runs here."""
    from sparksched.shared.card import find

    if not find():
        return None
    from sparksched.commands import local_engines  # imports vLLM

    return parse(local_engines.page(), time.monotonic())


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
def _screen(parsed: argparse.Namespace) -> Iterator[Callable[[Look], None]]:
    """Yield what shows a look: over the one before on a terminal, else below it."""
    if parsed.json:
        yield _print_json
        return
    if not sys.stdout.isatty() or parsed.once:
        console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
        yield lambda look: console.print(_shown(parsed.url, look))
        return
    with Live(console=Console(), screen=True, auto_refresh=False) as live:
        live.update(
            Text(f"sparksched top  {parsed.url}\nlooking for {parsed.interval:g} s"), refresh=True
        )
        yield lambda look: live.update(_shown(parsed.url, look), refresh=True)


def _shown(url: str, look: Look) -> RenderableType:
    if look.interval is None:
        return Text(f"sparksched top  {url}\n{look.problem}")
    return render(url, look.interval, look.problem)


def _print_json(look: Look) -> None:
    if look.problem or look.interval is None:
        print(json.dumps({"error": look.problem}), flush=True)
    else:
        print(json.dumps(dataclasses.asdict(look.interval)), flush=True)
