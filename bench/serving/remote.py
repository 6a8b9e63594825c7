"""How the benchmark talks to processes that drive streams: commands out, events and results in.

A command is `(number, name, arguments)`. Answers carry its number: `(number, "event", name)`, any
of them, and at last `(number, "ok", result)` or `(number, "error", traceback)`. What comes late to
a command that was given up is known by its number, and ignored.
"""

import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any


class RemoteError(RuntimeError):
    """A process has failed, is gone or takes too long."""


class Remote:
    """The other end of a connection to a process."""

    def __init__(self, name: str, connection: "Connection[Any, Any]") -> None:
        """Use a connection that is there."""
        self.name = name
        self.connection = connection
        self._number = 0

    def send(self, command: str, **arguments: Any) -> None:
        """Start a command, the one that answers are taken for from now on."""
        self._number += 1
        try:
            self.connection.send((self._number, command, arguments))
        except OSError as error:
            raise RemoteError(f"{self.name} doesn't listen: {error}") from None

    def call(self, command: str, timeout_s: float = 120.0, **arguments: Any) -> Any:
        """Run a command that has no events; return its result."""
        self.send(command, **arguments)
        return gather([self], timeout_s, lambda event: None)[0]

    def close(self) -> None:
        """Hang up."""
        self.connection.close()

    def receive(self) -> tuple[str, Any] | None:
        """Return what comes next, `event` or `ok` and what it is; None if it is out of date."""
        try:
            number, kind, value = self.connection.recv()
        except (EOFError, OSError):
            raise RemoteError(f"{self.name} is gone") from None
        if number != self._number:
            return None
        if kind == "error":
            raise RemoteError(f"{self.name} has failed:\n{value}")
        return kind, value


def gather(remotes: list[Remote], timeout_s: float, on_event: Callable[[str], None]) -> list[Any]:
    """Wait for the results of commands that were sent to several processes.

    Raises:
        RemoteError: if one fails, is gone or is not ready in time.

    """
    deadline = time.monotonic() + timeout_s
    pending = dict(enumerate(remotes))
    results: dict[int, Any] = {}
    while pending:
        connections = [remote.connection for remote in pending.values()]
        ready = wait(connections, max(0.0, deadline - time.monotonic()))
        if not ready:
            names = ", ".join(remote.name for remote in pending.values())
            raise RemoteError(f"no answer within {timeout_s:.0f} s from {names}")
        for index, remote in list(pending.items()):
            answer = remote.receive() if remote.connection in ready else None
            if answer is None:
                continue
            kind, value = answer
            if kind == "event":
                on_event(value)
            else:
                results[index] = value
                del pending[index]
    return [results[index] for index in range(len(remotes))]
