"""Puts the benchmark's probes into a vLLM server, without a change to vLLM.

Python imports a module of this name when it starts, if its directory is on PYTHONPATH. With
SPARKSCHED_BENCH_CONTROL=PATH in the environment, vLLM's API server then listens at that Unix socket
for what the benchmark wants, and its engine can note its steps; with SPARKSCHED_DEMO_PROBE=FILE
each call of a scheduler adds a line to FILE. The child of the process that SPARKSCHED_BENCH_PARENT
names ends with it: a server that outlives a killed benchmark would keep the GPU. Without any of
these nothing happens.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1


def _install() -> None:
    if os.environ.get("SPARKSCHED_BENCH_PARENT") == str(os.getppid()):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    address = os.environ.get("SPARKSCHED_BENCH_CONTROL")
    steps = os.environ.get("SPARKSCHED_DEMO_PROBE")
    if not address and not steps:
        return
    # At the end: nothing in the repository may come before what is installed.
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from bench import demo_probe, injection

    if address:
        injection.install(address)
    if steps:
        demo_probe.install(steps)


_install()
