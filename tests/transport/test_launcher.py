"""An engine ends with the process that has started it, be it in the midst of something or not."""

import os
import select
import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(180)

KINDS = ("idle", "hangs", "pidfds are forbidden", "Python has no pidfds")
LAUNCHER = """
import multiprocessing, os, queue, sys, time, types
import vllm.v1.engine.core
from sparksched.engine import launcher

def forbidden(pid):
    raise PermissionError

def say(line):
    # Without a buffer, print writes a line in two parts, and another process may write between.
    os.write(1, f"{line}\\n".encode())

def engine(kind):
    if kind == "pidfds are forbidden":
        os.pidfd_open = forbidden
    if kind == "Python has no pidfds":
        del os.pidfd_open
    stub = types.SimpleNamespace(input_queue=queue.Queue())
    launcher.watch_launcher(stub)
    say(f"process {os.getpid()}")
    if kind == "hangs":
        time.sleep(1000)
    stub.input_queue.get()
    try:
        launcher.fail(stub)
    except RuntimeError as error:
        say(f"{kind}: {error}")

for kind in sys.argv[1:]:
    multiprocessing.get_context("fork").Process(target=engine, args=[kind]).start()
time.sleep(1000)
"""


def test_the_launcher_is_killed() -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, *KINDS], stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    started = (line for line in launcher.stdout if line.startswith("process"))
    pids = [int(next(started).split()[1]) for _ in KINDS]
    ends = [select.poll() for _ in KINDS]
    for ended, pid in zip(ends, pids, strict=True):
        ended.register(os.pidfd_open(pid), select.POLLIN)
    try:
        assert not any(ended.poll(100) for ended in ends)
    finally:
        launcher.kill()
        launcher.wait()
    assert all(ended.poll(60_000) for ended in ends)
    gone = ": sparksched: the process that has started this engine is gone"
    said = [line.partition(gone)[0] for line in launcher.stdout if gone in line]
    assert sorted(said) == sorted(set(KINDS) - {"hangs"})
