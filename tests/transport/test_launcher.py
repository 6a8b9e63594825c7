"""An engine ends with the process that has started it, be it in the midst of something or not."""

import os
import select
import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(180)

LAUNCHER = """
import multiprocessing, os, queue, sys, time, types
import vllm.v1.engine.core
from sparksched.transport.engine import launcher

def forbidden(pid):
    raise PermissionError

def engine(kind):
    if kind == "without pidfds":
        os.pidfd_open = forbidden
    stub = types.SimpleNamespace(input_queue=queue.Queue())
    launcher.watch_launcher(stub)
    print(os.getpid(), flush=True)
    if kind == "hangs":
        time.sleep(1000)
    stub.input_queue.get()
    try:
        launcher.fail(stub)
    except RuntimeError as error:
        print(error, flush=True)

multiprocessing.get_context("fork").Process(target=engine, args=sys.argv[1:]).start()
time.sleep(1000)
"""


@pytest.mark.parametrize("engine", ["idle", "hangs", "without pidfds"])
def test_the_launcher_is_killed(engine: str) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, engine], stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    pid = next(int(line) for line in launcher.stdout if line.strip().isdecimal())
    ended = select.poll()
    ended.register(os.pidfd_open(pid), select.POLLIN)
    try:
        assert not ended.poll(200)
    finally:
        launcher.kill()
        launcher.wait()
    assert ended.poll(60_000)
    said = launcher.stdout.read()
    assert ("the process that has started this engine is gone" in said) == (engine != "hangs")
