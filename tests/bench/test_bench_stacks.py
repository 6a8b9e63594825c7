"""What a benchmarked server's processes say of threads that spin."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.serving import stacks
from bench.serving.server import HOOKS
from bench.serving.threads import Process, Snapshot, what_spinners_do

SPINNING = """
import os, threading

def turn():
    pass

def spin_in_python():
    while True:
        turn()

def say():
    print(os.getpid(), flush=True)

{start}
"""
IN_THE_MAIN_THREAD = "say(); spin_in_python()"
IN_ANOTHER_THREAD = "threading.Thread(target=spin_in_python).start(); say()"
IN_A_FORK = """
if os.fork() == 0:
    say()
    spin_in_python()
os.wait()
"""


@contextmanager
def spinning(start: str, address: str, *, has_hooks: bool = True) -> Iterator[Process]:
    """Run a program with the benchmark's hooks, and what it says is spinning."""
    variables = {"PYTHONPATH": str(HOOKS), "SPARKSCHED_BENCH_CONTROL": address}
    program = subprocess.Popen(
        [sys.executable, "-c", SPINNING.format(start=start)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **(variables if has_hooks else {})},
        process_group=0,
    )
    try:
        assert program.stdout is not None
        pid = int(program.stdout.readline())
        yield Process("engine", pid, {}, stacks.address_of(address, pid))
    finally:
        os.killpg(program.pid, signal.SIGKILL)
        program.wait()


def look(process: Process) -> list[dict[str, object]]:
    """Look at all threads that have taken any time at all, on a machine however busy."""
    now = Snapshot.take([process])
    started = Snapshot(now.at - 1e-9, [dict.fromkeys(now.cpu_s[0], 0.0)])
    return what_spinners_do([process], started, now)


@pytest.mark.parametrize(
    "start",
    [IN_THE_MAIN_THREAD, IN_ANOTHER_THREAD, IN_A_FORK],
    ids=["main-thread", "another-thread", "fork"],
)
def test_a_python_thread_says_in_which_functions_it_is(start: str, tmp_path: Path) -> None:
    with spinning(start, str(tmp_path / "control")) as process:
        found = [row["stack"] for row in look(process)]
    spinning_stacks = [it for it in found if isinstance(it, list) and "spin_in_python" in str(it)]
    (stack,) = spinning_stacks
    assert len(stack) <= stacks.NUM_FRAMES
    assert any(frame.startswith("spin_in_python (<string>:") for frame in stack)


def test_a_process_that_does_not_say(tmp_path: Path) -> None:
    with spinning(IN_THE_MAIN_THREAD, str(tmp_path / "control"), has_hooks=False) as process:
        (row, *_) = look(process)
    assert row["stack"] == {"missing": "the process doesn't say what its threads do"}
    assert row["doing"]


def test_a_thread_without_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is known by what the kernel says of it."""
    monkeypatch.setattr(stacks.Question, "answer", lambda question: {})
    with spinning(IN_THE_MAIN_THREAD, str(tmp_path / "control")) as process:
        (row, *_) = look(process)
    assert row["stack"] == {"missing": "no Python runs in this thread"}
    assert row["doing"]
