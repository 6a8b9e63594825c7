"""Puts what the benchmark needs into the processes of a vLLM server, without a change to vLLM.

Python imports a module of this name when it starts, if its directory is on PYTHONPATH. Without the
variables nothing happens:

- SPARKSCHED_BENCH_PARENT=PID: the child of this process ends with it. A server that outlived a
  killed benchmark would keep the GPU.
- SPARKSCHED_BENCH_FILLER=bench: random weights are those of `bench.filler`.
- SPARKSCHED_BENCH_COMPILED=FILE, SPARKSCHED_BENCH_EXPERTS=FILE: see `bench.worker_notes`.
"""

import ctypes
import functools
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1
PREFIX = "SPARKSCHED_BENCH_"


def _install() -> None:
    if os.environ.get(f"{PREFIX}PARENT") == str(os.getppid()):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    filler, compiled, experts = (
        os.environ.get(PREFIX + name) for name in ("FILLER", "COMPILED", "EXPERTS")
    )
    if not (filler or compiled or experts):
        return
    # At the end: nothing in the repository may come before what is installed.
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from sparksched.compat.patching import after_import

    from bench import filler as weights
    from bench import worker_notes

    if filler == weights.OURS:
        after_import(weights.LOADER, weights.install)
    if compiled:
        note = functools.partial(worker_notes.note_compilations, path=Path(compiled))
        after_import(worker_notes.WORKER, note)
    if experts:
        note = functools.partial(worker_notes.note_experts, path=Path(experts))
        after_import(worker_notes.LOADER, note)


_install()
