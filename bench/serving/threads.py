"""CPU time of a server's threads, from /proc."""

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

HELPERS = ("resource_tracker", "compile_worker")
"""Processes that have nothing to do with serving."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Process:
    """A process of a server."""

    role: str
    pid: int
    wants: bool = False
    """Whether the time counts, too, for which a thread waits for a processor."""

    def cpu_s(self) -> dict[int, float]:
        """Return the CPU seconds that each thread has taken so far."""
        found = {tid: _cpu_s(self.pid, tid, self.wants) for tid in self._tids()}
        return {tid: spent for tid, spent in found.items() if spent is not None}

    def confine(self, cores: list[int]) -> None:
        """Confine all threads to some processors, and those that they start later."""
        for tid in self._tids():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(tid, cores)

    def _tids(self) -> list[int]:
        try:
            return [int(name) for name in os.listdir(f"/proc/{self.pid}/task")]
        except OSError:
            return []


def children_of(pid: int) -> list[int]:
    """Return the processes that an engine has started to do work."""
    with contextlib.suppress(psutil.Error):
        return [
            child.pid
            for child in psutil.Process(pid).children(recursive=True)
            if not any(it in " ".join(child.cmdline()) for it in HELPERS)
        ]
    return []


def _cpu_s(pid: int, tid: int, wants: bool) -> float | None:
    # In nanoseconds, where the kernel counts them; else in ticks of 10 ms, of the work alone.
    fields = _read(pid, tid, "schedstat").split()
    if fields and int(fields[0]):
        return (int(fields[0]) + (int(fields[1]) if wants else 0)) / 1e9
    ticks = _read(pid, tid, "stat").rpartition(")")[2].split()
    if not ticks:
        return None
    return (int(ticks[11]) + int(ticks[12])) / os.sysconf("SC_CLK_TCK")


def _read(pid: int, tid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/task/{tid}/{name}").read_text()
    except (OSError, ValueError):
        return ""


@dataclass(frozen=True)
class Snapshot:
    """What all threads had taken at a moment."""

    at: float
    cpu_s: list[dict[int, float]]
    """By process."""

    @classmethod
    def take(cls, processes: list[Process]) -> "Snapshot":
        """Look at all threads now."""
        return cls(time.perf_counter(), [process.cpu_s() for process in processes])


def cpu_between(processes: list[Process], before: Snapshot, after: Snapshot) -> Row:
    """Return what processes have taken of a processor by role, in percent; added up in each role.

    So are their main threads; `busiest` is a single thread of one of them.
    """
    seconds = after.at - before.at
    shares: dict[str, dict[str, float]] = {}
    for process, old, new in zip(processes, before.cpu_s, after.cpu_s, strict=True):
        if not new:
            continue  # it has ended
        share = shares.setdefault(process.role, {"percent": 0.0, "busiest": 0.0, "main": 0.0})
        for tid, spent in new.items():
            percent = 100 * (spent - old.get(tid, 0.0)) / seconds
            share["percent"] += percent
            share["busiest"] = max(share["busiest"], percent)
            share["main"] += percent if tid == process.pid else 0.0
    return shares
