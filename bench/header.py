"""Where and with what a benchmark ran, for the head of its result."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NO_GPU = "none"


def describe_run() -> dict[str, str | int]:
    """Return versions, processor, GPU, commit and time."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": gpu_model() or NO_GPU,
        "python": platform.python_version(),
        "vllm": version("vllm"),
        "torch": version("torch"),
        "sparksched": version("sparksched"),
    }


def ask_driver(fields: str, form: str) -> str | None:
    """Return what NVIDIA's driver says of the GPUs that this process may use; None without it."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    which = [f"--id={chosen}"] if chosen else []
    command = ["nvidia-smi", f"--query-gpu={fields}", f"--format={form}", *which]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def gpu_model() -> str | None:
    """Return names and driver of the GPUs that may be used, as NVIDIA's driver says, or None."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return None
    said = ask_driver("name,driver_version", "csv,noheader")
    if said is None:
        return _gpu_of_driver()
    gpus = [tuple(part.strip() for part in line.split(",")) for line in said.splitlines()]
    if not gpus:
        return None
    names = sorted({name for name, *_ in gpus})
    count = f"{len(gpus)} x " if len(gpus) > 1 else ""
    return f"{count}{', '.join(names)}, driver {gpus[0][-1]}"


def _gpu_of_driver() -> str | None:
    """Return the first GPU's name by the driver's files, where its program is not at hand."""
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in path.read_text().splitlines():
            if line.startswith("Model:"):
                return line.partition(":")[2].strip()
    return None


def _commit() -> str:
    """Return the commit, marked if files differ from it.

    Results of other benchmarks make no difference. Outside of a checkout it is the one that
    SPARKSCHED_COMMIT names, marked because nothing can be compared with it, or `unknown`.
    """
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", ".", ":!bench/results")
    except (OSError, subprocess.CalledProcessError):
        named = os.environ.get("SPARKSCHED_COMMIT")
        return f"{named}-unchecked" if named else "unknown"
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
