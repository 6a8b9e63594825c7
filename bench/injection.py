"""Changes modules of vLLM and of sparksched as soon as a process has imported them.

It is imported by every Python process of a server, so it imports nothing heavy by itself.
"""

import functools
from types import ModuleType

from sparksched.compat.patching import after_import

ENGINE = "vllm.v1.engine.core"
WORKER = "vllm.v1.worker.worker_base"
API_SERVER = "vllm.entrypoints.launchers.api_server.entry"


def install(address: str) -> None:
    """Have the modules of engine, worker and API server changed once they are loaded."""
    after_import(ENGINE, _change_engine)
    after_import(WORKER, _change_worker)
    after_import(API_SERVER, functools.partial(_change_api_server, address))


def _change_engine(module: ModuleType) -> None:
    from bench.serving import engine_probe

    engine_probe.install(module)


def _change_worker(module: ModuleType) -> None:
    from bench.serving import compilations

    compilations.install(module)


def _change_api_server(address: str, module: ModuleType) -> None:
    from bench.serving import api_server

    api_server.install(module, address)
