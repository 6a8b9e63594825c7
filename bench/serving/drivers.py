"""The two ways in which requests get to a server: over HTTP, and through its own `AsyncLLM`."""

import math
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from bench.serving import http_load
from bench.serving.remote import Remote, gather
from bench.serving.server import Server
from bench.serving.streams import FIRST_END, RUNNING, StreamLog
from bench.serving.workload import Workload

HTTP, ASYNCLLM = DRIVERS = ("http", "asyncllm")

STREAMS_PER_LOADER = 128
MAX_LOADERS = 4
ROUND_S = 300.0
"""A round that takes longer has failed."""

Events = Callable[[str], None]


class Driver(Protocol):
    """Sends requests to a server and waits for their end."""

    def run(self, workload: Workload, on_event: Events) -> list[StreamLog]:
        """Send all of them at once; `on_event` is told RUNNING and FIRST_END."""
        ...


@dataclass(frozen=True)
class AsyncLLMDriver:
    """Has the API servers' own processes consume `AsyncLLM.generate()`."""

    server: Server

    def run(self, workload: Workload, on_event: Events) -> list[StreamLog]:
        """Send all requests at once, spread over the API servers, as far as there are so many."""
        remotes = self.server.remotes[: workload.num_requests]
        for part, remote in enumerate(remotes):
            remote.send("stream", workload=workload, part=part, num_parts=len(remotes))
        parts = gather(remotes, ROUND_S, _Merged(len(remotes), on_event))
        return [log for logs in parts for log in logs]


@dataclass(frozen=True)
class HttpDriver:
    """Has processes of their own stream `/v1/completions`."""

    server: Server
    loaders: list[Remote]

    def run(self, workload: Workload, on_event: Events) -> list[StreamLog]:
        """Send all requests at once, spread over as many processes as that many streams need."""
        return [log for part in self._send(workload, on_event) for log in part["logs"]]

    def collect(self, workload: Workload) -> list[list[int]]:
        """Return the tokens of each request, sampled with a seed of its own."""
        parts = self._send(workload, lambda event: None, is_sampled=True)
        tokens: list[list[int]] = [[] for _ in range(workload.num_requests)]
        for number, part in enumerate(parts):
            tokens[number :: len(parts)] = part["tokens"]
        return tokens

    def _send(self, workload: Workload, on_event: Events, **more: Any) -> list[dict[str, Any]]:
        wanted = math.ceil(workload.num_requests / STREAMS_PER_LOADER)
        loaders = self.loaders[: max(1, wanted)]
        for part, loader in enumerate(loaders):
            loader.send(
                "stream",
                port=self.server.port,
                model=self.server.start.model.name,
                workload=workload,
                part=part,
                num_parts=len(loaders),
                **more,
            )
        return gather(loaders, ROUND_S, _Merged(len(loaders), on_event))


@dataclass
class _Merged:
    """One RUNNING when all processes have said so, one FIRST_END for the first."""

    num_processes: int
    on_event: Events
    _seen: dict[str, int] = field(default_factory=dict)

    def __call__(self, event: str) -> None:
        self._seen[event] = count = self._seen.get(event, 0) + 1
        if count == {RUNNING: self.num_processes, FIRST_END: 1}[event]:
            self.on_event(event)


@contextmanager
def running_loaders(most_streams: int, cores: set[int] | None) -> Iterator[list[Remote]]:
    """Start the processes that load a server over HTTP, for up to so many streams.

    Args:
        most_streams: The most that any workload has.
        cores: The processors that they are to use; None: all.

    """
    available = len(cores or os.sched_getaffinity(0))
    wanted = math.ceil(most_streams / STREAMS_PER_LOADER)
    count = max(1, min(wanted, MAX_LOADERS, available - 1))
    context = multiprocessing.get_context("spawn")
    processes, remotes = [], []
    for number in range(count):
        ours, theirs = context.Pipe()
        process = context.Process(target=http_load.serve, args=(theirs, cores), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        remotes.append(Remote(f"HTTP load process {number}", ours))
    try:
        yield remotes
    except BaseException:
        # They may be in the middle of streams, and would be waited for.
        for process in processes:
            process.kill()
        raise
    finally:
        for remote in remotes:
            remote.close()
        for process in processes:
            process.join(5.0)
            process.kill()
