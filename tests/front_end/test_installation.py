"""When the front end's functions are replaced, and when they stay vLLM's."""

import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import vllm.outputs
from engine.harness import restored_vllm
from sparksched import compat, plugin
from sparksched.compat import patching, seams
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector, RequestState

pytestmark = pytest.mark.release

REPLACED = [
    (OutputProcessor, "process_outputs"),
    *((RequestOutputCollector, name) for name in ("put", "get")),
]


@pytest.fixture(autouse=True)
def vllm_restored() -> Iterator[None]:
    with restored_vllm():
        yield


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    lines: list[str] = []
    with mock.patch.object(compat, "warn_or_raise", lambda warning, error: lines.append(warning)):
        yield lines


def replaced() -> list[bool]:
    return [hasattr(getattr(owner, name), patching.MARK) for owner, name in REPLACED]


@pytest.mark.parametrize("selected", [True, False])
def test_the_plugin_replaces_the_functions_if_it_is_selected(selected: bool) -> None:
    os.environ["VLLM_SCHEDULER"] = "sparksched" if selected else "vllm"
    plugin.register()
    plugin.register()
    assert replaced() == [selected] * len(REPLACED)


@pytest.mark.parametrize(("value", "expected"), [("vllm", False), ("sparksched", True), ("", True)])
def test_a_user_may_keep_vllms(value: str, expected: bool) -> None:
    os.environ["VLLM_SCHEDULER"] = "sparksched"
    os.environ["SPARKSCHED_FRONT_END"] = value
    plugin.register()
    assert replaced() == [expected] * len(REPLACED)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (OutputProcessor, "process_outputs"),
        (RequestState, "_new_request_output"),
        (vllm.outputs, "CompletionOutput"),
    ],
    ids=lambda it: it if isinstance(it, str) else it.__name__,
)
def test_what_others_have_replaced_stays(owner: Any, name: str, warnings: list[str]) -> None:
    class Foreign:
        def __new__(cls, *args: Any, **kwargs: Any) -> Any: ...

    foreign = Foreign if isinstance(getattr(owner, name), type) else Foreign.__new__
    with mock.patch.object(owner, name, foreign):
        patching.apply(seams.OUTPUTS)
        assert not any(replaced())
        assert getattr(owner, name) is foreign
    (warning,) = warnings
    assert warning.startswith("sparksched: outputs are processed by vLLM's own code: vllm.")
    assert warning.endswith(f".{name} is not vLLM's own")
