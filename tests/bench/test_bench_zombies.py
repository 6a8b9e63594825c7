"""Processes that have ended, and that nobody has asked how, keep no one waiting."""

import os
import subprocess
import sys

from bench.serving import guard


def test_a_group_of_ended_processes_is_not_alive() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1, process_group=0)
    assert process.stdin is not None
    assert guard.is_alive(process.pid)
    process.stdin.close()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    os.killpg(process.pid, 0)  # the kernel still knows the group
    assert not guard.is_alive(process.pid)
    process.wait()
