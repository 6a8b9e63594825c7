"""What the command does with a file, apart from showing it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sparksched.trace.errors import TraceError
from sparksched.trace.history import History
from sparksched.trace.past import Past, past_of
from sparksched.trace.reader import Trace
from sparksched.trace.replay import Outcome, Replay
from sparksched.trace.whatif import Change, Timeline, what_if


@dataclass(frozen=True)
class Opened:
    """A trace that has been read once."""

    trace: Trace
    history: History
    past: Past


UNFINISHED: Final = (
    "The process that recorded it was probably killed, or had no room on its disk, or still runs. "
    "--partial replays what is whole."
)


def open_trace(path: str, *, partial: bool) -> Opened:
    """Read a trace: a whole one, or with `partial` also the whole frames of one without its end.

    Raises:
        TraceError: if it is none, damaged, or lacks its end without `partial`.
        OSError: if the file can't be read.

    """
    trace = Trace(path)
    history = History(trace.settings, trace.events())
    if trace.missing is not None and not partial:
        raise TraceError(f"{trace.missing}. {UNFINISHED}")
    return Opened(trace, history, past_of(trace.events()))


def replay(opened: Opened, schedulers: Sequence[str]) -> list[Outcome]:
    """Replay on each scheduler, side by side: both meet the same state of the machine."""
    settings = opened.trace.settings
    replays = [Replay(name, settings, opened.history) for name in schedulers]
    for event in opened.trace.events():
        for it in replays:
            if not it.is_over:
                it.play(event)
    for it in replays:
        it.shutdown()
    return [it.outcome for it in replays]


def compare_settings(opened: Opened, scheduler: str, change: Change) -> tuple[Timeline, Timeline]:
    """Serve the load with the recorded settings, and with some of them changed."""
    settings, history, past = opened.trace.settings, opened.history, opened.past
    before = what_if(scheduler, settings, history, past, Change())
    return before, what_if(scheduler, settings, history, past, change)
