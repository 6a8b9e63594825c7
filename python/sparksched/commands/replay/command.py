"""`sparksched replay`: what it is asked, how it answers."""

import argparse
import contextlib
import dataclasses
import json
import logging
import sys
from typing import Any, Final

from sparksched.commands import number
from sparksched.environment import MAX_SLOWDOWN_BOUNDS, MAX_STALL_BOUNDS_MS
from sparksched.record.events import MAX_COUNT, TraceError

DESCRIPTION: Final = """\
Gives a scheduler what a recorded one was given (SPARKSCHED_RECORD), without a GPU and without the
model, and compares its decisions with the recorded ones. With another value of a setting: what
that would have done. The exit status is 0, or 1 if a decision differs, or 2 if the file can't be
used. Of one that was cut off what is whole is used."""

_NUMBERS: Final[dict[str, tuple[Any, ...]]] = {
    "--max-num-seqs": (int, 1, MAX_COUNT, "what if"),
    "--num-gpu-blocks": (int, 1, MAX_COUNT, "what if"),
    "--max-num-batched-tokens": (int, 1, MAX_COUNT, "what if"),
    "--max-stall-ms": (float, *MAX_STALL_BOUNDS_MS, "what if, paced"),
    "--max-slowdown": (float, *MAX_SLOWDOWN_BOUNDS, "what if, paced"),
}
"""Options that are numbers: type, least, most, and help."""


def add_to(commands: Any) -> None:
    """Add the command to a parser's."""
    parser = commands.add_parser(
        "replay", help="replay a recorded scheduler, or ask what if", description=DESCRIPTION
    )
    parser.add_argument("file", metavar="FILE", help="what SPARKSCHED_RECORD has named")
    parser.add_argument(
        "--scheduler",
        choices=("sparksched", "vllm"),
        help="which one replays; both, and for what-if sparksched, if it isn't said",
    )
    parser.add_argument("--scheduling-policy", choices=("fcfs", "priority"), help="what if")
    for name, (kind, *bounds, text) in _NUMBERS.items():
        parser.add_argument(name, type=number(kind, *bounds), metavar="N", help=text)
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(run=run)


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
        print(json.dumps(answer, indent=2))
    else:
        from sparksched.commands.replay.show import show

        show(answer)
    return int(any(it["mismatch"] is not None for it in answer.get("replays", ())))


def _answer(parsed: argparse.Namespace) -> dict[str, Any]:
    # vLLM takes seconds to import.
    from sparksched.commands.replay.show import alternatives, comparison
    from sparksched.record.load import Load
    from sparksched.record.replay import replay
    from sparksched.record.what_if import Change, what_if

    load = Load(parsed.file)
    if load.trace.missing is not None:
        print(f"sparksched replay: {load.trace.missing}", file=sys.stderr)
    change = Change(**{it.name: getattr(parsed, it.name) for it in dataclasses.fields(Change)})
    if change == Change():
        names = (parsed.scheduler,) if parsed.scheduler else ("sparksched", "vllm")
        return comparison(load, replay(load, names))
    timelines = what_if(parsed.scheduler or "sparksched", load, change)
    return alternatives(load, change, *timelines)
