"""Puts the benchmark's probes into a vLLM server, without a change to vLLM.

Python imports a module of this name when it starts, if its directory is on PYTHONPATH. With
SPARKSCHED_BENCH_CONTROL=PATH in the environment, vLLM's API server then listens at that Unix socket
for what the benchmark wants, its engine can time its phases, and each process says what its threads
do when it is asked. Without it, nothing happens.
"""

import os
import sys
from pathlib import Path


def _install() -> None:
    address = os.environ.get("SPARKSCHED_BENCH_CONTROL")
    if address:
        # At the end: nothing in the repository may come before what is installed.
        sys.path.append(str(Path(__file__).resolve().parents[3]))
        from bench.serving import injection

        injection.install(address)


_install()
