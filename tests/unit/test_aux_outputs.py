"""Auxiliary output: what its collector may look up, and errors that it ends in."""

from typing import Any

import pytest
from bare_core import assert_goes_on, build_core, build_request, runner_output
from sparksched._core import CachedBlocks, SchedulerCore

pytestmark = pytest.mark.release


class Collector:
    """Stands in for `AuxOutputs` and its connector: looks blocks up whenever it is called."""

    def __init__(self) -> None:
        self.connector = self
        self.cached_blocks = CachedBlocks()
        self.found: list[list[int] | None] = []
        self.fails = False

    def _look_up(self, request: Any) -> None:
        if self.fails:
            raise OSError("the collector is broken")
        hashes = request.block_hashes
        self.found += [self.cached_blocks.get_cached_block(it, [0]) for it in hashes[:2]]

    def max_cache_hit(self, request: Any) -> int:
        self._look_up(request)
        return request.num_tokens - 1

    def take_output(self, _request: Any, output: Any) -> Any:
        return output

    def request_finished(self, request: Any) -> None:
        self._look_up(request)


@pytest.fixture
def collector() -> Collector:
    return Collector()


@pytest.fixture
def core(collector: Collector) -> SchedulerCore:
    return build_core(aux_outputs=collector, collects_aux_output=True, caps_hits_to_aux_output=True)


def step(core: SchedulerCore, collected: Any = None) -> dict[int, Any]:
    scheduled = core.decide(False, 2.0)
    core.update_after_schedule(scheduled)
    output = runner_output(scheduled)
    output.aux_output_connector_output = collected
    return core.update_from_output(scheduled, output)


def test_blocks_can_be_looked_up_while_the_scheduler_calls(
    core: SchedulerCore, collector: Collector
) -> None:
    core.add_request(build_request(), 1.0)
    step(core)
    assert collector.found == [None, None]
    collector.found.clear()
    first, second = core.snapshot()["requests"]["a"]["block_ids"][0][:2]
    core.preempt_running(3.0)
    assert collector.found == [[first], [second]]
    core.check_invariants()


def test_blocks_can_not_be_looked_up_at_other_times(collector: Collector) -> None:
    with pytest.raises(RuntimeError, match="only when the scheduler calls"):
        collector.cached_blocks.get_cached_block(b"hash", [0])


def test_a_group_without_the_block(core: SchedulerCore, collector: Collector) -> None:
    found = []

    def look_up(request: Any) -> None:
        first = request.block_hashes[0]
        groups: list[list[int]] = [[], [0], [0, 1], [0, 7]]
        found.extend(collector.cached_blocks.get_cached_block(first, it) for it in groups)

    core.add_request(build_request(), 1.0)
    step(core)
    collector._look_up = look_up  # type: ignore[method-assign]
    core.preempt_running(3.0)
    assert [found_in and len(found_in) for found_in in found] == [[], 1, 2, None]


def test_a_hit_ends_where_the_collector_says(core: SchedulerCore, collector: Collector) -> None:
    core.add_request(build_request("a"), 1.0)
    step(core)
    collector.max_cache_hit = lambda _: 4  # type: ignore[method-assign]
    core.add_request(build_request("b"), 1.0)
    (new,) = core.decide(False, 2.0).scheduled_new_reqs
    assert new.num_computed_tokens == 4


def test_an_error_of_the_collector_is_the_last_step(
    core: SchedulerCore, collector: Collector
) -> None:
    core.add_request(build_request(), 1.0)
    step(core)
    collector.fails = True
    with pytest.raises(OSError, match="the collector is broken"):
        core.preempt_running(3.0)
    with pytest.raises(RuntimeError, match="stopped after an earlier error"):
        core.decide(False, 2.0)


def test_nobody_collects() -> None:
    core = build_core()
    core.add_request(build_request(), 1.0)
    step(core, {"a": object()})
    assert_goes_on(core, "a")
