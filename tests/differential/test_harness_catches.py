"""The comparison sees each part of a result: a few mistakes, planted into vLLM's own scheduler.

Whether tests notice a mistake in our code is cargo-mutants' question (`make mutants`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from sparksched.verify.compare import first_difference
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.request import RequestStatus

from testkit.worlds.candidates import CandidateChooser, stock_scheduler_class
from testkit.worlds.scenarios import NAMED_SETTINGS

from .runner import SchedulersDiffer, run_scenario

NUM_STEPS = 150


class Steps:
    """Gives None where vLLM gives an empty set."""

    def schedule(self, *args: Any) -> SchedulerOutput:
        output = super().schedule(*args)  # type: ignore[misc]
        output.preempted_req_ids = output.preempted_req_ids or None
        return output


class ReusedLists:
    """Overwrites the previous step's output, which may still be in flight."""

    previous_ids: list[str] | None = None

    def schedule(self, *args: Any) -> SchedulerOutput:
        output = super().schedule(*args)  # type: ignore[misc]
        if self.previous_ids is not None:
            self.previous_ids[:] = output.scheduled_cached_reqs.req_ids
        self.previous_ids = output.scheduled_cached_reqs.req_ids
        return output


class Outputs:
    """Gives the step's statistics to the last client instead of the first."""

    def update_from_output(self, *args: Any) -> dict[int, Any]:
        outputs = super().update_from_output(*args)  # type: ignore[misc]
        clients = list(outputs.values())
        if len(clients) > 1:
            clients[-1].scheduler_stats = clients[0].scheduler_stats
            clients[0].scheduler_stats = None
        return outputs


class State:
    """Puts a request's blocks on the free list head first instead of tail first."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        pool = self.kv_cache_manager.block_pool  # type: ignore[attr-defined]
        free_blocks = pool.free_blocks
        pool.free_blocks = lambda blocks: free_blocks(reversed(list(blocks)))


class Grammars:
    """Accepts tokens without asking the structured output manager."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        manager = self.structured_output_manager  # type: ignore[attr-defined]
        manager.accept_tokens = lambda *_: True


class Ends:
    """Finishes aborted requests in the order of their ids instead of the set's."""

    def finish_requests(self, ids: str | Iterable[str] | None, status: RequestStatus) -> Any:
        finish = super().finish_requests  # type: ignore[misc]
        if ids is None or isinstance(ids, str):
            return finish(ids, status)
        return [request for one in sorted(set(ids)) for request in finish(one, status)]


# In which scenario, and where.
PARTS = [
    (Steps, "sync-full", 0, "type of schedule().preempted_req_ids"),
    (ReusedLists, "async-full", 0, "scheduled_cached_reqs.req_ids"),
    (Outputs, "async-full", 6, "scheduler_stats"),
    (State, "sync-full", 0, "snapshot['free_blocks']"),
    (Grammars, "async-full", 0, "what the structured output manager was shown"),
    (Ends, "sync-full", 3, "finish_requests"),
]


def planted(mistake: type) -> CandidateChooser:
    """Return what chooses vLLM's scheduler with a mistake."""
    return lambda configuration: type(
        mistake.__name__, (mistake, stock_scheduler_class(configuration)), {}
    )


@pytest.mark.parametrize(("mistake", "name", "seed", "place"), PARTS)
def test_a_difference_is_seen_where_it_is(mistake: type, name: str, seed: int, place: str) -> None:
    with pytest.raises(SchedulersDiffer) as failure:
        run_scenario(name, seed, NUM_STEPS, planted(mistake))
    assert place in str(failure.value)
    assert f"--config {name} --seeds {seed}:{seed + 1} " in str(failure.value)


@pytest.mark.full
@pytest.mark.parametrize("name", NAMED_SETTINGS)
def test_stock_equals_stock(name: str) -> None:
    run_scenario(name, 0, NUM_STEPS, stock_scheduler_class)


@pytest.mark.parametrize(
    ("reference", "candidate"),
    [
        ([1], (1,)),
        ([1], [1.0]),
        ([1, 2], [1]),
        ([[1]], [[np.int64(1)]]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"a"}, {"a", "b"}),
        (float("nan"), 0.0),
        (np.zeros(2, np.int32), np.zeros(2, np.int64)),
        (torch.zeros(2), torch.ones(2)),
        (EngineCoreOutput("a", [1]), EngineCoreOutput("a", [2])),
        (RequestStatus.RUNNING, int(RequestStatus.RUNNING)),
    ],
)
def test_comparison_tells_apart(reference: object, candidate: object) -> None:
    assert first_difference([{"key": reference}], [{"key": reference}], "value") is None
    assert first_difference([{"key": reference}], [{"key": candidate}], "value") is not None
