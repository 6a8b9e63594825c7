"""What came back of a set of requests, and when: the log that both drivers keep."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

RUNNING = "running"
FIRST_END = "first end"

clock = time.perf_counter
"""Seconds of CLOCK_MONOTONIC: the same in all processes."""


@dataclass(frozen=True)
class StreamLog:
    """What one stream brought. An output may bring several tokens, if its reader was late."""

    sent_at: float
    times: npt.NDArray[np.float64]
    """When outputs were there, in seconds."""
    num_tokens: npt.NDArray[np.int64]
    """Tokens of each output."""


class Recorder:
    """Notes outputs as they come, and tells when all streams run and when the first has ended."""

    def __init__(self, num_streams: int, notify: Callable[[str], None]) -> None:
        """Begin with streams that have nothing yet; `notify` gets RUNNING and FIRST_END."""
        self._sent_at = [0.0] * num_streams
        self._times: list[list[float]] = [[] for _ in range(num_streams)]
        self._num_tokens: list[list[int]] = [[] for _ in range(num_streams)]
        self._num_waiting = num_streams
        self._has_ended = False
        self._notify = notify

    def send(self, stream: int) -> None:
        """Note that a request is sent now."""
        self._sent_at[stream] = clock()

    def note(self, stream: int, now: float, num_tokens: int) -> None:
        """Note an output."""
        times = self._times[stream]
        times.append(now)
        self._num_tokens[stream].append(num_tokens)
        if len(times) == 1:
            self._num_waiting -= 1
            if not self._num_waiting:
                self._notify(RUNNING)

    def end(self, stream: int) -> None:
        """Note the end of a stream."""
        if not self._has_ended:
            self._has_ended = True
            self._notify(FIRST_END)

    def logs(self) -> list[StreamLog]:
        """Return what was noted."""
        return [
            StreamLog(sent_at, np.array(times), np.array(num_tokens, dtype=np.int64))
            for sent_at, times, num_tokens in zip(
                self._sent_at, self._times, self._num_tokens, strict=True
            )
        ]
