"""When the front end's functions are replaced, and when they stay vLLM's."""

import functools
import os
from collections.abc import Iterator
from dataclasses import make_dataclass
from typing import Any
from unittest import mock

import pytest
from engine.harness import restored_vllm
from sparksched import compat, plugin
from sparksched.api_server import output_processor
from sparksched.compat import patching, seams
from vllm.outputs import RequestOutput
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector, RequestState
from vllm.v1.metrics.stats import IterationStats

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


def test_another_version_of_vllm_keeps_its_own() -> None:
    os.environ["VLLM_SCHEDULER"] = "sparksched"
    with mock.patch("vllm.version.__version__", "0.34.0"):
        plugin.register()
    assert not any(replaced())


def test_the_known_vllm_is_known(warnings: list[str]) -> None:
    patching.apply(seams.OUTPUTS)
    assert all(replaced())
    assert warnings == []


def another_class(*fields: str) -> Any:
    return make_dataclass("Another", fields)


@pytest.mark.parametrize("name", ["CompletionOutput", "RequestOutput", "LogprobsProcessor"])
def test_unknown_fields_keep_vllms_functions(name: str, warnings: list[str]) -> None:
    known = getattr(output_processor, name)
    fields = output_processor._parameters_of(known)
    another = another_class(*fields, "new_in_vllm")
    for function in ("update_from_output", "add"):
        setattr(another, function, known.__dict__.get(function))
    with mock.patch.object(output_processor, name, another):
        patching.apply(seams.OUTPUTS)
    assert not any(replaced())
    assert warnings == [
        "sparksched: outputs are processed by vLLM's own code: "
        f"{name} is not as sparksched knows it"
    ]


def test_an_unknown_attribute_keeps_vllms_functions(warnings: list[str]) -> None:
    init = RequestState.__init__

    @functools.wraps(init)
    def init_with_more(self: RequestState, **fields: Any) -> None:
        init(self, **fields)
        self.new_in_vllm = None

    with mock.patch.object(RequestState, "__init__", init_with_more):
        patching.apply(seams.OUTPUTS)
    assert not any(replaced())
    assert warnings == [
        "sparksched: outputs are processed by vLLM's own code: "
        "RequestState is not as sparksched knows it"
    ]


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        *REPLACED,
        *((RequestOutputCollector, name) for name in ("__init__", "get_nowait")),
        (IterationStats, "update_from_output"),
        (RequestState, "make_request_output"),
        (RequestOutput, "add"),
    ],
    ids=lambda it: it if isinstance(it, str) else it.__name__,
)
def test_functions_that_others_have_replaced_stay(
    owner: Any, name: str, warnings: list[str]
) -> None:
    function = getattr(owner, name)

    def foreign(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    with mock.patch.object(owner, name, foreign):
        patching.apply(seams.OUTPUTS)
        assert not any(replaced())
        assert getattr(owner, name) is foreign
    assert warnings == [
        "sparksched: outputs are processed by vLLM's own code: "
        f"{owner.__name__}.{name} is not vLLM's own"
    ]


def test_functions_that_are_gone_keep_the_others(
    warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(RequestState, "_new_request_output")
    patching.apply(seams.OUTPUTS)
    assert not any(replaced())
    assert len(warnings) == 1
    assert "_new_request_output" in warnings[0]
