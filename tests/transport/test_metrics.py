"""What `/metrics` would say of real engines: read from the registry that it asks."""

import asyncio
import importlib
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engine.harness import new_request
from logs import collected
from prometheus_client import REGISTRY
from sparksched import _core
from sparksched.api_server import metrics as collector
from sparksched.engine import meters as engine_side
from vllm.config import VllmConfig
from vllm.v1.engine.async_llm import AsyncLLM

from .clients import (
    ENDLESS,
    bulky_request,
    child_client,
    connected,
    endless_request,
    front_end,
    prompt_of,
    run_async,
    running_llm,
)
from .conftest import make_config
from .engines import Engine, running_engine

pytestmark = pytest.mark.timeout(180)

SHM = {"SPARKSCHED_TRANSPORT": "shm"}
ENGINE_SERIES = {
    "sparksched:schedule_seconds",
    "sparksched:update_from_output_seconds",
    "sparksched:step_gap_seconds",
    "sparksched:requests_running",
    "sparksched:requests_waiting",
}
RING_SERIES = {
    "sparksched:ring_waiting_bytes",
    "sparksched:ring_high_water_bytes",
    "sparksched:backlog_bytes",
    "sparksched:back_pressure_events",
    "sparksched:rescues",
    "sparksched:clients_lost",
}


@pytest.fixture(autouse=True)
def own_registry() -> Iterator[None]:
    """Leave the process's registry as it was."""
    yield
    if collector.register.cache_info().currsize:
        REGISTRY.unregister(collector.register())
        collector.register.cache_clear()


@pytest.fixture
def vllm_log() -> Iterator[list[str]]:
    with collected() as lines:
        yield lines


def value(name: str, **labels: str) -> float:
    """Return the sum of a series."""
    found = [
        sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert found, name
    return sum(found)


def families() -> set[str]:
    return {it.name for it in REGISTRY.collect() if it.name.startswith("sparksched:")}


def info() -> dict[str, str]:
    (labels,) = (
        sample.labels
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == "sparksched:info"
    )
    return dict(labels)


async def until(condition: Any, timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.02)


async def generate(llm: AsyncLLM, request_id: str, max_tokens: int) -> None:
    request = new_request(request_id, prompt_of(3), max_tokens, ignore_eos=True)
    async for _ in llm.generate(
        {"prompt_token_ids": request.prompt_token_ids}, request.sampling_params, request_id
    ):
        pass


# ----------------------------------------------------------------------------------------
# Engines
# ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_steps_are_counted_and_requests_go_back_to_none(transport: str, config: VllmConfig) -> None:
    async def run(engine: Engine) -> None:
        async with running_llm(config, engine) as llm:
            await asyncio.gather(*(generate(llm, f"r{index}", 20) for index in range(4)))
            # The step that tells the model runner of the ends is one, too.
            await until(lambda: not value("sparksched:requests_running") and is_between_steps())
            num_gaps = value("sparksched:step_gap_seconds_count")
            steps = value("sparksched:schedule_seconds_count")
            assert 20 <= steps < 100
            assert 19 <= num_gaps < steps
            assert value("sparksched:requests_waiting") == 0
            assert families() > ENGINE_SERIES
            assert (families() > RING_SERIES) == (transport == "shm")
            assert info()["transport"] == transport
            assert info()["scheduler"] == "sparksched"
        assert not families(), "a client that is gone"

    variables = {"SPARKSCHED_TRANSPORT": transport}
    with front_end(**variables), running_engine(config, **variables) as engine:
        run_async(run(engine))


def is_between_steps() -> bool:
    scheduled = value("sparksched:schedule_seconds_count")
    return scheduled == value("sparksched:update_from_output_seconds_count")


def test_what_paced_prefill_does_is_shown(config: VllmConfig) -> None:
    async def run(engine: Engine) -> None:
        async with running_llm(config, engine) as llm:
            # It answers when it is warm: nobody has waited for that.
            await llm.is_sleeping()
            assert value("sparksched:schedule_seconds_count") > 20
            assert value("sparksched:paced_longest_stall_seconds") == 0
            running = asyncio.create_task(generate(llm, "running", ENDLESS))
            await until(lambda: value("sparksched:requests_running"))
            await generate(llm, "late", 5)
            running.cancel()
            await asyncio.wait([running])
            names = families()
            assert {"sparksched:paced_chunk_tokens", "sparksched:paced_decode_steps"} <= names
            assert value("sparksched:paced_prompt_seconds_total") > 0
            contended = value("sparksched:paced_contended_seconds_total")
            assert contended >= value("sparksched:paced_prompt_seconds_total")
            assert value("sparksched:paced_longest_stall_seconds") > 0

    with front_end(), running_engine(config, SPARKSCHED_MAX_STALL_MS="100") as engine:
        run_async(run(engine))


def test_a_ring_without_room_is_counted_in_both_directions(model_directory: Path) -> None:
    config = make_config(model_directory, max_num_seqs=64)

    async def run(engine: Engine) -> None:
        async with connected(config, engine) as reader:
            await reader.add(endless_request("endless"))
            await reader.begin("endless")
            engine.signal(signal.SIGSTOP)
            sending = [
                asyncio.create_task(reader.add(bulky_request(f"bulky-{index}", 600_000)))
                for index in range(3)
            ]
            await asyncio.sleep(0.1)
            engine.signal(signal.SIGCONT)
            await asyncio.gather(*sending)
            name = "sparksched:back_pressure_events_total"
            await until(lambda: value(name, direction="to_engine") >= 1)
            assert value("sparksched:ring_high_water_bytes", direction="to_engine") > 500_000
            # A client that is short of processor time may have met a full ring of outputs already.
            before = value(name, direction="to_client")

            (array,) = await reader.call("collective_rpc", "make_bytes", None, [3 << 20], None)
            assert len(array) == 3 << 20
            await until(lambda: value(name, direction="to_client") > before)
            assert value("sparksched:ring_high_water_bytes", direction="to_client") == 1 << 20
            await until(lambda: value("sparksched:backlog_bytes") == 0)

    variables = {"SPARKSCHED_TRANSPORT": "shm", "SPARKSCHED_RING_MIB": "1"}
    with front_end(**variables), running_engine(config, **variables) as engine:
        run_async(run(engine))


def test_a_lost_client_is_counted_and_one_that_leaves_is_not(config: VllmConfig) -> None:
    async def run(engine: Engine) -> None:
        async with connected(config, engine, 0, 3) as leaves:
            await leaves.add(endless_request("left"))
            await leaves.begin("left")
        engine.wait_for_line("API server 0 is gone: it closed the connection")
        # Whoever comes makes the engine report what has happened before.
        async with connected(config, engine, 1, 3):
            with child_client(config, engine, 2, 3, {"endless": ENDLESS}, **SHM) as other:
                assert await asyncio.to_thread(other.receive) == "streaming"
                assert value("sparksched:clients_lost_total") == 0
                other.process.kill()
                await until(lambda: value("sparksched:clients_lost_total") > 0)
            await until(lambda: value("sparksched:requests_running") == 0)
            assert value("sparksched:clients_lost_total") == 1
            assert value("sparksched:ring_waiting_bytes") == 0

    with front_end(**SHM), running_engine(config, num_clients=3, **SHM) as engine:
        run_async(run(engine))


# ----------------------------------------------------------------------------------------
# What is missing, and why
# ----------------------------------------------------------------------------------------


def fall_back() -> None:
    """Have an engine refuse what it would take."""
    from sparksched import compat

    compat.unsupported_code = lambda: compat.Unsupported("a fork", "it is not the known one")


@pytest.mark.parametrize(
    ("prepare", "variables", "expected"),
    [
        (fall_back, {}, {"a fork", "it is not the known one", "shm"}),
        (None, {"VLLM_SCHEDULER": ""}, {"an engine without sparksched"}),
    ],
    ids=["fallback", "without-the-plugin"],
)
def test_vllms_scheduler_is_shown_with_the_reason(
    prepare: Callable[[], None] | None,
    variables: dict[str, str],
    expected: set[str],
    config: VllmConfig,
) -> None:
    async def run(engine: Engine) -> None:
        async with running_llm(config, engine) as llm:
            await generate(llm, "request", 5)
            assert {"vllm", *expected} <= set(info().values())
            assert not ENGINE_SERIES & families()
            assert (families() > RING_SERIES) == (prepare is not None)

    variables = {"SPARKSCHED_STRICT": "0", **variables}
    with front_end(), running_engine(config, prepare=prepare, **variables) as engine:
        run_async(run(engine))


def have_no_page() -> None:
    def no_meters(page_id: int) -> None:
        raise ConnectionError("shared memory of 4096 bytes can't be made: out of luck")

    _core.EngineMeters = no_meters


@contextmanager
def nothing_of_the_engine_is_shown(config: VllmConfig, **options: Any) -> Iterator[Engine]:
    async def run(engine: Engine) -> None:
        async with running_llm(config, engine) as llm:
            await generate(llm, "request", 5)
            assert families() == {"sparksched:info"}

    with front_end(), running_engine(config, **options) as engine:
        run_async(run(engine))
        yield engine


def test_an_engine_without_a_page_works(config: VllmConfig) -> None:
    with nothing_of_the_engine_is_shown(config, prepare=have_no_page) as engine:
        (line,) = engine.log_lines("there will be no metrics of this engine")
        assert "out of luck" in line


def test_a_client_whose_metrics_cant_be_shown_works(
    config: VllmConfig, vllm_log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_registration() -> None:
        raise ValueError("Duplicated timeseries")

    importlib.import_module("vllm.entrypoints.serve.instrumentator.metrics")
    monkeypatch.setattr(collector, "register", no_registration)

    async def run(engine: Engine) -> None:
        async with running_llm(config, engine) as llm:
            await generate(llm, "request", 5)

    with front_end(), running_engine(config) as engine:
        run_async(run(engine))
    assert "sparksched: there will be no metrics of engines" in vllm_log


def live_in_another_container() -> None:
    engine_side.pid_namespace = lambda: "another namespace"


def have_another_version() -> None:
    engine_side.__version__ = "0.0.1"


def give_a_wrong_page() -> None:
    engine_side.os.getpid = lambda: 1


@pytest.mark.parametrize(
    ("prepare", "expected"),
    [
        (live_in_another_container, "in another container"),
        (have_another_version, "it has version 0.0.1 of sparksched"),
        (give_a_wrong_page, "shared memory"),
    ],
)
def test_a_page_that_cant_be_read_is_not_shown(
    prepare: Callable[[], None], expected: str, config: VllmConfig, vllm_log: list[str]
) -> None:
    with nothing_of_the_engine_is_shown(config, prepare=prepare):
        (line,) = [it for it in vllm_log if "no metrics from within engine 0" in it]
        assert expected in line


def test_nothing_is_shown_if_that_is_asked_for(config: VllmConfig) -> None:
    async def run(engine: Engine) -> None:
        async with running_llm(config, engine) as llm:
            await generate(llm, "request", 5)
            assert not families()

    variables = {"SPARKSCHED_METRICS": "0"}
    with front_end(**variables), running_engine(config, **variables) as engine:
        run_async(run(engine))
        assert len(engine.log_lines("this engine schedules with sparksched")) == 1
