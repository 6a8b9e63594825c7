"""`sparksched verify`: the server with verification, one variable away from the usual one."""

import argparse
import os
import sys
from typing import Any, Final, NoReturn, get_args

from sparksched import environment

DESCRIPTION: Final = """\
Starts `vllm serve` with sparksched, and vLLM's own scheduler beside it: each step of both is
compared. The first difference is logged with both values, and recorded to a file. Steps cost more
than with either scheduler alone; docs/verify.md says how much."""

EXPECTATION: Final = """\
sparksched verify: sparksched and vLLM's own scheduler decide each step.
  at the start   the log says that steps are verified, or in a WARNING why not
  a difference   is an ERROR in the log: both values, and how to see it again
  after it       {goes_on}
  at the end     the log says how many steps were verified
"""

GOES_ON: Final[dict[environment.Verification, str]] = {
    "sparksched": "sparksched's scheduler goes on, without verification",
    "vllm": "vLLM's own scheduler goes on; running requests notice nothing",
    "stop": "the engine has stopped",
}


def add_to(commands: Any) -> None:
    """Add the command to a parser's."""
    parser = commands.add_parser(
        "verify",
        help="serve, and have vLLM's own scheduler check each step",
        description=DESCRIPTION,
        usage="sparksched verify [--then {sparksched,vllm,stop}] MODEL [arguments of vllm serve]",
    )
    parser.add_argument(
        "--then",
        choices=get_args(environment.Verification),
        help="who goes on after the first difference (default: sparksched)",
    )
    parser.add_argument("serve", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Become `vllm serve`; return 2 if there is no model to serve."""
    if parsed.serve:
        goes_on = parsed.then or environment.verification() or "sparksched"
        print(EXPECTATION.format(goes_on=GOES_ON[goes_on]), flush=True)
        _become_server(parsed.serve, goes_on)
    print("sparksched verify: which MODEL?", file=sys.stderr)
    return 2


def _become_server(arguments: list[str], goes_on: environment.Verification) -> NoReturn:
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *arguments]
    variables = {environment.SCHEDULER: "sparksched", environment.VERIFY: goes_on}
    os.execve(sys.executable, command, {**os.environ, **variables})
