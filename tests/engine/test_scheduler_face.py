"""The methods of `SparkScheduler` that a healthy engine does not call, and a broken scheduler."""

import re
from pathlib import Path
from unittest import mock

import pytest
from sparksched.scheduler import SparkScheduler
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import RequestStatus

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
        for owner, name in (
            (scheduler, "deferred_waiting"),
            (manager, "get_block_ids"),
            (manager.block_pool, "free_block_queue"),
        ):
            with pytest.raises(AttributeError, match=re.escape("Use scheduler.snapshot()")):
                getattr(owner, name)


def test_what_a_property_lacks_is_not_taken_for_the_property(model_directory: Path) -> None:
    with running_engine(Choice.PLUGIN, model_directory, async_scheduling=False) as engine:
        scheduler = scheduler_of(engine)
        with (
            mock.patch.object(scheduler, "_encoder_inputs", object()),
            pytest.raises(AttributeError, match="'object' object has no attribute"),
        ):
            _ = scheduler.encoder_cache_manager


def structured(request_id: str) -> EngineCoreRequest:
    params = StructuredOutputsParams(regex=REGEX)
    params._backend = "xgrammar"
    return new_request(request_id, [1] * 20, structured_outputs=params)


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
