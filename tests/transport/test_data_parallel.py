"""Several engines: of different transports, of several API servers, and each with its own."""

import asyncio
import multiprocessing
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from engine.harness import new_request
from vllm.config import VllmConfig
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.exceptions import EngineDeadError

from testkit.executor import MIXTURE, write_model_directory
from testkit.server import reserved_port

from .clients import (
    ENDLESS,
    TIMEOUT_S,
    Reader,
    child_client,
    connected,
    endless_request,
    engines_of_clients,
    expected_tokens,
    front_end,
    prompt_of,
    run_async,
    running_llm,
    transport_log,
)
from .conftest import MAX_MODEL_LEN, make_config
from .engines import send_signal
from .launched import Launch, launched
from .test_death import begun, check_that_nothing_is_served, streams_of
from .test_staying_on_zmq import live_elsewhere
from .test_streams import check_streams, stream

pytestmark = pytest.mark.timeout(180)

SHM = {"SPARKSCHED_TRANSPORT": "shm"}
THEIRS = {f"theirs-{index}": ENDLESS for index in range(4)}
RANKS = (0, 1)


@pytest.fixture(scope="module")
def mixture_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of experts: engines of it step together."""
    directory = tmp_path_factory.mktemp("mixture")
    return write_model_directory(directory, max_position_embeddings=MAX_MODEL_LEN, **MIXTURE)


def balanced_config(model_directory: Path) -> VllmConfig:
    """Return the configuration of two engines that each API server balances."""
    return make_config(model_directory, data_parallel_size=2)


async def until(condition: Callable[[], Any]) -> None:
    """Wait, in the event loop, until a condition holds."""
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.01)


# ----------------------------------------------------------------------------------------
# One engine through rings, one over ZMQ
# ----------------------------------------------------------------------------------------


def live_apart() -> None:
    """Let the engine of rank 1 say that it runs on another host; calls tell who is asked."""
    tell_rank()
    if multiprocessing.current_process().name == "EngineCore_DP1":
        live_elsewhere()


def tell_rank() -> None:
    EngineCoreProc.own_rank = own_rank


def own_rank(self: EngineCoreProc) -> int:
    return self.engine_index


def assert_mixed(client: Any) -> None:
    assert list(client.resources.sparksched_rings.channels) == [client.core_engines[0]]


async def unfinished_by_rank(reader: Reader) -> list[list[str]]:
    """Return the ids of the requests in each engine."""
    async with asyncio.timeout(TIMEOUT_S):
        engines = await reader.client.call_utility_all_async("unfinished_requests")
    return [sorted(request_id for request_id, _client in requests) for requests in engines]


async def check_aborts(reader: Reader) -> None:
    """Check that aborts reach the engines that have the requests."""
    for rank in RANKS:
        ids = [f"{it}-{rank}" for it in ("alone", "together", "stays")]
        await reader.add(*(endless_request(it, data_parallel_rank=rank) for it in ids))
        await reader.begin(*ids)
    for rank in RANKS:
        await reader.client.abort_requests_async([f"alone-{rank}"])
    await reader.client.abort_requests_async([f"together-{rank}" for rank in RANKS])
    while await unfinished_by_rank(reader) != [["stays-0"], ["stays-1"]]:
        await asyncio.sleep(0.01)
    await reader.client.abort_requests_async([f"stays-{rank}" for rank in RANKS])
    while any(await unfinished_by_rank(reader)):
        await asyncio.sleep(0.01)


async def check_calls(reader: Reader) -> None:
    """Check that calls reach both engines, and each one's answer comes back in its place."""
    async with asyncio.timeout(TIMEOUT_S):
        assert await reader.client.call_utility_all_async("own_rank") == list(RANKS)
        assert await reader.client.call_utility_async("own_rank") == 0


@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_one_engine_through_rings_and_one_over_zmq(
    kind: str, model_directory: Path, mixture_directory: Path, tmp_path: Path
) -> None:
    with front_end():
        config = balanced_config(model_directory if kind == "dense" else mixture_directory)

    async def run() -> None:
        async with connected(config, None) as reader:
            assert_mixed(reader.client)
            await stream(reader)
            check_streams(reader.tokens, reader.finishes)
            for rank in RANKS:
                wave = [f"rank{rank}-{index}" for index in range(4)]
                await reader.add(
                    *(new_request(it, prompt_of(3), 40, data_parallel_rank=rank) for it in wave)
                )
                await reader.finish(wave)
                assert all(reader.tokens[it] == expected_tokens(prompt_of(3), 40) for it in wave)
            await check_calls(reader)
            await check_aborts(reader)

    log_path = tmp_path / "engines.log"
    with front_end(), transport_log() as logged, engines_of_clients(log_path, live_apart):
        run_async(run())
    assert "ERROR" not in log_path.read_text()
    # Engines are told of in the order in which they were ready.
    assert sorted(line for line in logged if "messages to engine" in line) == [
        "INFO sparksched: messages to engine 0 go through shared memory (2 rings of 8 MiB)",
        "INFO sparksched: messages to engine 1 go over ZMQ: it runs on another host",
    ]


@pytest.mark.parametrize("killed", RANKS, ids=["through-rings", "over-zmq"])
def test_either_engine_dies(killed: int, model_directory: Path, tmp_path: Path) -> None:
    """Requests and calls fail once, whichever engine has them.

    vLLM ends the other engine, which may have aborted its requests before the client has noticed.
    """
    with front_end():
        config = balanced_config(model_directory)

    async def run(processes: list[Any]) -> None:
        async with running_llm(config, None) as llm:
            client = llm.engine_core
            assert_mixed(client)
            streams = await streams_of(llm)
            lost = streams_on(client, client.core_engines[killed])
            assert 0 < len(lost) < len(streams)
            (engine,) = (it for it in processes if it.name == f"EngineCore_DP{killed}")
            send_signal(engine.pid, signal.SIGSTOP)
            call = asyncio.create_task(client.call_utility_all_async("own_rank"))
            await until(lambda: len(client.utility_results) == 1)
            engine.kill()
            async with asyncio.timeout(TIMEOUT_S):
                with pytest.raises(EngineDeadError):
                    await call
                outcomes = await asyncio.gather(*streams)
            for index, (num_tokens, *ends) in enumerate(outcomes):
                assert num_tokens > 0
                assert ends == ["EngineDeadError"] or (ends == ["abort"] and index not in lost)
            await check_that_nothing_is_served(llm)
            await until(lambda: all(it.exitcode is not None for it in processes))

    with front_end(), engines_of_clients(tmp_path / "log", live_apart) as processes:
        run_async(run(processes))


def streams_on(client: Any, engine: bytes) -> set[int]:
    """Return which of the requests of `streams_of` an engine has: vLLM adds to their ids."""
    return {int(it.split("-")[1]) for it, has in client.reqs_in_flight.items() if has == engine}


# ----------------------------------------------------------------------------------------
# Engines that step together, and two API servers
# ----------------------------------------------------------------------------------------


@asynccontextmanager
async def two_clients(config: VllmConfig, launch: Launch) -> AsyncIterator[tuple[Reader, Reader]]:
    async with (
        connected(config, launch.addresses(0), 0, count=2) as first,
        connected(config, launch.addresses(1), 1, count=2) as second,
    ):
        for reader in (first, second):
            channels = reader.client.resources.sparksched_rings.channels
            assert channels.keys() == set(reader.client.core_engines)
        yield first, second


def test_waves_of_two_clients(mixture_directory: Path) -> None:
    """Whichever client's request is the first, to whichever engine, the other engine steps along.

    Otherwise no request ends: an engine waits for the other after its first step.
    """
    with front_end(**SHM):
        config = balanced_config(mixture_directory)

    async def run(launch: Launch) -> None:
        async with two_clients(config, launch) as readers:
            clients = [reader.client for reader in readers]
            for index, reader in enumerate(readers):
                for rank in RANKS:
                    wave = clients[0].current_wave
                    request_id = f"first-of-{index}-to-{rank}"
                    await reader.add(
                        new_request(request_id, prompt_of(3), 40, data_parallel_rank=rank)
                    )
                    await reader.finish([request_id])
                    assert reader.tokens.pop(request_id) == expected_tokens(prompt_of(3), 40)
                    assert reader.finishes.pop(request_id)
                    # All are at rest again, and both clients know.
                    await until(lambda wave=wave: all(are_at_rest(it, wave) for it in clients))
            first, second = readers
            await asyncio.gather(stream(first, "first"), stream(second, "second"))
            for reader in readers:
                check_streams(reader.tokens, reader.finishes)
                assert not reader.client.reqs_in_flight

    with front_end(**SHM), launched([config], num_clients=2, **SHM) as (launch,):
        run_async(run(launch))
        assert "ERROR" not in launch.log


def are_at_rest(client: Any, wave: int) -> bool:
    return client.current_wave > wave and not client.engines_running


# ----------------------------------------------------------------------------------------
# Engines that step together, each with an API server of its own: balanced from outside
# ----------------------------------------------------------------------------------------


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as it:
        yield it


def configs_of_ranks(model_directory: Path, port: int) -> list[VllmConfig]:
    return [
        make_config(
            model_directory,
            data_parallel_size=2,
            data_parallel_rank=rank,
            data_parallel_address="127.0.0.1",
            data_parallel_rpc_port=port,
        )
        for rank in RANKS
    ]


def test_an_engine_without_an_api_server_steps_for_others(
    mixture_directory: Path, port: int
) -> None:
    with front_end(**SHM):
        configs = configs_of_ranks(mixture_directory, port)

    async def run(launches: list[Launch]) -> None:
        stays, leaves = launches
        async with connected(configs[0], stays.addresses(0)) as reader:
            with child_client(configs[1], leaves, 0, 1, THEIRS, **SHM) as other:
                await begun(other)
                other.process.kill()
                other.process.join()
            await asyncio.to_thread(leaves.wait_for_line, "the last API server is gone")
            assert "the engine goes on for those of others" in leaves.log
            await stream(reader)
            check_streams(reader.tokens, reader.finishes)
            assert leaves.processes[0].is_alive()
            # It ends, too, when it is asked to, with the other, whose client then leaves.
            for launch in launches:
                launch.processes[0].terminate()
            await asyncio.to_thread(join_all, launches)

    with front_end(**SHM), launched(configs, **SHM) as launches:
        run_async(run(launches))
        assert "aborted 4 requests of API server 0" in launches[0].log
        assert all(launch.processes[0].exitcode == 0 for launch in launches)


def join_all(launches: list[Launch]) -> None:
    for launch in launches:
        launch.processes[0].join(TIMEOUT_S)
