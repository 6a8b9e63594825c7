"""What the command does with a file, apart from showing it."""

from collections.abc import Sequence
from dataclasses import dataclass

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


def open_trace(path: str) -> Opened:
    """Read a whole trace.

    Raises:
        TraceError: if it is none, or damaged.
        OSError: if the file can't be read.

    """
    trace = Trace(path)
    history = History(trace.settings, trace.events())
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
