"""CPU time of a server's threads, from /proc, and what a thread is doing that takes most of it."""

import contextlib
import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.serving.evaluate import missing
from bench.serving.stacks import Question, Stacks

SPINNING_SHARE = 0.8
"""Of one processor: a thread that takes more than this is looked at."""
NUM_SAMPLES = 20
SAMPLE_S = 0.005
NUM_NAMED = 3
LEAST_PERCENT = 0.05
HELPERS = ("resource_tracker", "compile_worker")
"""Processes that have nothing to do with serving."""

Row = dict[str, Any]

SYSCALLS = {  # x86-64
    0: "read",
    1: "write",
    7: "poll",
    16: "ioctl",
    23: "select",
    24: "sched_yield",
    35: "nanosleep",
    202: "futex",
    230: "clock_nanosleep",
    232: "epoll_wait",
    270: "pselect6",
    271: "ppoll",
    281: "epoll_pwait",
}


@dataclass(frozen=True)
class Process:
    """A process of a server."""

    role: str
    pid: int
    names: dict[int, str]
    """Python's names of threads; others go by the kernel's."""
    stacks_at: str = ""
    """Where it listens for the question what its threads do, if it does."""

    def cpu_s(self) -> dict[int, float]:
        """Return the CPU seconds that each thread has taken so far."""
        return {tid: spent for tid in self._tids() if (spent := _cpu_s(self.pid, tid)) is not None}

    def name(self, tid: int) -> str:
        """Return a thread's name."""
        if tid in self.names:
            return _short_name(self.names[tid])
        if tid == self.pid:
            return "MainThread"
        return _read(self.pid, tid, "comm").strip() or "ended"

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


def _short_name(thread: str) -> str:
    """Return `run` for `Thread-3 (run)`."""
    return thread.partition("(")[2].rstrip(")") or thread


def _cpu_s(pid: int, tid: int) -> float | None:
    # In nanoseconds, where the kernel counts them; else in ticks of 10 ms.
    fields = _read(pid, tid, "schedstat").split()
    if fields and int(fields[0]):
        return int(fields[0]) / 1e9
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
    """Return what each process has taken of a processor, in percent, and its threads, most first.

    Processes of the same role are added up, and so are their threads by name; `busiest` is a single
    thread of one of them. Threads that took next to nothing are left out.
    """
    seconds = after.at - before.at
    totals: dict[str, float] = {}
    busiest: dict[str, float] = {}
    threads: dict[str, Counter[str]] = {}
    for process, old, new in zip(processes, before.cpu_s, after.cpu_s, strict=True):
        if not new:
            continue  # it has ended
        of_role = threads.setdefault(process.role, Counter())
        for tid, spent in new.items():
            percent = 100 * (spent - old.get(tid, 0.0)) / seconds
            totals[process.role] = totals.get(process.role, 0.0) + percent
            busiest[process.role] = max(busiest.get(process.role, 0.0), percent)
            of_role[process.name(tid)] += percent  # type: ignore[assignment]
    return {
        role: {
            "percent": total,
            "busiest": busiest[role],
            "threads": {
                name: it for name, it in threads[role].most_common() if it >= LEAST_PERCENT
            },
        }
        for role, total in totals.items()
    }


# ---- threads that spin ----


def what_spinners_do(
    processes: list[Process], before: Snapshot, after: Snapshot, num_samples: int = NUM_SAMPLES
) -> list[Row]:
    """Look at the threads that took most of a processor between two moments.

    They should be at it still: this looks at them several times, for as long as that takes. What
    the kernel says of a thread is in `doing`, the Python functions that it is in are in `stack`.
    """
    spinners = [
        (process, tid, share)
        for process, old, new in zip(processes, before.cpu_s, after.cpu_s, strict=True)
        for tid, spent in new.items()
        if (share := (spent - old.get(tid, 0.0)) / (after.at - before.at)) > SPINNING_SHARE
    ]
    states: list[Counter[str]] = [Counter() for _ in spinners]
    asked = {process.stacks_at for process, *_ in spinners}
    questions = {address: Question(address, num_samples, SAMPLE_S) for address in asked}
    for _ in range(num_samples if spinners else 0):
        for counts, (process, tid, _share) in zip(states, spinners, strict=True):
            counts[_state(process.pid, tid)] += 1
        time.sleep(SAMPLE_S)
    stacks = {address: question.answer() for address, question in questions.items()}
    return [
        {
            "process": process.role,
            "thread": process.name(tid),
            "percent": 100 * share,
            "doing": _shares(counts),
            "stack": _stack(stacks[process.stacks_at], tid),
        }
        for counts, (process, tid, share) in zip(states, spinners, strict=True)
    ]


def _state(pid: int, tid: int) -> str:
    """Return what a thread does in this moment: running in user mode, or in which system call."""
    fields = _read(pid, tid, "syscall").split()
    if fields and fields[0] not in ("running", "-1"):
        number = int(fields[0])
        channel = _read(pid, tid, "wchan").strip("\0 \n")
        name = SYSCALLS.get(number, f"system call {number}")
        return f"{name} ({channel})" if channel not in ("", "0") else name
    stat = _read(pid, tid, "stat").rpartition(")")[2].split()
    if not stat:
        return "ended"
    return "running" if stat[0] == "R" else f"state {stat[0]}"


def _shares(counts: "Counter[str]") -> Row:
    total = sum(counts.values())
    return {what: round(100 * number / total, 1) for what, number in counts.most_common(NUM_NAMED)}


def _stack(stacks: Stacks | None, tid: int) -> list[str] | Row:
    """Return the innermost functions of a thread, or why they aren't known."""
    if stacks is None:
        return missing("the process doesn't say what its threads do")
    return stacks.get(tid) or missing("no Python runs in this thread")
