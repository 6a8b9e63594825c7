"""The command `sparksched`."""

import argparse
import sys
from collections.abc import Sequence

from sparksched.commands import metrics
from sparksched.commands.check import command as check
from sparksched.commands.replay import command as replay
from sparksched.commands.top import command as top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that is named; return the process's exit status."""
    parser = argparse.ArgumentParser(
        prog="sparksched", description="Looks after sparksched, vLLM's scheduler in Rust."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    check.add_to(commands)
    replay.add_to(commands)
    top.add_to(commands)
    metrics.add_to(commands)
    parsed = parser.parse_args(arguments)
    status: int = parsed.run(parsed)
    return status


if __name__ == "__main__":
    sys.exit(main())
