"""Which scheduler, which block hasher and which requests an engine ends up with."""

import logging
import os
from pathlib import Path
from types import FunctionType
from unittest import mock

import pytest
import torch
from sparksched._core import NativeBlockHasher
from sparksched.scheduler import SparkScheduler
from vllm.config.scheduler import SchedulerConfig
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import FinishReason
from vllm.v1.engine import core as engine_module
from vllm.v1.engine.core import EngineCore

from .harness import ASYNC_SCHEDULING, Choice, DrivenEngine, new_request, running_engine

NATIVE_CHOICE = pytest.mark.parametrize(
    "choice", [Choice.PLUGIN, Choice.SCHEDULER_CLS], ids=["plugin", "scheduler-cls"]
)

UNSUPPORTED = {"prefix_cache_retention_interval": 2**31}


def assert_is_stock(engine: DrivenEngine, *, async_scheduling: bool) -> None:
    """Check that scheduler and hasher are vLLM's own."""
    assert type(engine.core.scheduler) is (AsyncScheduler if async_scheduling else Scheduler)
    assert isinstance(engine.core.request_block_hasher, FunctionType)


@ASYNC_SCHEDULING
@NATIVE_CHOICE
def test_native(choice: Choice, async_scheduling: bool, model_directory: Path) -> None:
    with running_engine(choice, model_directory, async_scheduling=async_scheduling) as engine:
        assert type(engine.core.scheduler) is SparkScheduler
        assert type(engine.core.request_block_hasher) is NativeBlockHasher
        request = engine.add(new_request("a", [1] * 50))
        assert len(request.block_hashes) == 3
        engine.run()
    assert len(engine.record.tokens["a"]) > 0


@ASYNC_SCHEDULING
@NATIVE_CHOICE
def test_unsupported_configuration(
    choice: Choice,
    async_scheduling: bool,
    model_directory: Path,
    warnings_of_sparksched: list[str],
) -> None:
    with running_engine(
        choice, model_directory, async_scheduling=async_scheduling, **UNSUPPORTED
    ) as engine:
        assert_is_stock(engine, async_scheduling=async_scheduling)
        engine.add(new_request("a", [1] * 50))
        engine.run()
    assert len(engine.record.tokens["a"]) > 0
    (warning,) = warnings_of_sparksched
    assert warning.startswith(
        "sparksched: using vLLM's own scheduler: a limit of 2^31 or more is not supported: "
    )


def test_long_prompts_are_not_paced_where_vllms_scheduler_runs(
    model_directory: Path, warnings_of_sparksched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARKSCHED_MAX_STALL_MS", "100")
    settings = {"async_scheduling": True} | UNSUPPORTED
    with running_engine(Choice.PLUGIN, model_directory, **settings):
        pass
    _, warning = warnings_of_sparksched
    assert warning == "sparksched: long prompts are not paced: vLLM's own scheduler runs"


@NATIVE_CHOICE
def test_unsupported_configuration_in_strict_mode(choice: Choice, model_directory: Path) -> None:
    with (
        pytest.raises(RuntimeError, match=r"sparksched: a limit of 2\^31 or more is not supported"),
        running_engine(choice, model_directory, async_scheduling=True, strict=True, **UNSUPPORTED),
    ):
        pass


def test_not_selected(model_directory: Path, warnings_of_sparksched: list[str]) -> None:
    with running_engine(Choice.STOCK, model_directory, async_scheduling=True) as engine:
        assert_is_stock(engine, async_scheduling=True)
    assert warnings_of_sparksched == []


def test_an_engine_without_prefix_cache_leaves_the_next_one_alone(model_directory: Path) -> None:
    """It asks for no hasher, and so must not have one laid out for whoever asks next."""
    with running_engine(
        Choice.PLUGIN, model_directory, async_scheduling=True, enable_prefix_caching=False
    ) as native:
        assert type(native.core.scheduler) is SparkScheduler
        assert native.core.request_block_hasher is None
        with running_engine(
            Choice.PLUGIN, model_directory, async_scheduling=True, **UNSUPPORTED
        ) as other:
            assert_is_stock(other, async_scheduling=True)


def test_everything_is_restored(model_directory: Path) -> None:
    """What the tests of this folder rely on."""
    functions = [
        (SchedulerConfig, "get_scheduler_cls"),
        (engine_module, "get_request_block_hasher"),
        (EngineCore, "preprocess_add_request"),
    ]
    before = [getattr(owner, name) for owner, name in functions]
    environment = dict(os.environ)
    with running_engine(Choice.PLUGIN, model_directory, async_scheduling=True):
        assert [getattr(owner, name) for owner, name in functions] != before
    assert [getattr(owner, name) for owner, name in functions] == before
    assert dict(os.environ) == environment


# ----------------------------------------------------------------------------------------
# Requests that are refused
# ----------------------------------------------------------------------------------------


UNSUPPORTED_REQUESTS = {
    "has prompt embeddings, but the server": {"prompt_embeds": torch.zeros(20, 32)},
    "is a request without a prompt": {"prompt_token_ids": []},
}


@ASYNC_SCHEDULING
@NATIVE_CHOICE
@pytest.mark.parametrize("kind", UNSUPPORTED_REQUESTS)
def test_an_unsupported_request_fails_alone(
    kind: str, choice: Choice, async_scheduling: bool, model_directory: Path
) -> None:
    """The front end refuses them for want of a configuration, but the engine can't rely on it."""
    request = new_request("other", **{"prompt_token_ids": [2] * 20} | UNSUPPORTED_REQUESTS[kind])
    with running_engine(choice, model_directory, async_scheduling=async_scheduling) as engine:
        engine.add(new_request("before", [1] * 20, ignore_eos=True))
        engine.step(2)
        with pytest.raises(ValueError, match=f"request other {kind}"):
            engine.add(request)
        engine.add(new_request("after", [3] * 20, ignore_eos=True))
        engine.run()
    reasons = engine.record.finish_reasons
    assert reasons == dict.fromkeys(["before", "after"], FinishReason.LENGTH)


@pytest.mark.parametrize("length", [2, 20], ids=["shorter-than-a-block", "longer-than-a-block"])
def test_a_token_beyond_32_bits_fails_alone(length: int, model_directory: Path) -> None:
    """Only a failure in preprocessing is the request's own; one in the scheduler is everyone's."""
    with running_engine(Choice.PLUGIN, model_directory, async_scheduling=True) as engine:
        with pytest.raises(OverflowError, match=r"^a token id does not fit into 32 bits$"):
            engine.core.preprocess_add_request(new_request("huge", [2**31] * length))
        engine.add(new_request("after", [3] * 20, ignore_eos=True))
        engine.run()
    assert engine.record.finish_reasons == {"after": FinishReason.LENGTH}


@pytest.mark.parametrize("length", [2, 20], ids=["shorter-than-a-block", "longer-than-a-block"])
def test_a_salt_that_is_too_long_fails_alone(length: int, model_directory: Path) -> None:
    """Nothing of the short prompt is hashed on arrival, but its salt is read all the same."""
    salt = "s" * 2**16
    with running_engine(Choice.PLUGIN, model_directory, async_scheduling=True) as engine:
        with pytest.raises(ValueError, match="request huge has a cache salt"):
            engine.core.preprocess_add_request(new_request("huge", [2] * length, cache_salt=salt))
        engine.add(new_request("after", [3] * 20, ignore_eos=True))
        engine.run()
    assert engine.record.finish_reasons == {"after": FinishReason.LENGTH}


@pytest.mark.parametrize(
    ("variables", "own"), [({"SPARKSCHED_QUEUE_TIMEOUT_S": "30"}, None), ({}, 30)]
)
def test_a_limited_time_in_the_queue_is_refused(
    variables: dict[str, str], own: float | None, model_directory: Path
) -> None:
    """Nobody would end the request of an engine in the caller's own process."""
    with (
        mock.patch.dict(os.environ, variables),
        running_engine(Choice.PLUGIN, model_directory, async_scheduling=True) as engine,
        pytest.raises(ValueError, match="request limited may wait for 30 s only"),
    ):
        engine.add(new_request("limited", [2] * 20, extra_args={"queue_timeout_s": own}))


def test_a_fallback_beside_a_native_engine_refuses_nothing(model_directory: Path) -> None:
    """The function that refuses is replaced for the whole process by then."""
    with (
        running_engine(Choice.PLUGIN, model_directory, async_scheduling=True),
        running_engine(
            Choice.PLUGIN, model_directory, async_scheduling=True, **UNSUPPORTED
        ) as other,
    ):
        fields = UNSUPPORTED_REQUESTS["has prompt embeddings, but the server"]
        other.add(new_request("embeddings", [2] * 20, **fields))
        other.step(2)
        assert "embeddings" in other.core.scheduler.requests


# ----------------------------------------------------------------------------------------
# Requests that are served
# ----------------------------------------------------------------------------------------


@ASYNC_SCHEDULING
@NATIVE_CHOICE
def test_an_adapter(choice: Choice, async_scheduling: bool, model_directory: Path) -> None:
    """Prompts with and without it share no prefix."""
    lora = LoRARequest("adapter", 1, "/nowhere")
    with running_engine(choice, model_directory, async_scheduling=async_scheduling) as engine:
        hashes = []
        for name, fields in [("with", {"lora_request": lora}), ("without", {})]:
            request = engine.add(new_request(name, [1] * 40, ignore_eos=True, **fields))
            hashes.append(list(request.block_hashes))
            engine.run()
            assert engine.record.num_cached_tokens == 0
        assert [len(it) for it in hashes] == [2, 2]
        assert set(hashes[0]).isdisjoint(hashes[1])
        engine.add(new_request("again", [1] * 40, ignore_eos=True, lora_request=lora))
        engine.run()
    assert engine.record.num_cached_tokens == 32
    assert set(engine.record.finish_reasons) == {"with", "without", "again"}


@ASYNC_SCHEDULING
@NATIVE_CHOICE
def test_prompts_of_vectors(choice: Choice, async_scheduling: bool, model_directory: Path) -> None:
    """A prefix is in common if its vectors are, whatever stands for their token ids."""
    vectors = torch.arange(40.0).unsqueeze(1).expand(-1, 32).contiguous()
    settings = {"async_scheduling": async_scheduling, "enable_prompt_embeds": True}
    with running_engine(choice, model_directory, **settings) as engine:
        assert type(engine.core.scheduler) is SparkScheduler
        for name, embeds, num_cached_tokens in [
            ("first", vectors, 0),
            ("others", vectors + 1, 0),
            ("again", vectors.clone(), 32),
        ]:
            engine.add(new_request(name, None, ignore_eos=True, prompt_embeds=embeds))
            engine.run()
            assert engine.record.num_cached_tokens == num_cached_tokens
    assert set(engine.record.finish_reasons.values()) == {FinishReason.LENGTH}


@ASYNC_SCHEDULING
@NATIVE_CHOICE
def test_a_streaming_session(choice: Choice, async_scheduling: bool, model_directory: Path) -> None:
    with running_engine(choice, model_directory, async_scheduling=async_scheduling) as engine:
        scheduler = engine.core.scheduler
        assert type(scheduler) is SparkScheduler
        session = engine.add(
            new_request("session", [2] * 20, max_tokens=4, ignore_eos=True, resumable=True)
        )
        engine.step(10)
        assert len(engine.record.tokens["session"]) == 4
        assert scheduler.requests == {"session": session}
        engine.add(new_request("session", [3] * 5, max_tokens=2, ignore_eos=True, resumable=True))
        engine.step(10)
        assert len(engine.record.tokens["session"]) == 6
        # The last token of a turn is not computed.
        assert session.prompt_token_ids == [
            *[2] * 20,
            *engine.record.tokens["session"][:3],
            *[3] * 5,
        ]
        engine.add(new_request("session", [0]))
        engine.run()
        assert scheduler.requests == {}


def test_one_line_tells_that_sparksched_schedules(
    model_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)
    try:
        with (
            caplog.at_level(logging.INFO, "vllm"),
            running_engine(Choice.PLUGIN, model_directory, async_scheduling=True),
        ):
            pass
    finally:
        logger.removeHandler(caplog.handler)
    lines = [it.getMessage() for it in caplog.records if it.name == "vllm.sparksched"]
    (line,) = lines
    assert "scheduling in Rust (asynchronous, fcfs, prefix caching sha256, 2 KV cache" in line
