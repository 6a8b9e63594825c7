"""docs/changes-in-vllm.md lists what is replaced in vLLM, and nothing else."""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
from engine.harness import restored_vllm
from sparksched import plugin
from sparksched.compat import patching
from sparksched.engine import hooks
from sparksched.trace import engine_end

pytestmark = pytest.mark.release

PAGE = Path(__file__).resolve().parents[2] / "docs/changes-in-vllm.md"
MODULES = ("core", "core_client", "async_llm", "output_processor")


@pytest.fixture
def replaced() -> Iterator[set[str]]:
    """Yield the names of what is replaced meanwhile."""
    names: set[str] = set()
    with restored_vllm():
        replace = patching.replace

        def noting_replace(owner: object, name: str, make: object) -> None:
            assert isinstance(owner, ModuleType | type)
            module = owner.__name__ if isinstance(owner, ModuleType) else owner.__module__
            path = "" if isinstance(owner, ModuleType) else f".{owner.__qualname__}"
            names.add(f"{module}{path}.{name}")
            replace(owner, name, make)  # type: ignore[arg-type]

        with mock.patch.object(patching, "replace", noting_replace):
            yield names


def test_the_page_lists_all_replacements(
    replaced: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_SCHEDULER", "sparksched")
    monkeypatch.setenv("SPARKSCHED_RECORD", "trace")
    for name in MODULES:
        importlib.import_module(f"vllm.v1.engine.{name}")
    importlib.import_module("vllm.v1.metrics.loggers")
    importlib.import_module("vllm.entrypoints.serve.instrumentator.metrics")
    plugin.register()
    cache_config = SimpleNamespace(enable_prefix_caching=False)
    scheduler = SimpleNamespace(vllm_config=SimpleNamespace(cache_config=cache_config))
    hooks.prepare_engine(scheduler)  # type: ignore[arg-type]
    engine_end.prepare_engine()
    listed = re.findall(r"^\| `((?:vllm|prometheus_client)\.[\w.]+)` \|", PAGE.read_text(), re.M)
    assert len(listed) == len(set(listed))
    assert replaced == set(listed)


def test_each_switch_is_known() -> None:
    """What the page says of variables is true of the environment's readers."""
    readers = (PAGE.parents[1] / "python/sparksched/environment.py").read_text()
    switches = set(re.findall(r"`(\w+)=\w+`", PAGE.read_text()))
    assert switches == {
        "VLLM_SCHEDULER",
        "SPARKSCHED_TRANSPORT",
        "SPARKSCHED_FRONT_END",
        "SPARKSCHED_METRICS",
    }
    assert all(f'"{switch}"' in readers for switch in switches)
