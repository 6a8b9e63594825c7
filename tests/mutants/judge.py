"""One change to the Rust code, and whether a test notices it.

Changes are made in a copy of the code, so that the working tree stays as it is. One target folder
serves all of them, so that only what depends on a change is compiled.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "target" / "mutants"
TREE = WORK / "tree"
LOG = WORK / "log"
COPIED = ("rust", "python", ".cargo", "Cargo.toml", "Cargo.lock")
COMPILER = "compiler"
# Several times what any step of a stage takes: what needs longer hangs, and is noticed by that.
QUICK_LIMIT_S = 90
SLOW_LIMIT_S = 300
# A mutant may ask for memory without end.
MEMORY_BYTES = 12 << 30

# Smaller than in `make test` where tests repeat the same: a mutant is wrong in most repetitions.
SIZES = {
    "SPARKSCHED_CORE_OPERATIONS": "200000",
    "SPARKSCHED_FAULT_ROUNDS": "2",
    "SPARKSCHED_LONG_STOPS": "2",
    "SPARKSCHED_LONGEST_STOP_S": "2",
    "SPARKSCHED_WAKE_UPS": "20000",
    "SPARKSCHED_SOAK_MESSAGES": "100000",
    "SPARKSCHED_LOOM_PREEMPTIONS": "3",
}
# All configurations for a short time, and the one with the most special cases for longer.
SCENARIOS = (
    ("--seeds", "0:1", "--steps", "80"),
    ("--config", "states-by-eagle", "--seeds", "0:6", "--steps", "150"),
)
RING = ("cargo", "test", "--locked", "--quiet", "-p", "sparksched-ring")
QUICK = ("refusals", "meters", "properties")
SLOW = ("faults", "soak", "wake_ups")


@dataclass(frozen=True)
class Mutant:
    """A change to one place; its name says where it is, with line and column."""

    name: str
    key: str
    crate: str
    file: str
    begin: tuple[int, int]
    end: tuple[int, int]
    replacement: str
    diff: str

    @classmethod
    def from_listed(cls, entry: dict[str, Any]) -> Mutant:
        """Read an entry of cargo-mutants' list."""
        span = entry["span"]
        removed = re.findall(r"^-(?!--)\s*(.*)", entry["diff"], re.MULTILINE)
        added = re.findall(r"^\+(?!\+\+)\s*(.*)", entry["diff"], re.MULTILINE)
        line = re.sub(r" /\* ~ .* ~ \*/", "", (added or removed)[0])
        what = re.sub(r":\d+:\d+:", ":", entry["name"], count=1)
        return cls(
            name=entry["name"],
            # Stays the same when lines are added before it.
            key=f"{what} | {line}",
            crate=entry["package"],
            file=entry["file"],
            begin=(span["start"]["line"], span["start"]["column"]),
            end=(span["end"]["line"], span["end"]["column"]),
            replacement=entry["replacement"],
            diff=entry["diff"],
        )

    def applied(self, source: str) -> str:
        """Return a file's text with the change in it."""
        lines = source.splitlines(keepends=True)

        def offset(position: tuple[int, int]) -> int:
            line, column = position
            return sum(map(len, lines[: line - 1])) + column - 1

        begin, end = offset(self.begin), offset(self.end)
        return source[:begin] + self.replacement + source[end:]


def _copy_tree() -> None:
    """Make the copy like the working tree, without touching files that are the same already."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *COPIED],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    wanted = {Path(os.fsdecode(name)) for name in listed.stdout.split(b"\0") if name}
    wanted = {name for name in wanted if (ROOT / name).is_file()}
    present = {path.relative_to(TREE) for path in TREE.rglob("*") if path.is_file()}
    for name in present - wanted:
        (TREE / name).unlink()
    for name in wanted:
        source, target = ROOT / name, TREE / name
        if name not in present or source.read_bytes() != target.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)


def _fails(
    command: tuple[str, ...], limit_s: float = SLOW_LIMIT_S, cwd: Path = TREE, **variables: str
) -> bool:
    """Run a command with all that it starts; return whether it fails, or takes too long."""
    environment = os.environ | SIZES | {"CARGO_TARGET_DIR": str(WORK / "build")} | variables
    with LOG.open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            return process.wait(limit_s) != 0
        except subprocess.TimeoutExpired:
            return True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _ring_tests(names: tuple[str, ...], limit_s: float, *more: str) -> bool:
    chosen = tuple(argument for name in names for argument in ("--test", name))
    return _fails((*RING, "--features", "test-points", *more, *chosen), limit_s)


def _loom() -> bool:
    return _fails((*RING, "--features", "loom", "--test", "loom"))


def _build_extension() -> bool:
    """Build what Python imports, and put it beside the copy's Python code."""
    package = ("-p", "sparksched-python", "--features", "pyo3/extension-module")
    if _fails(("cargo", "build", "--locked", "--quiet", *package)):
        return True
    library = WORK / "build" / "debug" / "libsparksched_core_python.so"
    shutil.copyfile(library, TREE / "python" / "sparksched" / "_core.abi3.so")
    return False


def _differential() -> bool:
    return _build_extension() or any(_differs(*scenarios) for scenarios in SCENARIOS)


def _differs(*scenarios: str) -> bool:
    command = (sys.executable, "-m", "tests.differential", *scenarios)
    return _fails(command, cwd=ROOT, PYTHONPATH=str(TREE / "python"))


Stage = tuple[str, Callable[[], bool]]
# What is tried on all mutants of a crate in turn, and then on those that it doesn't notice.
QUICK_STAGES: dict[str, list[Stage]] = {
    "sparksched-core": [
        (
            "Rust tests",
            lambda: _fails(("cargo", "test", "--locked", "--quiet", "-p", "sparksched-core")),
        ),
    ],
    "sparksched-ring": [
        ("quick Rust tests", lambda: _ring_tests(QUICK, QUICK_LIMIT_S, "--lib")),
        ("loom", _loom),
    ],
}
SLOW_STAGES: dict[str, list[Stage]] = {
    "sparksched-core": [("differential", _differential)],
    "sparksched-ring": [("slow Rust tests", lambda: _ring_tests(SLOW, SLOW_LIMIT_S))],
}


class Judge:
    """Runs tests on one mutant after the other, and each test on none before its first."""

    def __init__(self) -> None:
        # Of all that is started here.
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        self._sound: set[str] = set()

    def noticed_by(self, mutant: Mutant, stages: list[Stage]) -> str | None:
        """Return which of some stages notices a mutant first; `None` if none does."""
        try:
            for name, stage in stages:
                self._check(name, stage)
                path = TREE / mutant.file
                path.write_text(mutant.applied((ROOT / mutant.file).read_text()))
                if stage():
                    return COMPILER if "could not compile" in LOG.read_text() else name
            return None
        finally:
            # Tests may have left notes on what failed, too.
            _copy_tree()

    def _check(self, name: str, stage: Callable[[], bool]) -> None:
        if name not in self._sound:
            _copy_tree()
            # In a second try everything is built.
            if stage() and stage():
                raise SystemExit(f"{name}: fails without a mutant, see {LOG}")
            self._sound.add(name)
