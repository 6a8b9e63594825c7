"""The command: what it is asked, how it answers."""

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sparksched.commands.check.finding import ArgumentError, Finding, Level

COLORS: Final = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "red"}

PIPED_WIDTH: Final = 1000
"""Columns where there is no terminal."""

NO_PROBLEM: Final = (
    "Nothing keeps sparksched from scheduling, as far as is known before the model is loaded."
)

DESCRIPTION = """\
Says what would happen if vLLM were started here with sparksched, before anything heavy is started.
Without a model: what the machine is like. The exit status is 0 if sparksched can schedule, as far
as is known before the model is loaded, 1 if something keeps it from that, and 2 if vLLM doesn't
know the arguments."""


def add_to(commands: Any) -> None:
    """Add the command to a parser's."""
    parser = commands.add_parser(
        "check",
        help="say what would happen, and why",
        description=DESCRIPTION,
        usage="sparksched check [--json] [MODEL [arguments of vllm serve]]",
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("serve", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Find out, show, and return the exit status."""
    # Before vLLM is imported: what it has to say at a start is not the question.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        # Imports and vLLM itself print to the standard output.
        with contextlib.redirect_stdout(sys.stderr):
            findings = list(_findings(parsed.serve))
    except ArgumentError:
        return 2
    if parsed.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        # What is piped is looked for by lines: these aren't broken.
        show(findings, Console() if sys.stdout.isatty() else Console(width=PIPED_WIDTH))
    return int(any(finding.level is Level.PROBLEM for finding in findings))


def _findings(serve: list[str]) -> Iterator[Finding]:
    from sparksched.commands.check import machine

    can_go_on = True
    for finding in machine.findings():
        can_go_on &= finding.level is not Level.PROBLEM or finding.topic == "vLLM"
        yield finding
    # A configuration can't be built where vLLM wouldn't start.
    if serve and can_go_on:
        from sparksched.commands.check import serving

        yield from serving.findings(serve)


def show(findings: list[Finding], console: Console) -> None:
    """Print a line for each finding, and what to do below it."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        level = Text(finding.level, style=COLORS[finding.level])
        table.add_row(level, finding.topic, Text(finding.text))
        if finding.advice:
            table.add_row("", "", Text(f"→ {finding.advice}", style="bold"))
    console.print(table)
    problems = sum(finding.level is Level.PROBLEM for finding in findings)
    console.print()
    if problems:
        console.print(Text("sparksched would not schedule.", style="bold red"))
    else:
        console.print(Text(NO_PROBLEM, style="bold green"))
