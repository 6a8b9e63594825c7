"""The methods of `SparkScheduler` that a healthy engine does not call, and a broken scheduler."""

from pathlib import Path
from unittest import mock

import pytest
from sparksched.scheduler import SparkScheduler
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from .harness import ASYNC_SCHEDULING, Choice, DrivenEngine, new_request, running_engine

REGEX = "[a-z]+"


def scheduler_of(engine: DrivenEngine) -> SparkScheduler:
    scheduler = engine.core.scheduler
    assert isinstance(scheduler, SparkScheduler)
    return scheduler


def test_speculative_decoding_is_refused(model_directory: Path) -> None:
    with running_engine(Choice.PLUGIN, model_directory, async_scheduling=True) as engine:
        scheduler = scheduler_of(engine)
        with pytest.raises(NotImplementedError, match="speculative decoding is not supported"):
            scheduler.update_draft_token_ids(mock.Mock())
        with pytest.raises(NotImplementedError, match="speculative decoding is not supported"):
            scheduler.update_draft_token_ids_in_output(mock.Mock(), mock.Mock())


def test_finishing_with_a_status_that_is_not_finished(model_directory: Path) -> None:
    with running_engine(Choice.PLUGIN, model_directory, async_scheduling=True) as engine:
        engine.add(new_request("a", [1] * 20))
        for status in (RequestStatus.RUNNING, RequestStatus.PREEMPTED):
            with pytest.raises(ValueError, match="requests can't be finished with the status"):
                scheduler_of(engine).finish_requests(None, status)
        engine.run()
    assert "a" in engine.record.finish_reasons


def test_duplicate_request_id(model_directory: Path) -> None:
    with running_engine(Choice.PLUGIN, model_directory, async_scheduling=True) as engine:
        engine.add(new_request("a", [1] * 20))
        with pytest.raises(ValueError, match="duplicate request id a"):
            engine.add(new_request("a", [2] * 20))
        engine.run()
    assert "a" in engine.record.finish_reasons


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
    params = StructuredOutputsParams(regex=REGEX)
    params._backend = "xgrammar"
    with running_engine(
        Choice.PLUGIN, model_directory, async_scheduling=async_scheduling
    ) as engine:
        scheduler = scheduler_of(engine)
        engine.add(new_request("regex", [1] * 20, structured_outputs=params))
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
