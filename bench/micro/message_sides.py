"""The two processes of `bench.micro.messages`: an engine without a model, and a client.

Both are vLLM's own classes: an `AsyncMPClient`, and an `EngineCoreProc` with its queues and its
threads, but without a model, and without the loop that takes from the one queue and puts into the
other: a benchmark does that. Each process obeys a pipe: see `serve`.
"""

import asyncio
import contextlib
import functools
import gc
import os
import queue
import random
import threading
import time
import traceback
import types
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ZMQ = "vLLM"
RINGS = "sparksched"

LATEST_S = 30.0
"""A message that takes longer is lost."""

VOCABULARY = 200_000


@dataclass(frozen=True)
class Setup:
    """What a pair of processes has in common."""

    transport: str
    directory: Path
    """For the model's configuration and the sockets."""

    @property
    def addresses(self) -> tuple[str, str]:
        """Where the client listens: for the engine's messages' way in, and for their way out."""
        stem = f"ipc://{self.directory}/{self.transport}"
        return f"{stem}-input", f"{stem}-output"


@dataclass(frozen=True)
class Log:
    """When messages were sent or received, and what that took; lists go by sequence number."""

    times: list[float]
    """Seconds of CLOCK_MONOTONIC: when it was sent, or was there decoded."""
    arrivals: list[float]
    """When a receiver began to decode it; empty for a sender."""
    cpu_s: list[float]
    """CPU time of the whole process, all threads."""


class WrongMessageError(RuntimeError):
    """A message is lost, comes twice or has changed on its way."""


class Arrivals:
    """Notes when vLLM's decoder begins, in whatever thread: then a message has arrived."""

    def __init__(self) -> None:
        from vllm.v1.serial_utils import MsgpackDecoder

        self.times: list[float] = []
        decode = MsgpackDecoder.decode

        @functools.wraps(decode)
        def noting(*args: Any) -> Any:
            self.times.append(time.monotonic())
            return decode(*args)

        MsgpackDecoder.decode = noting  # type: ignore[method-assign]


# ---- payloads ----


def request_id(number: int) -> str:
    """Return an id as long as those of vLLM's OpenAI server."""
    return f"chatcmpl-{number:032x}-{number:08x}"


REQUEST_IDS = [request_id(number) for number in range(1024)]


def build_outputs(sequence: int, num_requests: int) -> Any:
    """Return what a step tells a client: a new token of each request, and statistics."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats

    return EngineCoreOutputs(
        outputs=[EngineCoreOutput(row_id, [sequence]) for row_id in REQUEST_IDS[:num_requests]],
        scheduler_stats=SchedulerStats(num_running_reqs=num_requests, kv_cache_usage=0.5),
    )


def check_outputs(outputs: Any, sequence: int, num_requests: int, thorough: bool) -> None:
    """Raise WrongMessageError if this is not what `build_outputs` has built."""
    rows = outputs.outputs
    samples = rows if thorough else (rows[:1] + rows[-1:])
    is_right = (
        len(rows) == num_requests
        and all(row.new_token_ids == [sequence] for row in samples)
        and outputs.scheduler_stats.num_running_reqs == num_requests
    )
    if thorough:
        is_right = is_right and [row.request_id for row in rows] == REQUEST_IDS[:num_requests]
    if not is_right:
        found = f"{len(rows)} with token {rows[0].new_token_ids}" if rows else "none"
        raise WrongMessageError(f"expected {num_requests} outputs with [{sequence}], got {found}")


def random_prompt(num_tokens: int) -> list[int]:
    """Return token ids, always the same of a length."""
    source = random.Random(num_tokens)
    return [source.randrange(VOCABULARY) for _ in range(num_tokens)]


def build_request(sequence: int, prompt: list[int]) -> Any:
    """Return a request whose prompt begins and ends with its sequence number."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    return EngineCoreRequest(
        request_id=request_id(sequence),
        prompt_token_ids=[sequence, *prompt[1:-1], sequence],
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=100, temperature=0.7, top_p=0.9),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        external_req_id=request_id(sequence)[:-9],
    )


def check_item(item: Any, sequence: int, prompt: list[int], thorough: bool) -> None:
    """Raise WrongMessageError if this is not what was to arrive in the engine's queue."""
    from vllm.v1.engine import EngineCoreRequestType

    kind, content = item
    if kind is EngineCoreRequestType.ABORT:
        is_right = not prompt and content == [request_id(sequence)]
    else:
        request, _ = content
        tokens = request.prompt_token_ids
        is_right = request.request_id == request_id(sequence) and len(tokens) == len(prompt)
        is_right = is_right and tokens[0] == tokens[-1] == sequence
        if thorough:
            is_right = is_right and tokens[1:-1] == prompt[1:-1]
    if not is_right:
        raise WrongMessageError(f"expected request {sequence}, got a {kind} of something else")


# ---- processes ----


def serve(connection: Connection, side: str, setup: Setup) -> None:
    """Be the engine or the client until the pipe closes or says so; answer `(is_ok, result)`."""
    try:
        _select_transport(setup.transport)
        built: Side = {"engine": EngineSide, "client": ClientSide}[side](connection, setup)
        gc.collect()
        gc.freeze()  # as vLLM does after its start
        connection.send((True, None))
        while (command := connection.recv()) is not None:
            name, arguments = command
            connection.send((True, getattr(built, name)(**arguments)))
        built.close()
        connection.send((True, None))
    except EOFError:
        pass  # the benchmark is gone
    except Exception:
        connection.send((False, traceback.format_exc()))


def _select_transport(transport: str) -> None:
    """Have vLLM load the plugin, which it does with its configuration, or not."""
    for name in ("VLLM_SCHEDULER", "SPARKSCHED_TRANSPORT", "VLLM_PLUGINS"):
        os.environ.pop(name, None)
    if transport == RINGS:
        os.environ |= {"VLLM_SCHEDULER": "sparksched", "SPARKSCHED_TRANSPORT": "shm"}


class Side:
    """One of the two processes. Its public methods are what the pipe may ask for."""

    def __init__(self, connection: Connection, setup: Setup) -> None:
        from testkit.executor import engine_config, write_model_directory

        self._connection = connection
        self._setup = setup
        model = write_model_directory(setup.directory / str(os.getpid()))
        self._vllm_config = engine_config(model, async_scheduling=True)
        self._arrivals = Arrivals()

    def close(self) -> None:
        """Say goodbye to the other side."""
        raise NotImplementedError

    def _check_transport(self, uses_rings: bool) -> None:
        if uses_rings != (self._setup.transport == RINGS):
            raise RuntimeError(f"{self._setup.transport}: rings are used: {uses_rings}")

    def _say_started(self) -> None:
        """Let the benchmark start the sender."""
        self._connection.send((True, "started"))


def spin(seconds: float) -> None:
    """Keep the interpreter busy."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


# ---- engine ----


class EngineSide(Side):
    """vLLM's engine process; its main thread does what the engine's loop would do."""

    def __init__(self, connection: Connection, setup: Setup) -> None:
        super().__init__(connection, setup)
        self._engine = self._start_engine()
        self._check_transport(self._rings_of_engine() is not None)

    def _start_engine(self) -> Any:
        """Do what the constructor of `EngineCoreProc` does about messages."""
        from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState
        from vllm.v1.engine.utils import EngineZmqAddresses

        engine = EngineCoreProc.__new__(EngineCoreProc)
        engine.vllm_config = self._vllm_config
        engine.engine_index = 0
        engine.log_stats = False
        engine.input_queue = queue.Queue()
        engine.output_queue = queue.Queue()
        engine.aborts_queue = queue.Queue()
        engine.shutdown_state = EngineShutdownState.RUNNING
        engine.tensor_ipc_receiver = None
        engine.frontend_stats_publish_address = None
        engine.scheduler = types.SimpleNamespace(
            requests={}, get_kv_event_publisher_config=lambda: None, has_requests=lambda: False
        )
        engine.engines_running = False
        engine.batch_queue = None
        engine.preprocess_add_request = lambda request: (request, 0)
        inputs, outputs = self._setup.addresses
        engine.addresses = EngineZmqAddresses(inputs=[inputs], outputs=[outputs])
        ready = threading.Event()
        for target, arguments in (
            (engine.process_input_sockets, ([inputs], None, bytes(2), ready)),
            (engine.process_output_sockets, ([outputs], None, 0)),
        ):
            threading.Thread(target=target, args=arguments, daemon=True).start()
        if not ready.wait(LATEST_S):
            raise RuntimeError("the engine's input thread doesn't start")
        return engine

    def _rings_of_engine(self) -> Any:
        context = getattr(self._engine, "sparksched", None)
        return None if context is None else context.transport

    def close(self) -> None:
        """Say goodbye to the client; the threads end with the process, as in vLLM."""
        transport = self._rings_of_engine()
        if transport is not None:
            transport.close()

    def send(self, num_requests: int, count: int, pace_s: float, work_s: float) -> Log:
        """Send the outputs of a step every `pace_s`; work for `work_s` after each."""
        times, cpu_s = [], []
        self._arrivals.times = []
        for sequence in range(count):
            outputs = self._as_scheduled(build_outputs(sequence, num_requests))
            before = time.process_time()
            times.append(time.monotonic())
            self._engine.output_queue.put_nowait((0, outputs))
            spin(work_s)
            time.sleep(pace_s / 2)
            between = time.process_time()
            time.sleep(pace_s / 2)
            cpu_s.append(2 * between - before - time.process_time())
            _sent = outputs  # freed after the next one was measured: no transport's doing
        return Log(times, [], cpu_s)

    def _as_scheduled(self, outputs: Any) -> Any:
        """Return outputs in the form in which this side's scheduler has them."""
        if self._setup.transport == ZMQ:
            return outputs
        from sparksched import _core
        from sparksched.engine.encoder import PartEncoder

        return _core.encode_like_scheduler(outputs, PartEncoder().encode_part)[0]

    def receive(self, num_tokens: int, count: int, thorough: bool) -> Log:
        """Take requests with prompts of so many tokens from the queue; 0: aborts."""
        prompt = random_prompt(num_tokens)
        times: list[float] = []
        cpu_s: list[float] = []
        self._handle_notices()
        self._arrivals.times = []
        self._say_started()
        for sequence in range(count):
            before = time.process_time()
            # As in vLLM's loop, also without a time limit: the benchmark notices a lost request.
            if self._engine.input_queue.empty():
                with self._engine.aborts_queue.mutex:
                    self._engine.aborts_queue.queue.clear()
            item = self._engine.input_queue.get()
            times.append(time.monotonic())
            cpu_s.append(time.process_time() - before)
            check_item(item, sequence, prompt, thorough)
            del item  # or it would be freed after the next one's arrival
        return Log(times, self._arrivals.times, cpu_s)

    def _handle_notices(self) -> None:
        """Take from the queue what the transport has told the engine's loop: who has come."""
        while not self._engine.input_queue.empty():
            self._engine.input_queue.get()

    def idle(self, seconds: float) -> float:
        """Wait as the engine's loop does; return CPU seconds a second."""
        from vllm.v1.engine import EngineCoreRequestType

        self._handle_notices()
        end = (EngineCoreRequestType.WAKEUP, None)
        timer = threading.Timer(seconds, self._engine.input_queue.put_nowait, [end])
        timer.start()
        before = time.process_time()
        item = self._engine.input_queue.get()
        if item is not end:
            raise WrongMessageError(f"nothing was sent, but {item[0]} has arrived")
        return (time.process_time() - before) / seconds


# ---- client ----


class ClientSide(Side):
    """vLLM's client in an event loop, which runs while something is asked of it."""

    def __init__(self, connection: Connection, setup: Setup) -> None:
        import uvloop

        super().__init__(connection, setup)
        self._loop = uvloop.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._client: Any = self._run(self._connect())
        rings = getattr(self._client.resources, "sparksched_rings", None)
        self._check_transport(rings is not None and bool(rings.channels))

    async def _connect(self) -> Any:
        from vllm.v1.engine.core_client import AsyncMPClient

        inputs, outputs = self._setup.addresses
        addresses = {"input_address": inputs, "output_address": outputs}
        return AsyncMPClient(self._vllm_config, object, True, client_addresses=addresses)

    def _run(self, what: Awaitable[Any]) -> Any:
        return self._loop.run_until_complete(what)

    def close(self) -> None:
        """Say goodbye to the engine."""
        self._run(self._shut_down())
        self._loop.close()

    async def _shut_down(self) -> None:
        self._client.shutdown()
        await asyncio.sleep(0.01)  # for what the client leaves to the loop

    def receive(self, num_requests: int, count: int, busy_s: float, thorough: bool) -> Log:
        """Take outputs of so many requests; a busy loop runs callbacks of `busy_s`."""
        log: Log = self._run(self._receive(num_requests, count, busy_s, thorough))
        return log

    async def _receive(self, num_requests: int, count: int, busy_s: float, thorough: bool) -> Log:
        times: list[float] = []
        cpu_s: list[float] = []
        self._arrivals.times = []
        async with self._busy(busy_s):
            self._say_started()
            try:
                async with asyncio.timeout(LATEST_S):
                    for sequence in range(count):
                        before = time.process_time()
                        outputs = await self._client.get_output_async()
                        times.append(time.monotonic())
                        cpu_s.append(time.process_time() - before)
                        check_outputs(outputs, sequence, num_requests, thorough)
                        del outputs  # or it would be freed after the next one's arrival
            except TimeoutError:
                raise WrongMessageError(f"{len(times)} of {count} outputs have arrived") from None
        return Log(times, self._arrivals.times, cpu_s)

    @contextlib.asynccontextmanager
    async def _busy(self, busy_s: float) -> AsyncIterator[None]:
        handle: asyncio.Handle | None = None

        def work() -> None:
            nonlocal handle
            spin(busy_s)
            handle = self._loop.call_soon(work)

        if busy_s:
            work()
        try:
            yield
        finally:
            if handle is not None:
                handle.cancel()

    def send(self, num_tokens: int, count: int, pace_s: float) -> Log:
        """Send requests with prompts of so many tokens every `pace_s`; 0: aborts."""
        log: Log = self._run(self._send(random_prompt(num_tokens), count, pace_s))
        return log

    async def _send(self, prompt: list[int], count: int, pace_s: float) -> Log:
        times, cpu_s = [], []
        self._arrivals.times = []
        for sequence in range(count):
            request = build_request(sequence, prompt) if prompt else [request_id(sequence)]
            before = time.process_time()
            times.append(time.monotonic())
            if prompt:
                await self._client.add_request_async(request)
            else:
                await self._client.abort_requests_async(request)
            await asyncio.sleep(pace_s / 2)
            between = time.process_time()
            await asyncio.sleep(pace_s / 2)
            cpu_s.append(2 * between - before - time.process_time())
            _sent = request  # freed after the next one was measured: no transport's doing
        return Log(times, [], cpu_s)

    def idle(self, seconds: float) -> float:
        """Wait for outputs that don't come; return CPU seconds a second."""
        before = time.process_time()
        self._run(asyncio.sleep(seconds))
        if not self._client.outputs_queue.empty():
            raise WrongMessageError("nothing was sent, but outputs have arrived")
        return (time.process_time() - before) / seconds
