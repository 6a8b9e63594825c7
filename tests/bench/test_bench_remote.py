"""Commands to other processes: answers, events, failures, and answers that come too late."""

from multiprocessing import Pipe
from typing import Any

import pytest

from bench.serving.remote import Remote, RemoteError, gather


class Other:
    """The other process, made up: what is sent to it, and what it answers."""

    def __init__(self, name: str) -> None:
        ours, self.pipe = Pipe()
        self.remote = Remote(name, ours)

    def answer(self, number: int, kind: str, value: Any) -> None:
        self.pipe.send((number, kind, value))


def test_results_of_several_processes_and_their_events() -> None:
    others = [Other("a"), Other("b")]
    for other in others:
        other.remote.send("stream", part=1)
        assert other.pipe.recv() == (1, "stream", {"part": 1})
    others[1].answer(1, "event", "running")
    others[1].answer(1, "ok", "second")
    others[0].answer(1, "ok", "first")
    events: list[str] = []
    remotes = [other.remote for other in others]
    assert gather(remotes, 5.0, events.append) == ["first", "second"]
    assert events == ["running"]


def test_what_belongs_to_a_command_that_was_given_up_is_ignored() -> None:
    other = Other("a")
    other.remote.send("stream")
    with pytest.raises(RemoteError, match="no answer within 0 s from a"):
        gather([other.remote], 0.0, lambda event: None)
    other.remote.send("stream")
    for answer in ((1, "event", "late"), (1, "error", "late"), (2, "ok", "in time")):
        other.answer(*answer)
    events: list[str] = []
    assert gather([other.remote], 5.0, events.append) == ["in time"]
    assert events == []


def test_a_failure_brings_its_traceback() -> None:
    other = Other("a")
    other.remote.send("stream")
    other.answer(1, "error", "ValueError: x")
    with pytest.raises(RemoteError, match="a has failed:\nValueError: x"):
        gather([other.remote], 5.0, lambda event: None)


def test_a_process_that_is_gone_is_noticed() -> None:
    other = Other("a")
    other.remote.send("stream")
    other.pipe.close()
    with pytest.raises(RemoteError, match="a is gone"):
        gather([other.remote], 5.0, lambda event: None)
    with pytest.raises(RemoteError, match="a doesn't listen"):
        other.remote.send("stream")
