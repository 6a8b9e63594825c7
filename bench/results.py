"""Results as data: a CSV file with a row for each metric of a run.

| column | |
| --- | --- |
| case, point | what was measured: a file of `bench/cases`, and one of its points |
| side | the server: a name of `bench/sides.toml` |
| round | a number; empty: of no round |
| metric, value | a name with its unit, and a number |
| model, filler | and whose random weights it had: `bench`, `vllm` or `none` |
| vllm, commit, gpu, cpu, cores, date | where and with what it ran |
"""

import csv
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "bench" / "results"
NO_GPU = "none"
KEY = ("case", "point", "side", "round", "metric", "value")
SUBJECT = ("model", "filler")
PLACE = ("vllm", "commit", "gpu", "cpu", "cores", "date")
COLUMNS = (*KEY, *SUBJECT, *PLACE)


class Results:
    """A CSV file that grows; each metric is there as soon as it was measured."""

    def __init__(self, folder: Path | None, case: str, **subject: Any) -> None:
        """Append to CASE.csv in a folder, or only remember.

        Args:
            folder: It is made; rows that the file has stay.
            case: What is measured.
            subject: Values of `model` and `filler`.

        """
        self.rows: list[dict[str, Any]] = []
        self._path = path = None if folder is None else folder / f"{case}.csv"
        self.same: dict[str, Any] = {"case": case, **subject, **describe_run()}
        if path is not None and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w", newline="") as file:
                csv.writer(file).writerow(COLUMNS)

    def add(
        self,
        point: str,
        side: str,
        number: int | None,
        metrics: Mapping[str, float | None],
        **subject: Any,
    ) -> None:
        """Append the metrics of one round of one side; those that are None are left out."""
        run = self.same | subject | {"point": point, "side": side}
        run["round"] = "" if number is None else number
        found = {name: value for name, value in metrics.items() if value is not None}
        added = [run | {"metric": name, "value": f"{value:.6g}"} for name, value in found.items()]
        self.rows += added
        if self._path is not None:
            with self._path.open("a", newline="") as file:
                csv.DictWriter(file, COLUMNS).writerows(added)

    def show(self) -> None:
        """Print all of it."""
        from bench.report import as_frame, whole_report

        print(whole_report(as_frame(self.rows)))


def describe_run() -> dict[str, Any]:
    """Return versions, processor, GPU, commit and day: the columns of `PLACE`."""
    try:
        vllm = version("vllm")
    except PackageNotFoundError:
        vllm = "none"
    return {
        "vllm": vllm.partition("+")[0],
        "commit": _commit(),
        "gpu": gpu_name(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def gpu_name() -> str:
    """Return the kind of GPU that may be used, `none` without one."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen == "":
        return NO_GPU
    which = [f"--id={chosen}"] if chosen else []
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", *which]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return NO_GPU
    names = done.stdout.split("\n")[:-1]
    return f"{len(names)} x {names[0]}" if len(names) > 1 else (names or [NO_GPU])[0]


def _commit() -> str:
    """Return what SPARKSCHED_COMMIT says, for a copy; else the commit, marked if files differ."""
    if named := os.environ.get("SPARKSCHED_COMMIT"):
        return named
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", ".", ":!bench/results")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit}-dirty" if changed else commit


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
