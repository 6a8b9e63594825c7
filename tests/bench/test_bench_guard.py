"""A server ends with the benchmark that has started it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
BENCHMARK = """
import subprocess, sys, time
server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], process_group=0)
guard = [sys.executable, "-m", "bench.serving.guard", str(server.pid)]
subprocess.Popen(guard, stdin=subprocess.PIPE, start_new_session=True)
print(server.pid, flush=True)
time.sleep(600)
"""


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_the_server_of_a_killed_benchmark_is_stopped() -> None:
    benchmark = subprocess.Popen(
        [sys.executable, "-c", BENCHMARK], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert benchmark.stdout is not None
    server = int(benchmark.stdout.readline())
    assert is_alive(server)
    benchmark.kill()
    benchmark.wait()
    wait_until(lambda: not is_alive(server))


def test_one_that_doesnt_stop_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.serving import guard

    monkeypatch.setattr(guard, "STOP_S", 0.5)
    server = subprocess.Popen([sys.executable, "-c", STUBBORN], process_group=0)
    wait_until(lambda: b"SigIgn:\t0000000000004000" in _status(server.pid))
    guard.stop_group(server.pid)
    assert server.wait(60) == -signal.SIGKILL
    guard.stop_group(server.pid)  # nobody is left


def _status(pid: int) -> bytes:
    lines = Path(f"/proc/{pid}/status").read_bytes().splitlines()
    ignored = next(line for line in lines if line.startswith(b"SigIgn"))
    mask = int(ignored.split()[1], 16)
    return b"SigIgn:\t%016x" % (mask & 1 << (signal.SIGTERM - 1))


def test_a_guard_is_not_stopped_by_signals_meant_for_the_benchmark() -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], process_group=0
    )
    guard = subprocess.Popen(
        [sys.executable, "-m", "bench.serving.guard", str(server.pid)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
    )
    wait_until(lambda: b"0000000000004000" in _status(guard.pid))
    os.kill(guard.pid, signal.SIGINT)
    os.kill(guard.pid, signal.SIGTERM)
    time.sleep(0.2)
    assert guard.poll() is None
    assert server.poll() is None
    assert guard.stdin is not None
    guard.stdin.close()
    assert server.wait(60) == -signal.SIGTERM
    assert guard.wait(60) == 0
