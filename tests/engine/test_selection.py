"""Which scheduler, which block hasher and which requests an engine ends up with."""

import os
from pathlib import Path
from types import FunctionType
from typing import Any
from unittest import mock

import pytest
import torch
from logs import collected
from sparksched._core import NativeBlockHasher
from sparksched.scheduler import SparkScheduler
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import FinishReason

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


def test_attributes_that_only_vllms_scheduler_has(model_directory: Path) -> None:
    with running_engine(Choice.PLUGIN, model_directory, async_scheduling=False) as engine:
        scheduler = engine.core.scheduler
        manager = scheduler.kv_cache_manager
        for owner, name in (
            (scheduler, "deferred_waiting"),
            (manager, "get_block_ids"),
            (manager.block_pool, "free_block_queue"),
        ):
            with pytest.raises(AttributeError, match=r"Use scheduler\.snapshot\(\), "):
                getattr(owner, name)


def test_what_a_property_lacks_is_not_taken_for_the_property(model_directory: Path) -> None:
    with running_engine(Choice.PLUGIN, model_directory, async_scheduling=False) as engine:
        scheduler = engine.core.scheduler
        with (
            mock.patch.object(scheduler, "_encoder_inputs", object()),
            pytest.raises(AttributeError, match="'object' object has no attribute"),
        ):
            _ = scheduler.encoder_cache_manager


# ----------------------------------------------------------------------------------------
# Requests that are refused
# ----------------------------------------------------------------------------------------


UNSUPPORTED_REQUESTS: dict[str, dict[str, Any]] = {
    "request other has prompt embeddings, but the server": {"prompt_embeds": torch.zeros(20, 32)},
    "request other is a request without a prompt": {"prompt_token_ids": []},
    # Nothing of a prompt shorter than a block is hashed on arrival, but it is read all the same.
    "request other has a cache salt": {"prompt_token_ids": [2, 2], "cache_salt": "s" * 2**16},
    "request other has a cache salt, LoRA name": {"cache_salt": "s" * 2**16},
    "a token id does not fit into 32 bits": {"prompt_token_ids": [2**31] * 2},
    "token id does not fit into 32 bits": {"prompt_token_ids": [2**31] * 20},
}


@ASYNC_SCHEDULING
@NATIVE_CHOICE
def test_an_unsupported_request_fails_alone(
    choice: Choice, async_scheduling: bool, model_directory: Path
) -> None:
    """Only a failure in preprocessing is the request's own; one in the scheduler is everyone's."""
    with running_engine(choice, model_directory, async_scheduling=async_scheduling) as engine:
        engine.add(new_request("before", [1] * 20, ignore_eos=True))
        engine.step(2)
        for text, fields in UNSUPPORTED_REQUESTS.items():
            request = new_request("other", **{"prompt_token_ids": [2] * 20} | fields)
            with pytest.raises((ValueError, OverflowError), match=text):
                engine.core.preprocess_add_request(request)
        engine.add(new_request("after", [3] * 20, ignore_eos=True))
        engine.run()
    reasons = engine.record.finish_reasons
    assert reasons == dict.fromkeys(["before", "after"], FinishReason.LENGTH)


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
        embeds = torch.zeros(20, 32)
        other.add(new_request("embeddings", [2] * 20, prompt_embeds=embeds))
        other.step(2)
        assert "embeddings" in other.core.scheduler.requests


# ----------------------------------------------------------------------------------------
# Requests that are served
# ----------------------------------------------------------------------------------------


def test_one_line_tells_that_sparksched_schedules(model_directory: Path) -> None:
    with (
        collected("vllm.sparksched") as lines,
        running_engine(Choice.PLUGIN, model_directory, async_scheduling=True),
    ):
        pass
    (line,) = lines
    assert "scheduling in Rust (asynchronous, fcfs, prefix caching sha256, 2 KV cache" in line
