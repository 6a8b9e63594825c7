"""One side of `bench.micro.host_path`: a process with an `AsyncLLM`, which has an engine process.

The client process does what an API server does around its `AsyncLLM`, on uvloop, and nothing else:
tasks that iterate over `generate()`. It obeys a pipe: see `serve`.
"""

import asyncio
import contextlib
import gc
import itertools
import os
import random
import time
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

STOCK = "vLLM"
OURS = "sparksched"
SCHEDULERS = {
    STOCK: "vllm.v1.core.sched.async_scheduler.AsyncScheduler",
    OURS: "sparksched.scheduler.SparkScheduler",
}

LATEST_S = 60.0
"""Whatever takes longer will never come."""

VOCABULARY = 200_000
NUM_SHORT_TOKENS = 64
"""A decoding request's prompt has at least so many tokens, and up to so many more."""
POLL_S = 0.01
MAX_AHEAD = 2
"""Steps whose results the engine gets before the client has taken them. With two, an engine that is
the faster one has always the next step's outputs ready for its client; with three, outputs of two
steps come to be merged."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Setup:
    """What a side is to be."""

    side: str
    directory: Path
    """For the model's configuration."""
    client_core: int
    engine_core: int
    scheduler: str = ""
    """Whose it is, if the side has another name."""
    engine_arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def owner(self) -> str:
        """Whose scheduler it is: `STOCK` or `OURS`."""
        return self.scheduler or self.side


@dataclass(frozen=True)
class StreamLog:
    """When a stream's outputs were there, and how many tokens each had."""

    times_ns: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """The last one of each output: of the marker alone."""


@dataclass(frozen=True)
class Window:
    """What both processes have counted between two moments of the client's clock."""

    start_ns: int
    end_ns: int
    client_cpu_ns: int
    engine: Row
    """What the executor has counted."""

    @property
    def seconds(self) -> float:
        """How long it was."""
        return (self.end_ns - self.start_ns) / 1e9


# ---- process ----


def serve(connection: Connection, setup: Setup, client_class: "type[Client] | None" = None) -> None:
    """Be a client with an engine until the pipe closes or says so; answer `(is_ok, result)`."""
    os.setsid()  # so that the benchmark can end the engine, too, and Ctrl-C doesn't get here
    import uvloop

    try:
        _select_scheduler(setup)
        uvloop.run(_obey(connection, setup, client_class or Client))
        connection.send((True, None))
    except Exception:
        with contextlib.suppress(ConnectionError):
            connection.send((False, traceback.format_exc()))


def _select_scheduler(setup: Setup) -> None:
    """Choose by the environment, as users do, what this process and its engine load."""
    os.environ |= {
        # As in `vllm serve`: the engine process imports all anew, and finds the plugin itself.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "SPARKSCHED_STRICT": "1",
    }
    os.environ.pop("VLLM_PLUGINS", None)
    os.environ.pop("VLLM_SCHEDULER", None)
    if setup.owner != STOCK and "scheduler_cls" not in setup.engine_arguments:
        os.environ["VLLM_SCHEDULER"] = "sparksched"
    os.environ |= setup.environment


async def _obey(connection: Connection, setup: Setup, client_class: "type[Client]") -> None:
    loop = asyncio.get_running_loop()
    client = client_class(setup)
    try:
        async with asyncio.timeout(LATEST_S):
            connection.send((True, await client.describe()))
        gc.collect()
        gc.freeze()  # as vLLM's server does after its start
        while True:
            # A thread of its own waits, so that the event loop runs on.
            command = await loop.run_in_executor(None, _receive, connection)
            if command is None:
                return
            name, arguments = command
            async with asyncio.timeout(LATEST_S):
                result = await getattr(client, name)(**arguments)
            connection.send((True, result))
    finally:
        client.close()


def _receive(connection: Connection) -> tuple[str, Row] | None:
    """Return the next command; None if there won't be any."""
    try:
        command: tuple[str, Row] | None = connection.recv()
    except (EOFError, ConnectionError):
        return None  # the benchmark is gone
    return command


class Client:
    """An `AsyncLLM` and what the benchmark has it do. Public methods are what the pipe may ask."""

    def __init__(self, setup: Setup) -> None:
        from vllm.sampling_params import RequestOutputKind, SamplingParams
        from vllm.v1.engine.async_llm import AsyncLLM

        from bench.micro import clocked_executor as executor

        executor.pin_process(setup.client_core)
        self._setup = setup
        self._executor = executor
        self._params = lambda max_tokens: SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._max_tokens = executor.MAX_MODEL_LEN - 2 * NUM_SHORT_TOKENS
        self._numbers = itertools.count()
        pipe = setup.directory / f"pipe-{os.getpid()}"
        os.mkfifo(pipe)
        model = setup.directory / f"model-{os.getpid()}"
        args = executor.engine_args(model, pipe, setup.engine_core)
        for name, value in setup.engine_arguments.items():
            setattr(args, name, value)
        self._llm = AsyncLLM.from_engine_args(args)
        self._pipe = os.open(pipe, os.O_WRONLY)

    def close(self) -> None:
        """End the engine."""
        os.close(self._pipe)
        self._llm.shutdown()

    async def _ask_engine(self, method: str, *args: Any) -> Any:
        (answer,) = await self._llm.collective_rpc(method, args=args)
        return answer

    async def describe(self) -> Row:
        """Return what runs in the two processes; raise RuntimeError if it isn't what was asked."""
        found: Row = await self._ask_engine("describe")
        wanted = {
            "scheduler": SCHEDULERS[self._setup.owner],
            "is_async": True,
            "cores": [self._setup.engine_core],
        }
        if found | wanted != found:
            raise RuntimeError(f"the engine of {self._setup.side} is {found}, not {wanted}")
        rings = getattr(self._llm.engine_core.resources, "sparksched_rings", None)
        transport = "rings" if rings is not None and rings.channels else "ZMQ"
        return found | {"transport": transport}

    # ---- decode ----

    async def decode(self, streams: int, step_ms: float, warm_up_s: float, window_s: float) -> Row:
        """Let so many streams run side by side, and measure while none begins or ends."""
        await self._ask_engine("set_step_ms", step_ms)
        await self._ask_engine("hold_back", MAX_AHEAD)
        logs = [StreamLog() for _ in range(streams)]
        # The marker is the last one: what the others get of a step, they have got before it.
        *others, last = logs
        async with self._running([*(self._stream(log) for log in others), self._mark(last)]):
            while not all(log.times_ns for log in logs):
                await asyncio.sleep(POLL_S)
            await asyncio.sleep(warm_up_s)
            window = await self._window(window_s)
            os.write(self._pipe, self._executor.END_OF_MARKER)
        await self._clean_up()
        return evaluate_streams(logs, window)

    async def _stream(self, log: StreamLog) -> None:
        """Note when a stream's outputs are there. It has no end: it is to be cancelled."""
        note_time, note_tokens, clock = log.times_ns.append, log.num_tokens.append, clock_ns
        async for output in self._generate("stream"):
            note_time(clock())
            note_tokens(len(output.outputs[0].token_ids))
        _fail_early(log)

    async def _mark(self, log: StreamLog) -> None:
        """Do the same, and tell the engine's executor how far this stream has come."""
        async for output in self._generate(self._executor.MARKER):
            log.times_ns.append(clock_ns())
            num_tokens = len(output.outputs[0].token_ids)
            log.num_tokens.append(num_tokens)
            log.tokens.append(output.outputs[0].token_ids[-1])
            os.write(self._pipe, b"t" * num_tokens)
        _fail_early(log)

    def _generate(self, name: str) -> AsyncGenerator[Any, None]:
        number = next(self._numbers)
        prompt = prompt_of(number, NUM_SHORT_TOKENS + number % NUM_SHORT_TOKENS)
        params = self._params(self._max_tokens)
        outputs: AsyncGenerator[Any, None] = self._llm.generate(prompt, params, f"{name}-{number}")
        return outputs

    @contextlib.asynccontextmanager
    async def _running(
        self, coroutines: Iterable[Coroutine[Any, Any, None]]
    ) -> AsyncIterator[None]:
        """Run tasks in the background, and cancel them at the end; if one fails, so does all."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(it) for it in coroutines]
            yield
            for task in tasks:
                task.cancel()

    async def _window(self, window_s: float) -> Window:
        await self._ask_engine("start_record")
        start_ns, start_cpu_ns = clock_ns(), time.process_time_ns()
        await asyncio.sleep(window_s)
        end_ns, end_cpu_ns = clock_ns(), time.process_time_ns()
        engine = await self._ask_engine("take_record")
        return Window(start_ns, end_ns, end_cpu_ns - start_cpu_ns, engine)

    async def _clean_up(self) -> None:
        """Leave an idle engine with an empty cache, so that all runs begin alike."""
        await self._ask_engine("hold_back", 0)
        await self._ask_engine("set_step_ms", 0)
        while not await self._llm.reset_prefix_cache():
            await asyncio.sleep(POLL_S)  # a step after the aborts is still to come

    async def idle(self, window_s: float) -> Row:
        """Return what both processes take of a processor while nobody asks for anything."""
        window = await self._window(window_s)
        nanoseconds = {"client": window.client_cpu_ns, "engine": window.engine["cpu_ns"]}
        return {f"{it}_percent": ns / window.seconds / 1e7 for it, ns in nanoseconds.items()}


clock_ns = time.perf_counter_ns


def _fail_early(log: StreamLog) -> None:
    raise RuntimeError(f"a stream has ended after {sum(log.num_tokens)} tokens")


def prompt_of(number: int, num_tokens: int) -> Row:
    """Return a prompt that is always the same of a number, and like no other."""
    token_ids = random.Random(number).choices(range(VOCABULARY), k=num_tokens)
    # In the form in which vLLM's server hands it to its `AsyncLLM`.
    return {"type": "token", "prompt_token_ids": token_ids}


# ---- evaluation ----


def evaluate_streams(logs: list[StreamLog], window: Window) -> Row:
    """Return what the streams got in a window, and what that took."""
    gaps_ms: list[float] = []
    num_outputs = num_merged = num_all = 0
    for log in logs:
        pairs = itertools.pairwise(log.times_ns)
        for (before_ns, now_ns), num_tokens in zip(pairs, log.num_tokens[1:], strict=True):
            if window.start_ns <= now_ns < window.end_ns:
                num_outputs += 1
                num_merged += num_tokens > 1
                num_all += num_tokens
                gaps_ms.append((now_ns - before_ns) / 1e6)
    marker, results_ns = logs[-1], window.engine["results_ns"]
    delivered_us = [
        (at - results_ns[token]) / 1000
        for at, token in zip(marker.times_ns, marker.tokens, strict=True)
        if token in results_ns and at < window.end_ns
    ]
    return {
        "tokens_per_s": num_all / window.seconds,
        "delivery_us": percentiles(delivered_us),
        "output_gap_ms": percentiles(gaps_ms),
        "outputs": num_outputs,
        "merged_outputs": num_merged,
        "launch_us": percentiles([it / 1000 for it in window.engine["gaps_ns"]]),
        "client_us": window.client_cpu_ns / num_all / 1000,
        "engine_us": window.engine["cpu_ns"] / window.engine["tokens"] / 1000,
    }


def percentiles(values: list[float]) -> Row:
    """Return p50, p90 and p99."""
    ordered = sorted(values)
    if not ordered:
        raise RuntimeError("nothing has happened in the window")
    last = len(ordered) - 1
    return {f"p{share}": ordered[min(share * len(ordered) // 100, last)] for share in (50, 90, 99)}
