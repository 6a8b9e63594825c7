"""The methods of `SparkScheduler` that a healthy engine does not call, and a broken scheduler."""

import itertools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from sparksched.scheduler import SparkScheduler
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockStored, EventPublisherFactory
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request, RequestStatus

from .harness import ASYNC_SCHEDULING, Choice, DrivenEngine, new_request, running_engine

REGEX = "[a-z]+"


def scheduler_of(engine: DrivenEngine) -> SparkScheduler:
    scheduler = engine.core.scheduler
    assert isinstance(scheduler, SparkScheduler)
    return scheduler


# ----------------------------------------------------------------------------------------
# Attributes
# ----------------------------------------------------------------------------------------


def test_attributes_that_only_vllms_scheduler_has(model_directory: Path) -> None:
    with running_engine(Choice.PLUGIN, model_directory, async_scheduling=False) as engine:
        scheduler = scheduler_of(engine)
        manager = scheduler.kv_cache_manager
        for owner, name, instead in (
            (scheduler, "deferred_waiting", "scheduler.waiting"),
            (scheduler, "never_heard_of", "scheduler.snapshot(), scheduler.make_stats()"),
            (manager, "get_block_ids", "scheduler.snapshot()['requests']"),
            (manager.block_pool, "free_block_queue", "scheduler.snapshot()['free_blocks']"),
        ):
            with pytest.raises(AttributeError, match=re.escape(f"Use {instead}")):
                getattr(owner, name)


def test_what_a_property_lacks_is_not_taken_for_the_property(model_directory: Path) -> None:
    with running_engine(Choice.PLUGIN, model_directory, async_scheduling=False) as engine:
        scheduler = scheduler_of(engine)
        with (
            mock.patch.object(scheduler, "_encoder_inputs", object()),
            pytest.raises(AttributeError, match="'object' object has no attribute"),
        ):
            _ = scheduler.encoder_cache_manager


# ----------------------------------------------------------------------------------------
# Draft tokens
# ----------------------------------------------------------------------------------------

SPECULATION = {
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
}


def only_small(request: Request, drafts: list[int]) -> list[int]:
    """Play a grammar that accepts numbers below 10."""
    if request.structured_output_request is None:
        return drafts
    return list(itertools.takewhile(lambda token_id: token_id < 10, drafts))


def structured(request_id: str) -> EngineCoreRequest:
    params = StructuredOutputsParams(regex=REGEX)
    params._backend = "xgrammar"
    return new_request(request_id, [1] * 20, structured_outputs=params)


def test_draft_tokens(model_directory: Path) -> None:
    with running_engine(
        Choice.PLUGIN, model_directory, async_scheduling=False, **SPECULATION
    ) as engine:
        scheduler = scheduler_of(engine)
        engine.add(structured("regex"))
        engine.add(new_request("free", [2] * 20))
        engine.step()
        manager = engine.core.structured_output_manager
        with mock.patch.object(manager, "validate_tokens", only_small):
            scheduler.update_draft_token_ids(
                DraftTokenIds(["free", "gone", "regex"], [[30, 40, 50], [1], [5, 15, 6]])
            )
        step = scheduler.schedule()
    assert step.scheduled_spec_decode_tokens == {"free": [30, 40, 50], "regex": [5]}
    assert step.num_scheduled_tokens == {"free": 4, "regex": 2}


@pytest.mark.parametrize("scheduler_class", [SparkScheduler, Scheduler], ids=lambda it: it.__name__)
def test_draft_tokens_in_the_place_of_placeholders(
    scheduler_class: type[Any], model_directory: Path
) -> None:
    """For requests in the order of the drafts, as far as there are placeholders."""
    with running_engine(
        Choice.PLUGIN if scheduler_class is SparkScheduler else Choice.STOCK,
        model_directory,
        async_scheduling=False,
        **SPECULATION,
    ) as engine:
        scheduler = engine.core.scheduler
        assert type(scheduler) is scheduler_class
        for request in (structured("regex"), structured("empty"), new_request("free", [2] * 20)):
            engine.add(request)
        step = SimpleNamespace(
            scheduled_spec_decode_tokens={
                "regex": [-1] * 3,
                "empty": [-1] * 2,
                "free": [-1] * 2,
                "gone": [-1],
            },
            num_invalid_spec_tokens=None,
        )
        drafts = DraftTokenIds(
            ["gone", "free", "regex", "empty", "other"],
            [[1], [30, 40, 50], [5, 15, 6], [20, 1, 1], [1]],
        )
        manager = engine.core.structured_output_manager
        with mock.patch.object(manager, "validate_tokens", only_small):
            scheduler.update_draft_token_ids_in_output(drafts, step)
    assert step.scheduled_spec_decode_tokens == {
        "regex": [5, -1, -1],
        "empty": [-1, -1],
        "free": [30, 40],
        "gone": [-1],
    }
    assert step.num_invalid_spec_tokens == {"regex": 2, "empty": 2}


# ----------------------------------------------------------------------------------------
# KV cache events
# ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", [Choice.PLUGIN, Choice.STOCK], ids=["native", "stock"])
def test_kv_cache_events(choice: Choice, model_directory: Path) -> None:
    config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    publisher = mock.Mock()
    with (
        mock.patch.object(EventPublisherFactory, "create", return_value=publisher) as create,
        running_engine(
            choice, model_directory, async_scheduling=True, kv_events_config=config
        ) as engine,
    ):
        scheduler = engine.core.scheduler
        assert isinstance(scheduler, SparkScheduler) == (choice is Choice.PLUGIN)
        create.assert_called_once_with(config, 0)
        assert (
            scheduler.get_kv_event_publisher_config() is publisher.get_publisher_config.return_value
        )
        engine.add(new_request("a", [1] * 40, ignore_eos=True))
        engine.run()
        publisher.shutdown.assert_not_called()
    publisher.shutdown.assert_called_once_with()
    events = [it for call in publisher.publish.call_args_list for it in call.args[0].events]
    # Of each of the three groups: two blocks of the prompt, one of the output.
    assert {type(it) for it in events} == {BlockStored}
    assert {it.group_idx for it in events} == {0, 1}
    stored = [it for it in events if it.kv_cache_spec_kind == "full_attention"]
    assert [len(it.block_hashes) for it in stored] == [2, 1]
    assert stored[1].parent_block_hash == stored[0].block_hashes[1]


# ----------------------------------------------------------------------------------------
# Requests
# ----------------------------------------------------------------------------------------


def test_queues_and_counts(model_directory: Path) -> None:
    with running_engine(
        Choice.PLUGIN, model_directory, async_scheduling=False, max_num_seqs=1
    ) as engine:
        scheduler = scheduler_of(engine)
        first, second = (engine.add(new_request(name, [1] * 20)) for name in "ab")
        assert (scheduler.running, scheduler.waiting) == ([], [first, second])
        engine.step()
        assert (scheduler.running, scheduler.waiting) == ([first], [second])
        assert scheduler.get_request_counts() == (1, 1)
        assert scheduler.requests == {"a": first, "b": second}
        assert scheduler.snapshot()["running"] == ["a"]
        assert scheduler.get_kv_cache_usage() > 0
        scheduler.set_pause_state(PauseState.PAUSED_NEW)
        assert scheduler.pause_state is PauseState.PAUSED_NEW
        assert scheduler.get_num_unfinished_requests() == 1
        assert not scheduler.has_finished_requests()


@ASYNC_SCHEDULING
def test_broken_scheduler(async_scheduling: bool, model_directory: Path) -> None:
    """An exception from the grammar ends the engine, but every request can still be told."""
    with running_engine(
        Choice.PLUGIN, model_directory, async_scheduling=async_scheduling
    ) as engine:
        scheduler = scheduler_of(engine)
        engine.add(structured("regex"))
        engine.add(new_request("free", [2] * 20))
        broken = mock.Mock(side_effect=LookupError("out of grammar"))
        with (
            mock.patch.object(engine.core.structured_output_manager, "accept_tokens", broken),
            pytest.raises(LookupError, match="out of grammar"),
        ):
            engine.run()
        with pytest.raises(RuntimeError, match=r"can't go on: .*out of grammar"):
            scheduler.schedule()
        with pytest.raises(RuntimeError, match=r"can't go on: .*out of grammar"):
            engine.core.abort_requests(["free"])
        requests = scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        assert [request.request_id for request in requests] == ["regex", "free"]
        assert scheduler.requests == {}
        assert scheduler.make_stats() is not None
        assert not scheduler.has_unfinished_requests()
