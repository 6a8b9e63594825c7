"""The same requests through vLLM's `EngineCore` over both schedulers: the same of everything."""

import random
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreRequest, FinishReason

from testkit.executor import MAX_MODEL_LEN

from .harness import ASYNC_SCHEDULING, DrivenEngine, new_request, run_both

# ----------------------------------------------------------------------------------------
# Requests that run to their end
# ----------------------------------------------------------------------------------------


def mixed_requests(num_requests: int = 24) -> list[EngineCoreRequest]:
    """Return requests of many lengths, some with a common prefix, that end in many ways."""
    rng = random.Random(0)
    common = rng.choices(range(200), k=64)
    requests = []
    for index in range(num_requests):
        own = rng.choices(range(200), k=rng.choice([1, 2, 15, 16, 17, 40, 100]))
        prompt = common[: rng.choice([0, 0, 32, 48, 64])] + own
        ending: dict[str, Any] = rng.choice(
            [
                {},
                {"ignore_eos": True},
                {"stop_token_ids": list(range(0, 200, 11))},
                {"min_tokens": 10, "max_tokens": 40},
                {"max_tokens": 1},
                {"max_tokens": MAX_MODEL_LEN - len(prompt), "ignore_eos": True},
            ]
        )
        settings = {
            "max_tokens": rng.randint(2, 40),
            "priority": rng.randint(0, 3),
            "arrival_time": float(index),
            "cache_salt": rng.choice([None, None, "salt"]),
            **ending,
        }
        requests.append(new_request(f"request-{index}", prompt, **settings))
    return requests


def arriving_in_turn(engine: DrivenEngine) -> None:
    """Add a few requests at each step, and let all of them end."""
    requests = mixed_requests()
    while requests:
        for request in requests[:3]:
            engine.add(request)
        del requests[:3]
        engine.step()
    engine.run()


@ASYNC_SCHEDULING
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="default"),
        pytest.param({"enable_logging_iteration_details": True}, id="iteration-details"),
    ],
)
def test_mixed_requests(
    settings: dict[str, Any], async_scheduling: bool, model_directory: Path
) -> None:
    record = run_both(
        arriving_in_turn, model_directory, async_scheduling=async_scheduling, **settings
    )
    reasons = set(record.finish_reasons.values())
    assert len(record.finish_reasons) == len(mixed_requests())
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    assert record.num_cached_tokens > 0


# ----------------------------------------------------------------------------------------
# What a client or an operator does in between
# ----------------------------------------------------------------------------------------


def add_long_requests(engine: DrivenEngine, *names: str) -> None:
    for index, name in enumerate(names):
        engine.add(new_request(name, [index + 1] * 50, max_tokens=30, ignore_eos=True))


def test_sleep_and_wake_up(model_directory: Path) -> None:
    def scenario(engine: DrivenEngine) -> None:
        add_long_requests(engine, "a")
        engine.step(3)
        engine.core.sleep(level=1)
        engine.note(engine.core.is_sleeping())
        add_long_requests(engine, "b")
        engine.note(engine.core.wake_up())
        engine.run()
        engine.core.pause_scheduler("keep", clear_cache=False)
        engine.core.release_kv_cache_memory()

    record = run_both(scenario, model_directory, async_scheduling=True)
    assert record.finish_reasons == {"b": FinishReason.LENGTH}


def test_what_users_read_of_a_scheduler(model_directory: Path) -> None:
    """Code in the engine's own process: the same as of vLLM's, in each situation."""

    def scenario(engine: DrivenEngine) -> None:
        scheduler = engine.core.scheduler

        def look() -> None:
            manager = scheduler.kv_cache_manager
            pool = manager.block_pool
            engine.note([scheduler.max_num_running_reqs, scheduler.max_model_len])
            engine.note([scheduler.cache_config.block_size, scheduler.scheduler_config.policy])
            engine.note([set(scheduler.finished_req_ids), manager.usage, pool.get_usage()])
            engine.note([pool.num_gpu_blocks, pool.get_num_free_blocks()])

        look()
        for name in "ab":
            engine.add(new_request(name, [1] * 50))
        engine.step(2)
        look()
        engine.core.abort_requests(["a"])
        look()
        engine.run()
        look()

    record = run_both(scenario, model_directory, async_scheduling=False)
    assert record.answers[6][1] > 0
    assert record.answers[10][0] == {"a"}


@ASYNC_SCHEDULING
def test_what_the_engine_reads_of_a_scheduler(
    async_scheduling: bool, model_directory: Path
) -> None:
    def scenario(engine: DrivenEngine) -> None:
        core = engine.core
        engine.note(core.vllm_config.cache_config.effective_attention_block_size)
        engine.note(core.get_kv_cache_group_metadata())
        managers = core.scheduler.kv_cache_manager.coordinator.single_type_managers
        engine.note([(it.block_size, it.kv_cache_spec) for it in managers])
        engine.note([core.scheduler.get_kv_connector(), core.scheduler.get_ec_connector()])
        engine.note(core.scheduler.get_kv_event_publisher_config())
        engine.note(core.batch_queue_size)
        engine.note(core.get_supported_tasks())
        engine.note(core.scheduler.get_kv_cache_usage())

    record = run_both(scenario, model_directory, async_scheduling=async_scheduling)
    assert record.answers[0] == 16
    assert [group["kind"] for group in record.answers[1]] == ["sliding_window", "full_attention"]
