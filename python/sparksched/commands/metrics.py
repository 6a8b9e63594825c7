"""The command `sparksched metrics`: the engines' series for Prometheus, whatever front end runs."""

import argparse
import sys
import threading
from typing import Any, Final

from sparksched.commands import number

DESCRIPTION: Final = """\
Shows the metrics of all engines with sparksched that run as this user on this machine, as
Prometheus reads them, also where the front end shows none: vLLM's Rust front end, or one that
doesn't answer.
Prints them once, or serves them with --port until it is interrupted. The exit status is 1 if no
engine runs, or if the port is taken."""


def add_to(commands: Any) -> None:
    """Add the command to a parser's."""
    parser = commands.add_parser(
        "metrics", help="show the engines' metrics to Prometheus", description=DESCRIPTION
    )
    parser.add_argument(
        "--port", type=number(int, 1, 65_535), help="serve http://HOST:PORT/metrics"
    )
    parser.add_argument("--host", default="127.0.0.1", help="127.0.0.1 if not given")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Print or serve; return the exit status."""
    # vLLM, which it imports, takes seconds.
    from sparksched.commands import local_engines

    if parsed.port is None:
        page = local_engines.page()
        print(page, end="")
        if not page:
            print("sparksched metrics: no engine of this user runs here", file=sys.stderr)
        return int(not page)
    from prometheus_client import start_http_server

    try:
        start_http_server(parsed.port, parsed.host, local_engines.registry())
    except OSError as error:
        print(f"sparksched metrics: {parsed.host}:{parsed.port}: {error}", file=sys.stderr)
        return 1
    print(f"http://{parsed.host}:{parsed.port}/metrics", flush=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        return 0
    return 0
