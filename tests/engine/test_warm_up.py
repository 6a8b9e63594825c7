"""An engine that paces prompts runs each size before the first request; nothing stays of that."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from recording.scenarios import replayed
from sparksched.engine import warm_up
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, EventPublisherFactory

from .harness import ASYNC_SCHEDULING, Choice, DrivenEngine, new_request, running_engine

pytestmark = pytest.mark.release


@contextmanager
def paced_engine(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> Iterator[DrivenEngine]:
    monkeypatch.setenv("SPARKSCHED_MAX_STALL_MS", "100")
    settings = {"max_num_batched_tokens": 128, "max_num_seqs": 16} | settings
    with running_engine(Choice.PLUGIN, model_directory, **settings) as engine:
        # What the engine of a server has, in a process of its own.
        engine.core.is_running = lambda: True
        yield engine


def chunks(engine: DrivenEngine) -> list[int]:
    """Return the sizes of steps in which prompts come beside requests that decode."""
    steps = engine.core.model_executor.steps
    return [
        step.total_num_scheduled_tokens
        for step in steps
        if step.scheduled_new_reqs and step.scheduled_cached_reqs.req_ids
    ]


@ASYNC_SCHEDULING
def test_each_size_runs_five_times_and_some_numbers_of_tokens_between_them(
    async_scheduling: bool, model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with paced_engine(model_directory, monkeypatch, async_scheduling=async_scheduling) as engine:
        scheduler = engine.core.scheduler
        assert scheduler.pacing()["sizes"] == [32, 48, 64, 96, 128]
        # However long a step takes here, it is within the bound.
        clock = SimpleNamespace(monotonic=lambda: 0.0, time=lambda: 0.0)
        monkeypatch.setattr(warm_up, "time", clock)
        warm_up.run(engine.core)
        found = chunks(engine)
        sizes = scheduler.pacing()["sizes"]
        # The largest one is also a long prompt's first step.
        assert [found.count(size) for size in sizes] == [5, 5, 5, 5, 6], found
        between = sorted(set(found) - set(sizes))
        assert [it // 32 for it in between] == [1, 2, 3], found
        assert not engine.is_busy
        assert scheduler.core.num_used_blocks() == 0
        assert scheduler.snapshot()["cached_blocks"] == {}
        assert scheduler.pacing()["contended_s"] == 0.0
        engine.add(new_request("later", [1] * 40, 5, ignore_eos=True))
        engine.run()
        assert len(engine.record.tokens["later"]) == 5


def test_it_is_verified_and_recorded_and_told_as_any_steps(
    model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARKSCHED_VERIFY", "stop")
    monkeypatch.setenv("SPARKSCHED_RECORD", str(tmp_path / "trace"))
    publisher = mock.Mock()
    publish = publisher.publish  # verification listens in its place
    kv_events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    settings = {"async_scheduling": True, "kv_events_config": kv_events, "strict": True}
    with (
        mock.patch.object(EventPublisherFactory, "create", return_value=publisher),
        mock.patch.object(warm_up.logger, "warning") as warning,
        paced_engine(model_directory, monkeypatch, **settings) as engine,
    ):
        warm_up.run(engine.core)
        engine.add(new_request("later", [1] * 40, 5, ignore_eos=True))
        engine.run()
        assert len(engine.record.tokens["later"]) == 5
    warning.assert_not_called()
    events = [it for call in publish.call_args_list for it in call.args[0].events]
    cleared = [isinstance(it, AllBlocksCleared) for it in events]
    assert 0 < cleared.index(True) < len(events) - 1, "what was stored is gone for who looks on"
    assert replayed(tmp_path / "trace", "vllm").mismatch is None


def test_prompts_may_be_no_longer_than_the_model_allows(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"max_model_len": 64, "async_scheduling": True}
    with paced_engine(model_directory, monkeypatch, **settings) as engine:
        warm_up.run(engine.core)
        # Streams end meanwhile.
        assert chunks(engine).count(128) >= 4


def test_all_numbers_of_tokens_run_where_something_is_compiled_for_each(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"max_num_batched_tokens": 1024, "async_scheduling": True}
    with paced_engine(model_directory, monkeypatch, **settings) as engine:
        executor = engine.core.model_executor
        execute = executor.execute_model
        known: set[tuple[int, bool]] = set()
        now = 0.0

        def compiling(step: Any, *args: Any, **others: Any) -> Any:
            nonlocal now
            num_tokens = step.total_num_scheduled_tokens
            kind = -(-num_tokens // 32), num_tokens % 16 == 0
            now += 0.001 if kind in known or not compiles else 1.0
            known.add(kind)
            return execute(step, *args, **others)

        monkeypatch.setattr(executor, "execute_model", compiling)
        clock = SimpleNamespace(monotonic=lambda: now, time=lambda: now)
        monkeypatch.setattr(warm_up, "time", clock)
        compiles = True
        monkeypatch.setattr(warm_up, "_LONGEST_S", 30.0)
        with mock.patch.object(warm_up.logger, "info") as info:
            warm_up.run(engine.core)
        assert "TRITON_CACHE_DIR" in info.call_args.args[-1]
        # Each start goes on where the one before it was out of time.
        for _ in range(3):
            warm_up.run(engine.core)
        assert {(it, is_multiple) for it in range(3, 33) for is_multiple in (False, True)} <= known
        monkeypatch.setattr(warm_up, "_LONGEST_S", 1e9)
        # The second time all is known: a few steps show it.
        compiles, num_before = False, len(chunks(engine))
        warm_up.run(engine.core)
        num_sizes = len(engine.core.scheduler.pacing()["sizes"])
        assert len(chunks(engine)) - num_before < 5 * num_sizes + 2 * 20
        # What they take is too long: only the sizes run.
        monkeypatch.setenv("SPARKSCHED_MAX_STALL_MS", "1")
        num_before = len(chunks(engine))
        warm_up.run(engine.core)
        assert len(chunks(engine)) - num_before <= 5 * num_sizes
        assert not engine.is_busy


def test_nothing_is_begun_once_time_is_up(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with paced_engine(model_directory, monkeypatch, async_scheduling=True) as engine:
        executor = engine.core.model_executor
        execute = executor.execute_model
        now, begun_at = 0.0, []

        def slow(step: Any, *args: Any, **others: Any) -> Any:
            nonlocal now
            if step.scheduled_new_reqs and step.scheduled_cached_reqs.req_ids:
                begun_at.append(now)
                now += 50.0
            return execute(step, *args, **others)

        monkeypatch.setattr(executor, "execute_model", slow)
        clock = SimpleNamespace(monotonic=lambda: now, time=lambda: now)
        monkeypatch.setattr(warm_up, "time", clock)
        warm_up.run(engine.core)
        assert begun_at == [0.0, 50.0, 100.0]


@pytest.mark.parametrize("fails_for_ever", [False, True])
def test_a_failure_is_one_warning(
    fails_for_ever: bool,
    model_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with paced_engine(model_directory, monkeypatch, async_scheduling=True) as engine:
        executor = engine.core.model_executor
        execute = executor.execute_model
        num_calls = 0

        def failing(*args: Any, **settings: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            if num_calls == 20 or (num_calls > 20 and fails_for_ever):
                raise RuntimeError("out of memory")
            return execute(*args, **settings)

        monkeypatch.setattr(executor, "execute_model", failing)
        with mock.patch.object(warm_up.logger, "warning") as warning:
            warm_up.run(engine.core)
        warning.assert_called_once()
        assert "out of memory" in repr(warning.call_args)
        if not fails_for_ever:
            executor._executing.clear()
            engine.add(new_request("later", [1] * 40, 5, ignore_eos=True))
            engine.run()
            assert len(engine.record.tokens["later"]) == 5
