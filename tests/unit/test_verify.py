"""What is asked of verification, what it refuses, and what it says of what it finds."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from sparksched import compat, environment
from sparksched import scheduler as spark_scheduler
from sparksched.scheduler import SparkScheduler
from sparksched.verify import copies, report
from sparksched.verify.compare import first_difference
from sparksched.verify.scheduler import VerifyingScheduler
from sparksched.verify.shadow import Shadow
from sparksched.verify.shown import MAX_ITEMS, shown
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.request import Request

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


def test_nothing_is_verified_unasked() -> None:
    assert spark_scheduler.verifying_cls(SparkScheduler, CONNECTOR_CONFIG) is SparkScheduler


def test_verified() -> None:
    os.environ["SPARKSCHED_VERIFY"] = "1"
    assert spark_scheduler.verifying_cls(SparkScheduler, PLAIN_CONFIG) is VerifyingScheduler


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


def test_errors_are_named_and_not_shown(tmp_path: Path) -> None:
    assert shown(ValueError(f"{tmp_path} {SECRET}")) == "ValueError"


class WithAttributes:
    """An object that `==` only compares by identity."""

    def __init__(self, **attributes: int) -> None:
        vars(self).update(attributes)


@pytest.mark.parametrize(
    ("reference", "candidate"), [({"a": 1}, {}), ({}, {"a": 1}), ({"a": 1}, {"b": 1})]
)
def test_objects_with_different_attributes(
    reference: dict[str, int], candidate: dict[str, int]
) -> None:
    pair = WithAttributes(**reference), WithAttributes(**candidate)
    difference = first_difference(*pair, "it")
    assert difference is not None
    assert difference.path == "attributes of it"
    assert (difference.reference, difference.candidate) == (list(reference), list(candidate))


# ----------------------------------------------------------------------------------------
# What vLLM's scheduler has of its own
# ----------------------------------------------------------------------------------------


def test_a_request_of_its_own() -> None:
    feature = MultiModalFeatureSpec(
        data=None, modality="image", identifier="a", mm_position=PlaceholderRange(1, 2)
    )
    original = Request(
        "a", [1, 2, 3], SamplingParams(max_tokens=4), None, mm_features=[feature], resumable=True
    )
    twin = copies.copy_of_request(original, hasher=lambda _: [b"hash"])
    assert first_difference(original, twin, "request", {"_block_hasher", "block_hashes"}) is None
    assert twin.block_hashes == [b"hash"]
    # What a session's next input does.
    twin.mm_features[0].mm_position = PlaceholderRange(5, 2)
    twin.prompt_token_ids.append(4)
    twin.append_output_token_ids([7])
    assert feature.mm_position.offset == 1
    assert original.prompt_token_ids == [1, 2, 3]
    assert list(original.all_token_ids) == [1, 2, 3]


def test_a_step_as_the_workers_have_left_it() -> None:
    output, twin = SchedulerOutput.make_empty(), SchedulerOutput.make_empty()
    output.num_scheduled_tokens = {"a": 2}
    output.total_num_scheduled_tokens = 2
    output.scheduled_spec_decode_tokens = {"a": [5]}
    output.num_invalid_spec_tokens = {"a": 1}
    copies.take_over_changes(twin, output)
    assert twin == output
    output.num_scheduled_tokens.clear()
    output.scheduled_spec_decode_tokens["a"].clear()
    assert twin.num_scheduled_tokens == {"a": 2}
    assert twin.scheduled_spec_decode_tokens == {"a": [5]}


def test_outputs_that_are_lost_are_forgotten() -> None:
    shadow = Shadow.__new__(Shadow)
    shadow._steps = {}
    for _ in range(3):
        shadow.pair(SchedulerOutput.make_empty(), SchedulerOutput.make_empty())
    kept, own = SchedulerOutput.make_empty(), SchedulerOutput.make_empty()
    shadow.pair(kept, own)
    assert shadow.own(kept) is own
    assert len(shadow._steps) == 1
    assert shadow.own(own) is own
