"""Deaths and stops of engines and clients: who notices, what fails, and that it fails once."""

import asyncio
import copy
import gc
import logging
import multiprocessing.forkserver
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from logs import collected
from sparksched.api_server.overload import EngineStuckError
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import SyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.llm_engine import LLMEngine

from .clients import (
    ENDLESS,
    child_client,
    connected,
    endless_request,
    engines_of_clients,
    front_end,
    outcome_of,
    prompt_of,
    run_async,
    running_llm,
)
from .engines import (
    Engine,
    PacedExecutor,
    running_engine,
    send_signal,
    thread_names,
    wait_until,
)

pytestmark = pytest.mark.timeout(180)

SHM = {"SPARKSCHED_TRANSPORT": "shm"}
QUICK = {**SHM, "SPARKSCHED_STUCK_AFTER_S": "1"}
NUM_STREAMS = 6
THEIRS = {f"theirs-{index}": ENDLESS for index in range(5)}


async def begun(client: Any) -> None:
    """Wait, in the event loop, until a client in another process has tokens."""
    assert await asyncio.to_thread(client.receive) == "streaming"


# ----------------------------------------------------------------------------------------
# Clients that die
# ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [3, ENDLESS], ids=["idle", "busy"])
def test_engine_ends_after_its_last_client(length: int, config: VllmConfig) -> None:
    num_clients = 2
    with running_engine(config, num_clients=num_clients, **SHM) as engine:
        for index in range(num_clients):
            lengths = {f"{it}-{index}": length for it in THEIRS}
            with child_client(config, engine, index, num_clients, lengths, **SHM) as client:
                assert client.receive() == "streaming"
                if length != ENDLESS:
                    assert client.receive() == {it: [length, "length"] for it in lengths}
                assert engine.process.is_alive()
                client.process.kill()
                client.process.join()
        assert engine.wait_for_exit() == 0
        assert len(engine.log_lines("the last API server is gone; the engine stops")) == 1
        assert "Traceback" not in engine.log


# ----------------------------------------------------------------------------------------
# Engines that die
# ----------------------------------------------------------------------------------------


async def check_all_fail(llm: AsyncLLM, streams: list[Any]) -> None:
    """Each request fails once, and so does each later one."""
    for num_tokens, *ends in await asyncio.gather(*streams):
        assert num_tokens > 0
        assert ends == ["EngineDeadError"]
    await check_that_nothing_is_served(llm)


async def check_that_nothing_is_served(llm: AsyncLLM) -> None:
    assert llm.errored
    assert await outcome_of(llm, "too-late", 5) == [0, "EngineDeadError"]
    with pytest.raises(EngineDeadError):
        await llm.check_health()
    with pytest.raises(EngineDeadError):
        await llm.engine_core.call_utility_async("is_sleeping")


async def streams_of(llm: AsyncLLM) -> list[Any]:
    """Start requests; return them when each has a token."""
    events = [asyncio.Event() for _ in range(NUM_STREAMS)]
    streams = [
        asyncio.create_task(outcome_of(llm, f"mine-{index}", ENDLESS, event.set))
        for index, event in enumerate(events)
    ]
    await asyncio.gather(*(event.wait() for event in events))
    return streams


def test_every_request_fails_with_a_killed_engine(config: VllmConfig, logged: list[str]) -> None:
    async def run(engine: Engine) -> None:
        with child_client(config, engine, 0, 2, THEIRS, **SHM) as other:
            async with running_llm(config, engine, 1, count=2) as llm:
                streams = await streams_of(llm)
                await begun(other)
                await llm.check_health()
                engine.signal(signal.SIGKILL)
                await check_all_fail(llm, streams)
            outcomes = await asyncio.to_thread(other.receive)
            assert [ends for _, *ends in outcomes.values()] == [["EngineDeadError"]] * len(THEIRS)
            other.process.join(60)
            assert other.process.exitcode == 0

    with front_end(**SHM), running_engine(config, num_clients=2, **SHM) as engine:
        run_async(run(engine))
    assert [line for line in logged if line.startswith("ERROR")] == [
        "ERROR sparksched: engine 0 is gone: its process died"
    ]


def read_for_ever(client: SyncMPClient) -> None:
    while True:
        client.get_output()


def test_a_client_without_a_loop_sees_the_engine_die(config: VllmConfig, tmp_path: Path) -> None:
    with (
        front_end(**SHM),
        engines_of_clients(tmp_path / "log", **SHM) as processes,
        ThreadPoolExecutor(1) as threads,
    ):
        client = SyncMPClient(copy.deepcopy(config), PacedExecutor, True)
        try:
            client.add_request(endless_request("endless"))
            client.get_output()
            send_signal(processes[0].pid, signal.SIGSTOP)
            call = threads.submit(client.call_utility, "is_sleeping")
            wait_until(lambda: client.utility_results)
            processes[0].kill()
            with pytest.raises(EngineDeadError):
                call.result(60)
            with pytest.raises(EngineDeadError):
                read_for_ever(client)
            with pytest.raises(EngineDeadError):
                client.add_request(endless_request("another"))
        finally:
            client.shutdown()


def test_calls_in_flight_fail_with_the_engine(config: VllmConfig) -> None:
    """A front end's first request is one of them: it begins with a call of vLLM's."""

    async def run(engine: Engine) -> None:
        async with running_llm(config, engine) as llm:
            engine.signal(signal.SIGSTOP)
            calls = llm.engine_core.utility_results
            first = asyncio.create_task(outcome_of(llm, "first", 5))
            call = asyncio.create_task(llm.engine_core.call_utility_async("is_sleeping"))
            async with asyncio.timeout(60):
                while len(calls) < 2:
                    await asyncio.sleep(0.01)
            engine.signal(signal.SIGKILL)
            async with asyncio.timeout(60):
                assert await first == [0, "EngineDeadError"]
                with pytest.raises(EngineDeadError):
                    await call

    with front_end(**SHM), running_engine(config, **SHM) as engine:
        run_async(run(engine))


# ----------------------------------------------------------------------------------------
# Processes that are stopped
# ----------------------------------------------------------------------------------------


def test_health_of_a_stopped_engine(config: VllmConfig, logged: list[str]) -> None:
    async def run(engine: Engine) -> None:
        async with running_llm(config, engine) as llm:
            stream = asyncio.create_task(outcome_of(llm, "long", 1000))
            await llm.engine_core.call_utility_async("is_sleeping")
            await llm.check_health()
            engine.signal(signal.SIGSTOP)
            error = await health_until(llm, EngineStuckError)
            assert str(error).startswith("engine 0 is stuck: its process hasn't run for ")
            assert not llm.errored
            engine.signal(signal.SIGCONT)
            assert await health_until(llm, type(None)) is None
            assert await stream == [1000, "length"]

    with front_end(**QUICK), running_engine(config, **QUICK) as engine:
        run_async(run(engine))
    # A busy machine stops processes, too, and then there are more of them.
    first, second, *_ = (line for line in logged if "stuck" in line or "runs again" in line)
    assert first.startswith("WARNING sparksched: engine 0 is stuck: it hasn't run for ")
    assert second == "INFO sparksched: engine 0 runs again"


async def health_until(llm: AsyncLLM, kind: type[Any]) -> EngineStuckError | None:
    """Ask for an engine's health until the answer is of a kind; None if it is well."""
    async with asyncio.timeout(60):
        while True:
            try:
                answer = await llm.check_health()
            except EngineStuckError as error:
                answer = error
            if isinstance(answer, kind):
                return answer
            await asyncio.sleep(0.01)


def test_the_engine_notices_a_stopped_client(config: VllmConfig) -> None:
    with running_engine(config, **QUICK) as engine:
        with child_client(config, engine, 0, 1, {"long": 1200}, **QUICK) as client:
            assert client.receive() == "streaming"
            send_signal(client.pid, signal.SIGSTOP)
            engine.wait_for_line("API server 0 is stuck: it hasn't run for ")
            os.kill(client.pid, signal.SIGCONT)
            engine.wait_for_line("API server 0 runs again")
            assert client.receive() == {"long": [1200, "length"]}
        assert engine.wait_for_exit() == 0


# ----------------------------------------------------------------------------------------
# Orderly ends
# ----------------------------------------------------------------------------------------


def test_an_orderly_end_is_no_error(config: VllmConfig, logged: list[str], tmp_path: Path) -> None:
    """The client ends its engine, in the midst of a request."""
    log_path = tmp_path / "engine.log"

    async def run() -> None:
        async with connected(config, None) as reader:
            await reader.add(endless_request("endless"))
            await reader.begin("endless")
            await asyncio.to_thread(reader.client.shutdown)
            await asyncio.sleep(0.2)

    with front_end(**SHM), engines_of_clients(log_path, **SHM) as processes:
        run_async(run())
        wait_until(lambda: processes[0].exitcode is not None, what="for the engine")
    assert not [line for line in logged if not line.startswith("INFO")]
    log = log_path.read_text()
    assert "ERROR" not in log
    assert "Traceback" not in log


def traceback_of(record: logging.LogRecord) -> str:
    return logging.Formatter().formatException(record.exc_info) if record.exc_info else ""


@pytest.fixture(name="tracebacks")
def _tracebacks() -> Iterator[list[str]]:
    with collected(text=traceback_of) as texts:
        yield texts


def test_an_engine_that_is_asked_to_end(
    config: VllmConfig, logged: list[str], tracebacks: list[str]
) -> None:
    """It ends by itself, which is no fault; the requests of a client that did not ask fail."""

    async def run(engine: Engine) -> None:
        async with running_llm(config, engine) as llm:
            (stream, *others) = await streams_of(llm)
            engine.signal(signal.SIGTERM)
            for num_tokens, *ends in await asyncio.gather(stream, *others):
                assert num_tokens > 0
                assert len(ends) == 1
            assert engine.wait_for_exit() == 0
            async with asyncio.timeout(60):
                while not llm.errored:
                    await asyncio.sleep(0.01)

    with front_end(**SHM), running_engine(config, **SHM) as engine:
        run_async(run(engine))
        assert "ERROR" not in engine.log
    assert not [line for line in logged if not line.startswith("INFO")]
    assert any("EngineDeadError" in text for text in tracebacks)
    assert not [text for text in tracebacks if "sparksched" in text]


# ----------------------------------------------------------------------------------------
# Front ends that are dropped: nobody closes an `LLM`
# ----------------------------------------------------------------------------------------

DIES = pytest.mark.parametrize("dies", [False, True], ids=["orderly", "dies"])


def belongings() -> Counter[str]:
    """Count what this process has of each kind: descriptors that are no files, and threads."""
    # Those that have ended are joined. VLLM joins none that it has to kill, after five seconds.
    multiprocessing.active_children()
    kinds: Counter[str] = Counter(thread.name for thread in threading.enumerate())
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the directory's own
            link = os.readlink(entry)
            if not link.startswith("/") or link.startswith("/memfd:"):
                kinds[link.partition(":[")[0] if "anon_inode" not in link else link] += 1
    kinds.update(it for it in thread_names(os.getpid()) if it.startswith(("ZMQ", "sparksched")))
    return kinds


@pytest.fixture
def _undisturbed() -> Iterator[None]:
    """Let nothing collect garbage, nor keep it: pytest's log has exceptions, and so their frames.

    What starts processes for the tests is there before.
    """
    multiprocessing.forkserver.ensure_running()
    gc.disable()
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
    gc.enable()


def is_dead(engine: LLMEngine) -> bool:
    try:
        engine.step()
    except EngineDeadError:
        return True
    return False


def serve(config: VllmConfig, processes: list[Any], dies: bool) -> None:
    engine = LLMEngine(copy.deepcopy(config), PacedExecutor, log_stats=True, multiprocess_mode=True)
    engine.itself = engine  # nothing is returned before a collection, as with an `LLM`
    prompt = {"prompt_token_ids": prompt_of(0)}
    engine.add_request("one", prompt, SamplingParams(max_tokens=ENDLESS if dies else 5))
    engine.step()
    if dies:
        processes[-1].kill()
        wait_until(lambda: is_dead(engine))
    while not dies and engine.has_unfinished_requests():
        engine.step()


@pytest.mark.usefixtures("_undisturbed")
@DIES
def test_one_collection_returns_all_of_a_front_end(
    config: VllmConfig, tmp_path: Path, dies: bool
) -> None:
    with front_end(**SHM), engines_of_clients(tmp_path / "log", **SHM) as processes:
        before = belongings()
        serve(config, processes, dies)
        processes.clear()
        gc.collect()
        wait_until(lambda: belongings() <= before, 20, f"for {before}")


async def serve_in_loop(config: VllmConfig, processes: list[Any], dies: bool) -> None:
    llm = AsyncLLM(
        vllm_config=copy.deepcopy(config),
        executor_class=PacedExecutor,
        log_stats=True,
        log_requests=False,
    )
    begun = asyncio.Event()
    request = asyncio.create_task(outcome_of(llm, "one", ENDLESS if dies else 5, begun.set))
    await begun.wait()
    if dies:
        processes[-1].kill()
    _, end = await request
    assert (end == "EngineDeadError") == dies
    # Whichever of them noticed the death holds the client until it has cleaned up.
    cleaners = {"MPClientEngineMonitor", "RingShutdown"}
    while dies and any(thread.name in cleaners for thread in threading.enumerate()):
        await asyncio.sleep(0.01)


@pytest.mark.usefixtures("_undisturbed")
@DIES
def test_one_collection_returns_all_of_a_front_end_in_a_loop(
    config: VllmConfig, tmp_path: Path, dies: bool
) -> None:
    async def run(processes: list[Any]) -> None:
        before = belongings()
        await serve_in_loop(config, processes, dies)
        processes.clear()
        gc.collect()
        for _ in range(2000):
            if belongings() <= before:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"{belongings() - before} is left")

    with front_end(**SHM), engines_of_clients(tmp_path / "log", **SHM) as processes:
        run_async(run(processes))
