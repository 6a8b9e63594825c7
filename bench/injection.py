"""Changes modules of vLLM and of sparksched as soon as a process has imported them.

It is imported by every Python process of a server, so it imports nothing heavy by itself.
"""

import functools
import importlib.abc
import importlib.machinery
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

Change = Callable[[ModuleType], None]

ENGINE = "vllm.v1.engine.core"
WORKER = "vllm.v1.worker.worker_base"
API_SERVER = "vllm.entrypoints.launchers.api_server.entry"


def install(address: str) -> None:
    """Have the modules of engine, worker and API server changed once they are loaded."""
    change_once_loaded(
        {
            ENGINE: _change_engine,
            WORKER: _change_worker,
            API_SERVER: functools.partial(_change_api_server, address),
        }
    )


def change_once_loaded(changes: Mapping[str, Change]) -> None:
    """Have modules changed, by their names, once they are loaded.

    `PathFinder` itself is wrapped, and not a finder put before it: sparksched has finders of its
    own for some of vLLM's modules, and the first finder that finds a module is the last one asked.
    """
    find = importlib.machinery.PathFinder.find_spec

    def find_spec(
        fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = find(fullname, path, target)
        change = changes.get(fullname)
        if change is not None and spec is not None and spec.loader is not None:
            _call_after_loading(spec.loader, change)
        return spec

    importlib.machinery.PathFinder.find_spec = staticmethod(find_spec)  # type: ignore


def _call_after_loading(loader: importlib.abc.Loader, change: Change) -> None:
    load = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        load(module)
        change(module)

    loader.exec_module = exec_module  # type: ignore[method-assign]


def _change_engine(module: ModuleType) -> None:
    from bench.serving import engine_probe

    engine_probe.install(module)


def _change_worker(module: ModuleType) -> None:
    from bench.serving import compilations

    compilations.install(module)


def _change_api_server(address: str, module: ModuleType) -> None:
    from bench.serving import api_server

    api_server.install(module, address)
