"""`sparksched replay`: what it is asked, how it answers."""

import argparse
import contextlib
import dataclasses
import functools
import json
import logging
import math
import sys
from typing import Any, Final

from sparksched.environment import MAX_SLOWDOWN_BOUNDS, MAX_STALL_BOUNDS_MS
from sparksched.record.events import TraceError

DESCRIPTION: Final = """\
Gives a scheduler what a recorded one was given (SPARKSCHED_RECORD), without a GPU and without the
model, and compares its decisions with the recorded ones. With another value of a setting: what
that would have done. The exit status is 0, or 1 if a decision differs, or 2 if the file can't be
used. Of one that was cut off what is whole is used."""

BOTH: Final = "both"


def add_to(commands: Any) -> None:
    """Add the command to a parser's."""
    parser = commands.add_parser(
        "replay", help="replay a recorded scheduler, or ask what if", description=DESCRIPTION
    )
    parser.add_argument("file", metavar="FILE", help="what SPARKSCHED_RECORD has named")
    parser.add_argument(
        "--scheduler",
        choices=("sparksched", "vllm", BOTH),
        help="which one replays; both, and for what-if sparksched, if it isn't said",
    )
    for name in ("--max-num-seqs", "--num-gpu-blocks", "--max-num-batched-tokens"):
        parser.add_argument(name, type=_count, metavar="N", help="what if")
    parser.add_argument("--scheduling-policy", choices=("fcfs", "priority"), help="what if")
    for name, metavar, bounds in (
        ("--max-stall-ms", "MS", MAX_STALL_BOUNDS_MS),
        ("--max-slowdown", "TIMES", MAX_SLOWDOWN_BOUNDS),
    ):
        parser.add_argument(
            name, type=functools.partial(_within, *bounds), metavar=metavar, help="what if, paced"
        )
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(run=run)


def _count(text: str) -> int:
    count = int(text) if text.isascii() and text.isdigit() else 0
    if not 1 <= count < 1 << 24:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 16777215")
    return count


def _within(least: float, most: float, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not least <= number <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least:g} to {most:g}")
    return number


def run(parsed: argparse.Namespace) -> int:
    """Replay, show, and return the exit status."""
    level = logging.root.manager.disable
    # What schedulers say of their doings is old news here.
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            answer = _answer(parsed)
    except (TraceError, OSError) as error:
        print(f"sparksched replay: {error}", file=sys.stderr)
        return 2
    finally:
        logging.disable(level)
    if parsed.json:
        print(json.dumps(answer.data(), indent=2))
    else:
        answer.show()
    status: int = answer.status
    return status


def _answer(parsed: argparse.Namespace) -> Any:
    # vLLM takes seconds to import.
    from sparksched.commands.replay import show
    from sparksched.record.load import Load
    from sparksched.record.replay import replay
    from sparksched.record.what_if import Change, what_if

    load = Load(parsed.file)
    if load.trace.missing is not None:
        print(f"sparksched replay: {load.trace.missing}", file=sys.stderr)
    change = Change(**{it.name: getattr(parsed, it.name) for it in dataclasses.fields(Change)})
    if change == Change():
        names = ("sparksched", "vllm") if parsed.scheduler in (None, BOTH) else (parsed.scheduler,)
        return show.Comparison(load, replay(load, names))
    if parsed.scheduler == BOTH:
        raise TraceError("what if is asked of one scheduler: --scheduler sparksched or vllm")
    timelines = what_if(parsed.scheduler or "sparksched", load, change)
    return show.Alternatives(load, change, *timelines)
