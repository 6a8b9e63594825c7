"""vLLM's real clients, in this process and in processes of their own."""

import asyncio
import copy
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

from engine.harness import new_request, restored_vllm
from logs import collected, with_level
from sparksched import plugin
from vllm.config import VllmConfig
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.core_client import AsyncMPClient, EngineCoreClient
from vllm.v1.metrics.stats import SchedulerStats

from testkit.device import EOS_TOKEN_ID, continuation

from .engines import (
    Engine,
    PacedExecutor,
    enter,
    environment_with,
    forkserver,
    run_engine,
    running_engine,
    start_process,
)

TIMEOUT_S = 60.0
ENDLESS = 60_000
"""So many tokens take minutes."""


# ----------------------------------------------------------------------------------------
# This process
# ----------------------------------------------------------------------------------------


@contextmanager
def front_end(**variables: str) -> Iterator[None]:
    """Make this process one that vLLM has loaded sparksched into, for a while."""
    with restored_vllm():
        environment = environment_with(**variables)
        os.environ.clear()
        os.environ.update(environment)
        plugin.register()
        yield


def transport_log() -> AbstractContextManager[list[str]]:
    """Collect what the transport logs in this process."""
    return collected("vllm.sparksched.transport", text=with_level)


Addresses = Mapping[str, str]
"""What vLLM calls `client_addresses`."""


class Served(Protocol):
    """Engines that have been started, and how clients reach them."""

    @property
    def directory(self) -> Path: ...

    def addresses(self, index: int) -> Addresses: ...


def make_client(
    config: VllmConfig, engine: Engine | Addresses | None, index: int = 0, count: int = 1
) -> AsyncMPClient:
    """Connect to an engine as one of its clients, or to engines that the client starts itself."""
    addresses = engine.addresses(index) if isinstance(engine, Engine) else engine
    return EngineCoreClient.make_async_mp_client(
        vllm_config=copy.deepcopy(config),
        executor_class=PacedExecutor,
        log_stats=True,
        client_addresses=addresses,
        client_count=count,
        client_index=index,
    )


class Reader:
    """Reads all that a client gets, as `AsyncLLM` does, and keeps it."""

    def __init__(self, client: AsyncMPClient) -> None:
        self.client = client
        self.tokens: dict[str, list[int]] = {}
        self.finishes: dict[str, list[FinishReason]] = {}
        self.errors: list[Exception] = []
        self.stats: list[SchedulerStats] = []
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while not self.errors:
            try:
                outputs = await self.client.get_output_async()
            except Exception as error:
                self.errors.append(error)
            else:
                self._note(outputs)
            self._changed.set()

    def _note(self, outputs: Any) -> None:
        if outputs.scheduler_stats is not None:
            self.stats.append(outputs.scheduler_stats)
        for output in outputs.outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                self.finishes.setdefault(output.request_id, []).append(output.finish_reason)

    async def until(self, condition: Callable[[], Any], timeout_s: float = TIMEOUT_S) -> None:
        """Read until a condition holds."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                assert not self.errors, self.errors
                self._changed.clear()
                await self._changed.wait()

    async def add(self, *requests: EngineCoreRequest) -> None:
        """Send requests, in this order."""
        for request in requests:
            async with asyncio.timeout(TIMEOUT_S):
                await self.client.add_request_async(request)

    async def finish(self, request_ids: Iterable[str]) -> None:
        """Read until these requests have ended."""
        await self.until(lambda: self.finishes.keys() >= set(request_ids))

    async def begin(self, *request_ids: str) -> None:
        """Read until each of these requests has a token."""
        await self.until(lambda: all(self.tokens.get(it) for it in request_ids))

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the engine."""
        async with asyncio.timeout(TIMEOUT_S):
            return await self.client.call_utility_async(method, *args)

    async def call_executor(self, method: str, *args: Any) -> Any:
        """Call a method of the fake executor."""
        (result,) = await self.call("collective_rpc", method, None, args, None)
        return result

    async def unfinished(self) -> list[tuple[str, int]]:
        """Return id and client of each request in the engine."""
        return [tuple(it) for it in await self.call("unfinished_requests")]

    async def close(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        # After five seconds vLLM kills engines, and raises if one ends meanwhile.
        self.client.shutdown(timeout=TIMEOUT_S)


class Ear:
    """A client's reading side, which the test can close."""

    def __init__(self, reader: Reader) -> None:
        (self.channel,) = reader.client.resources.sparksched_rings.channels.values()
        self.loop = asyncio.get_running_loop()

    def close(self) -> None:
        self.loop.remove_reader(self.channel.rings.fileno())

    def listen(self) -> None:
        """Take some messages, and no more."""
        self.channel._on_event()

    def open(self) -> None:
        self.loop.add_reader(self.channel.rings.fileno(), self.channel._on_event)
        self.channel._on_event()


@asynccontextmanager
async def connected(
    config: VllmConfig, engine: Engine | Addresses | None, index: int = 0, count: int = 1
) -> AsyncIterator[Reader]:
    reader = Reader(make_client(config, engine, index, count))
    try:
        yield reader
    finally:
        await reader.close()


@asynccontextmanager
async def running_llm(
    config: VllmConfig,
    engine: Served | None,
    index: int = 0,
    count: int = 1,
    log_stats: bool = True,
) -> AsyncIterator[AsyncLLM]:
    """Run vLLM's front end in this process, as a client of engines or one that starts its own."""
    llm = AsyncLLM(
        vllm_config=copy.deepcopy(config),
        executor_class=PacedExecutor,
        log_stats=log_stats,
        log_requests=False,
        client_addresses=engine and engine.addresses(index),
        client_count=count,
        client_index=index,
    )
    try:
        yield llm
    finally:
        llm.shutdown(timeout=TIMEOUT_S)


@contextmanager
def engines_of_clients(
    log_path: Path, prepare: Callable[[], None] | None = None, **variables: str
) -> Iterator[list[Any]]:
    """Let clients that start their own engines, and a coordinator, do that in our way.

    Yields their processes.
    """
    processes: list[Any] = []

    class Context:
        Pipe = staticmethod(forkserver.Pipe)

        @staticmethod
        def Process(target: Any, name: str, kwargs: dict[str, Any], **options: Any) -> Any:
            if target is EngineCoreProc.run_engine_core:
                target, kwargs = run_engine, {"prepare": prepare, "kwargs": kwargs}
            args = (target, log_path, environment_with(**variables), (), kwargs)
            process = forkserver.Process(target=enter, args=args, name=name, **options)
            processes.append(process)
            return process

    with (
        mock.patch("vllm.v1.engine.utils.get_mp_context", Context),
        mock.patch("vllm.v1.engine.coordinator.get_mp_context", Context),
    ):
        yield processes


def run_async(coroutine: Any, loop_factory: Any = None, timeout_s: float = 120.0) -> Any:
    """Run a test's coroutine, but not for ever."""
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(asyncio.wait_for(coroutine, timeout_s))


def play(
    scenario: Callable[[Reader], Awaitable[Any]],
    config: VllmConfig,
    *,
    prepare: Callable[[], None] | None = None,
    **variables: str,
) -> Any:
    """Play a scenario with a client and its engine, and return what it returns."""

    async def connect() -> Any:
        async with connected(config, engine) as reader:
            return await scenario(reader)

    variables = {"SPARKSCHED_TRANSPORT": "shm", **variables}
    with front_end(**variables), running_engine(config, prepare=prepare, **variables) as engine:
        return run_async(connect())


def play_both(
    scenario: Callable[[Reader], Awaitable[Any]], config: VllmConfig, **options: Any
) -> Any:
    """Play a scenario through rings and through ZMQ; return what both return."""
    ours = play(scenario, config, **options)
    assert ours == play(scenario, config, SPARKSCHED_TRANSPORT="zmq", **options)
    return ours


# ----------------------------------------------------------------------------------------
# Requests
# ----------------------------------------------------------------------------------------


def prompt_of(index: int, length: int | None = None) -> list[int]:
    length = 10 + 15 * (index % 12) if length is None else length
    return [(7 * index + position) % 200 for position in range(length)]


def expected_tokens(prompt: list[int], max_tokens: int, ignore_eos: bool = False) -> list[int]:
    """Return what a request must be given, whoever schedules it and however it travels."""
    tokens = list(itertools.islice(continuation(prompt), max_tokens))
    ends = EOS_TOKEN_ID in tokens and not ignore_eos
    return tokens[: tokens.index(EOS_TOKEN_ID) + 1] if ends else tokens


def endless_request(request_id: str, **settings: Any) -> EngineCoreRequest:
    """Return a request that is still running when the test is over."""
    return new_request(request_id, prompt_of(1), ENDLESS, ignore_eos=True, **settings)


def bulk_of(num_bytes: int) -> dict[str, Any]:
    """Return sampling parameters of more than so many bytes, which nothing in the engine reads."""
    return {"extra_args": {"bulk": "x" * num_bytes}}


def bulky_request(request_id: str, num_bytes: int, **settings: Any) -> EngineCoreRequest:
    """Return a request of more than so many bytes, which costs the scheduler nothing."""
    settings = {"max_tokens": 2, **bulk_of(num_bytes), **settings}
    return new_request(request_id, prompt_of(2), **settings)


# ----------------------------------------------------------------------------------------
# Other processes
# ----------------------------------------------------------------------------------------


@dataclass
class ChildClient:
    """A front end in a process of its own, and what it reports."""

    process: Any
    connection: Connection
    log_path: Path

    @property
    def pid(self) -> int:
        pid: int = self.process.pid
        return pid

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def receive(self, timeout_s: float = TIMEOUT_S) -> Any:
        """Return the next report."""
        assert self.connection.poll(timeout_s), f"the client says nothing:\n{self.log}"
        return self.connection.recv()

    def stop(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.connection.close()


@contextmanager
def child(
    target: Callable[..., None], log_path: Path, *args: Any, **variables: str
) -> Iterator[ChildClient]:
    """Run a function in a process of its own; its last argument is where it reports."""
    ours, theirs = forkserver.Pipe()
    process = start_process(target, log_path, environment_with(**variables), *args, theirs)
    theirs.close()
    client = ChildClient(process, ours, log_path)
    try:
        yield client
    finally:
        client.stop()
        print(client.log)


def child_client(
    config: VllmConfig,
    engine: Served,
    index: int,
    count: int,
    lengths: Mapping[str, int],
    **variables: str,
) -> AbstractContextManager[ChildClient]:
    """Run a client that asks for so many tokens for each of its requests.

    It reports "streaming" once each request has a token, and then what became of each.
    """
    log_path = engine.directory / f"client-{index}.log"
    arguments = config, engine.addresses(index), index, count, dict(lengths)
    return child(run_client, log_path, *arguments, **variables)


def run_client(
    config: VllmConfig,
    addresses: Addresses,
    index: int,
    count: int,
    lengths: dict[str, int],
    reports: Connection,
) -> None:
    plugin.register()
    asyncio.run(_stream_all(config, addresses, index, count, lengths, reports))


async def _stream_all(
    config: VllmConfig,
    addresses: Addresses,
    index: int,
    count: int,
    lengths: dict[str, int],
    reports: Connection,
) -> None:
    llm = AsyncLLM(
        vllm_config=config,
        executor_class=PacedExecutor,
        log_stats=False,
        log_requests=False,
        client_addresses=addresses,
        client_count=count,
        client_index=index,
    )
    begun = {request_id: asyncio.Event() for request_id in lengths}

    async def report_begin() -> None:
        await asyncio.gather(*(event.wait() for event in begun.values()))
        reports.send("streaming")

    reporter = asyncio.create_task(report_begin())
    outcomes = await asyncio.gather(
        *(outcome_of(llm, it, lengths[it], begun[it].set) for it in lengths)
    )
    if all(event.is_set() for event in begun.values()):
        await reporter
    reporter.cancel()
    reports.send(dict(zip(lengths, outcomes, strict=True)))
    llm.shutdown()


async def outcome_of(
    llm: AsyncLLM,
    request_id: str,
    max_tokens: int,
    on_token: Callable[[], object] = lambda: None,
    **settings: Any,
) -> list[Any]:
    """Stream a request; return how many tokens came, and each end that it had."""
    params = SamplingParams(
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        **settings,
    )
    prompt = {"prompt_token_ids": prompt_of(1)}
    num_tokens, ends = 0, []
    try:
        async for output in llm.generate(prompt, params, request_id):
            for completion in output.outputs:
                num_tokens += len(completion.token_ids)
            on_token()
            ends += [it.finish_reason for it in output.outputs if it.finish_reason is not None]
    except Exception as error:
        ends.append(type(error).__name__)
    return [num_tokens, *ends]
