"""What is asked of verification, what it refuses, and what it says of what it finds."""

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from sparksched import compat, environment
from sparksched import scheduler as spark_scheduler
from sparksched.scheduler import SparkScheduler
from sparksched.verify import report
from sparksched.verify.compare import first_difference
from sparksched.verify.shown import MAX_ITEMS, shown
from vllm.v1.core.sched.output import CachedRequestData
from vllm.v1.engine import EngineCoreOutput, FinishReason

SECRET = 190_521
PLAIN_CONFIG: Any = SimpleNamespace(kv_transfer_config=None, ec_transfer_config=None)
CONNECTOR_CONFIG: Any = SimpleNamespace(
    kv_transfer_config=SimpleNamespace(kv_connector="OffloadingConnector")
)
EC_CONNECTOR_CONFIG: Any = SimpleNamespace(
    kv_transfer_config=None,
    ec_transfer_config=SimpleNamespace(ec_connector="ECExampleConnector"),
)


@pytest.fixture(autouse=True)
def variables() -> Iterator[None]:
    with mock.patch.dict(os.environ):
        for name in ("SPARKSCHED_VERIFY", "SPARKSCHED_STRICT"):
            os.environ.pop(name, None)
        yield


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    messages: list[str] = []

    def warn_or_raise(warning: str, error: str) -> None:
        if environment.is_strict():
            raise RuntimeError(error)
        messages.append(warning)

    with mock.patch.object(compat, "warn_or_raise", warn_or_raise):
        yield messages


# ----------------------------------------------------------------------------------------
# What can't be verified
# ----------------------------------------------------------------------------------------


class SchedulerOfOnesOwn(SparkScheduler):
    """What a user may put in the place of ours."""


@pytest.mark.parametrize(
    ("cls", "config", "name"),
    [
        (SparkScheduler, CONNECTOR_CONFIG, "the KV connector OffloadingConnector"),
        (SparkScheduler, EC_CONNECTOR_CONFIG, "the EC connector ECExampleConnector"),
        (SchedulerOfOnesOwn, PLAIN_CONFIG, "SchedulerOfOnesOwn"),
    ],
)
def test_refused_by_name(cls: type[Any], config: Any, name: str, warnings: list[str]) -> None:
    os.environ["SPARKSCHED_VERIFY"] = "stop"
    assert spark_scheduler.verifying_cls(cls, config) is cls
    (warning,) = warnings
    assert warning.startswith("sparksched: running without verification: ")
    assert name in warning
    os.environ["SPARKSCHED_STRICT"] = "1"
    with pytest.raises(RuntimeError, match=f"can't be verified: .*{name}"):
        spark_scheduler.verifying_cls(cls, config)


# ----------------------------------------------------------------------------------------
# What is said of a difference
# ----------------------------------------------------------------------------------------


def described(reference: object, candidate: object) -> str:
    difference = first_difference(reference, candidate, "schedule()")
    assert difference is not None
    return report.describe(difference, step=7)


def cached(**fields: Any) -> CachedRequestData:
    data = CachedRequestData.make_empty()
    for name, value in fields.items():
        setattr(data, name, value)
    return data


def test_a_difference_names_step_field_request_and_values() -> None:
    ids = ["a", "b"]
    text = described(
        cached(req_ids=ids, num_computed_tokens=[3, 4]),
        cached(req_ids=ids, num_computed_tokens=[3, 5]),
    )
    assert text == (
        "the schedulers differ in step 7 at schedule().num_computed_tokens[1] (request 'b'): "
        "vLLM's has 4, sparksched's 5"
    )
    text = described(
        [EngineCoreOutput("a", [1], finish_reason=FinishReason.STOP)], [EngineCoreOutput("a", [1])]
    )
    assert "at type of schedule()[0].finish_reason (request 'a')" in text
    assert "FinishReason.STOP" in text
    assert "sparksched's None" in text


@pytest.mark.parametrize("field", ["new_token_ids", "stop_reason", "trace_headers"])
@pytest.mark.parametrize("value", [SECRET, [SECRET], {"name": [SECRET]}], ids=repr)
def test_a_difference_keeps_secrets(field: str, value: object) -> None:
    shorter = [] if isinstance(value, list) else None
    for pair in ((value, shorter), (shorter, value), (value, [1])):
        outputs = [EngineCoreOutput("a", []), EngineCoreOutput("a", [])]
        for output, content in zip(outputs, pair, strict=True):
            setattr(output, field, content)
        text = described(*outputs)
        assert f"schedule().{field}" in text
        assert str(SECRET) not in text


def test_objects_are_named_and_not_shown() -> None:
    outputs = [EngineCoreOutput(f"request-{number}", [SECRET]) for number in range(MAX_ITEMS + 4)]
    text = shown(outputs)
    assert text.startswith("[EngineCoreOutput of 'request-0', ")
    assert text.endswith(f"... {MAX_ITEMS + 4} in all]")
    assert str(SECRET) not in text
