"""CPU time of a server's processes and threads, from /proc."""

import os
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

ENGINE, FRONT_END, WORKER, OTHER = ROLES = ("engine", "front_end", "worker", "other")
MARKS = {"EngineCor": ENGINE, "vllm-rs": FRONT_END, "APIServer": FRONT_END, "Worker": WORKER}
"""What a process's name or command has in it."""
HELPERS = ("resource_tracker", "compile_worker")


@dataclass(frozen=True)
class Threads:
    """The CPU seconds that each thread of a tree of processes has taken so far."""

    seconds: dict[tuple[int, int], float]
    names: dict[tuple[int, int], tuple[str, str]]
    """Of each process and thread: the process's role and the thread's name."""

    @classmethod
    def of(cls, pid: int) -> "Threads":
        """Look at a launcher and all of its descendants."""
        seconds, names = {}, {}
        for process, role in _roles(pid).items():
            for thread in _listed(process):
                spent = _cpu_s(process, thread)
                if spent is not None:
                    seconds[process, thread] = spent
                    names[process, thread] = role, _read(process, thread, "comm").strip()
        return cls(seconds, names)

    def since(self, before: "Threads", wall_s: float, tokens: int) -> dict[str, float]:
        """Return metrics of the time since an earlier look.

        `cpu_NAME_us_per_token` of each role, `cpu_NAME_cores`, and `cpu_NAME_busiest_percent`, of
        the busiest thread.
        """
        spent: dict[str, float] = defaultdict(float)
        busiest: dict[str, float] = defaultdict(float)
        for key, now in self.seconds.items():
            role, took = self.names[key][0], now - before.seconds.get(key, 0.0)
            spent[role] += took
            busiest[role] = max(busiest[role], 100 * took / wall_s)
        metrics = {}
        for role, took in spent.items():
            metrics[f"cpu_{role}_cores"] = took / wall_s
            metrics[f"cpu_{role}_busiest_percent"] = busiest[role]
            if tokens:
                metrics[f"cpu_{role}_us_per_token"] = 1e6 * took / tokens
        return metrics


def _roles(launcher: int) -> dict[int, str]:
    """Return the processes of a server; one that serves by itself is the front end."""
    found = {}
    with suppress(psutil.Error):
        for process in psutil.Process(launcher).children(recursive=True):
            with suppress(psutil.Error):
                text = " ".join([process.name(), *process.cmdline()])
                if not any(it in text for it in HELPERS):
                    marks = (role for mark, role in MARKS.items() if mark in text)
                    found[process.pid] = next(marks, OTHER)
    served_by_child = FRONT_END in found.values()
    return found | {launcher: OTHER if served_by_child else FRONT_END}


def _listed(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    return []


def _cpu_s(pid: int, tid: int) -> float | None:
    # In nanoseconds, where the kernel counts them; else in ticks of 10 ms.
    fields = _read(pid, tid, "schedstat").split()
    if fields and int(fields[0]):
        return int(fields[0]) / 1e9
    ticks = _read(pid, tid, "stat").rpartition(")")[2].split()
    return (int(ticks[11]) + int(ticks[12])) / os.sysconf("SC_CLK_TCK") if ticks else None


def _read(pid: int, tid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/task/{tid}/{name}").read_text()
    except (OSError, ValueError):
        return ""
