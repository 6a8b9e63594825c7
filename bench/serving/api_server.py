"""What the benchmark does inside a vLLM API server: drive its `AsyncLLM`, and time what arrives.

Each API server listens at a Unix socket for one benchmark. A thread waits for its commands, which
are then run in the event loop, as everything that the server does. See `bench.serving.remote`.
"""

import asyncio
import contextlib
import functools
import json
import os
import threading
import traceback
from multiprocessing.connection import Connection, Listener
from typing import Any

from bench.serving.client_probe import ClientProbe
from bench.serving.engine_probe import thread_names
from bench.serving.streams import RUNNING, Recorder, StreamLog, clock
from bench.serving.workload import Request, Workload

POLL_S = 0.005
LATEST_S = 120.0
"""Whatever takes longer will never come."""


def address_of(address: str, index: int) -> str:
    """Return where one of several API servers listens."""
    return f"{address}-{index}"


def install(entry: Any, address: str) -> None:
    """Have the server listen as soon as it has its engines."""
    original = entry.init_app_state

    @functools.wraps(original)
    async def init_app_state(engine_client: Any, *args: Any, **kwargs: Any) -> None:
        await original(engine_client, *args, **kwargs)
        control = Control(engine_client, asyncio.get_running_loop())
        index = engine_client.engine_core.client_index
        listener = Listener(address_of(address, index), family="AF_UNIX")
        threading.Thread(target=control.serve, args=(listener,), daemon=True).start()

    entry.init_app_state = init_app_state


class Control:
    """Obeys the benchmark. Methods that begin with `on_` are the commands."""

    def __init__(self, llm: Any, loop: asyncio.AbstractEventLoop) -> None:
        """Drive this `AsyncLLM` in this loop."""
        self._llm = llm
        self._loop = loop
        self._probe: ClientProbe | None = None
        self._num_rounds = 0

    def serve(self, listener: Listener) -> None:
        """Take commands until the benchmark hangs up."""
        connection = listener.accept()
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, name, arguments = connection.recv()
                coroutine = self._obey(connection, number, name, arguments)
                asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _obey(
        self, connection: "Connection[Any, Any]", number: int, name: str, arguments: dict[str, Any]
    ) -> None:
        def notify(event: str) -> None:
            connection.send((number, "event", event))

        try:
            result = await getattr(self, f"on_{name}")(notify=notify, **arguments)
            connection.send((number, "ok", result))
        except Exception:
            connection.send((number, "error", traceback.format_exc()))

    async def on_describe(self, notify: Any) -> dict[str, Any]:
        """Return what runs in this process and in the engines'."""
        client = self._llm.engine_core
        rings = getattr(client.resources, "sparksched_rings", None)
        return {
            "pid": os.getpid(),
            "threads": thread_names(),
            "num_api_servers": client.client_count,
            "transport": "rings" if rings is not None and rings.channels else "ZMQ",
            "engines": await self._describe_engines(),
        }

    async def _describe_engines(self) -> list[dict[str, Any]]:
        return [json.loads(answer) for answer in await self._ask_engines("bench_describe")]

    async def _ask_engines(self, method: str, *arguments: Any) -> list[Any]:
        # With several engines the public method returns only the first one's answer.
        client = self._llm.engine_core
        calls = [
            client._call_utility_async(method, *arguments, engine=engine)
            for engine in client.core_engines
        ]
        return list(await asyncio.gather(*calls))

    # ---- streams ----

    async def on_stream(
        self, workload: Workload, notify: Any, part: int = 0, num_parts: int = 1
    ) -> list[StreamLog]:
        """Send this server's part of the requests at once; return what they have brought."""
        requests = workload.requests()[part::num_parts]
        recorder = Recorder(len(requests), notify)
        self._num_rounds += 1
        await asyncio.gather(
            *(self._stream(number, request, recorder) for number, request in enumerate(requests))
        )
        await self._wait_until_idle()
        return recorder.logs()

    async def _stream(self, number: int, request: Request, recorder: Recorder) -> None:
        recorder.send(number)
        async for output in self._generate(number, request):
            recorder.note(number, clock(), len(output.outputs[0].token_ids))
        recorder.end(number)

    def _generate(self, number: int, request: Request) -> Any:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        params = SamplingParams(
            max_tokens=request.max_tokens,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        # The form in which the server itself hands prompts over.
        prompt = {"type": "token", "prompt_token_ids": request.prompt}
        return self._llm.generate(prompt, params, f"bench-{self._num_rounds}-{number}")

    async def _wait_until_idle(self) -> None:
        """Wait until the engines have nothing left to do for this server."""
        async with asyncio.timeout(LATEST_S):
            while self._llm.output_processor.has_unfinished_requests():
                await asyncio.sleep(POLL_S)
            await self._describe_engines()

    async def on_collect(self, workload: Workload, notify: Any) -> list[list[int]]:
        """Return the tokens of each request, all of them scheduled from the same step on."""
        self._num_rounds += 1
        async with asyncio.timeout(LATEST_S):
            while not await self._llm.reset_prefix_cache():
                await asyncio.sleep(POLL_S)
        await self._llm.pause_generation(mode="keep", clear_cache=False)
        tasks = []
        for number, request in enumerate(workload.requests()):
            tasks.append(asyncio.create_task(self._collect(number, request)))
            await asyncio.sleep(0)  # so that they get there in this order
        async with asyncio.timeout(LATEST_S):
            while await self._num_in_engines() < len(tasks):
                await asyncio.sleep(POLL_S)
        await self._llm.resume_generation()
        streams = await asyncio.gather(*tasks)
        await self._wait_until_idle()
        return list(streams)

    async def _num_in_engines(self) -> int:
        return sum(int(it["num_requests"]) for it in await self._describe_engines())

    async def _collect(self, number: int, request: Request) -> list[int]:
        token_ids: list[int] = []
        async for output in self._generate(number, request):
            token_ids += output.outputs[0].token_ids
        return token_ids

    # ---- probes ----

    async def on_start_probes(self, notify: Any) -> None:
        """Begin to time the engines' phases and this process's part of each message."""
        await self._ask_engines("bench_start", False)
        self._probe = ClientProbe()

    async def on_stop_probes(self, notify: Any) -> dict[str, Any]:
        """Return what was timed."""
        assert self._probe is not None
        client, self._probe = self._probe.stop(), None
        engines = [json.loads(answer) for answer in await self._ask_engines("bench_stop")]
        return {"engines": engines, "client": client}

    async def on_trace(
        self, workload: Workload, prefix: str, delay_steps: int, steps: int, notify: Any
    ) -> None:
        """Have the worker write a profiler's trace of a few steps while all streams decode."""
        running = asyncio.Event()
        recorder = Recorder(
            workload.num_requests, lambda event: running.set() if event == RUNNING else None
        )
        self._num_rounds += 1
        tasks = [
            asyncio.create_task(self._stream(number, request, recorder))
            for number, request in enumerate(workload.requests())
        ]
        async with asyncio.timeout(LATEST_S):
            await running.wait()
        await self._ask_engines("bench_start", True)
        try:
            await self._llm.start_profile(
                prefix, delay_iterations=delay_steps, max_iterations=steps
            )
            await asyncio.gather(*tasks)
            await self._llm.stop_profile()
        finally:
            await self._ask_engines("bench_stop")
        await self._wait_until_idle()
