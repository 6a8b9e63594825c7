"""What the benchmark does inside a vLLM API server: drive its `AsyncLLM`, and ask its engines.

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

from bench.serving.phases import Noted
from bench.serving.streams import Recorder, StreamLog, clock
from bench.serving.workload import Request, Workload

POLL_S = 0.005
LATEST_S = 120.0
"""Whatever takes longer will never come."""
SETTLE_S = 6.0
"""The balancer's counts are published when they change, and each 5 s if they don't."""


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
        self._num_rounds = 0
        self._releasing: asyncio.Task[None] | None = None

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

    async def on_settle(self, notify: Any) -> None:
        """Wait until vLLM's balancer knows that the engines are idle.

        It goes by counts that arrive some 100 ms late. With those of a round that has just ended,
        it would give most of the next one's requests to whichever engine had ended first.
        """
        with contextlib.suppress(TimeoutError):  # what it then does stands in the result
            async with asyncio.timeout(SETTLE_S):
                while any(waiting or running for waiting, running, *_ in self._balance()):
                    await asyncio.sleep(POLL_S)

    def _balance(self) -> list[list[float]]:
        """Return waiting and running requests of each engine, as far as a balancer counts them."""
        return list(getattr(self._llm.engine_core, "lb_engines", ()))

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
        """Send a request; yield its outputs."""
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
        request_id = f"bench-{self._num_rounds}-{number}"
        return self._llm.generate(prompt, params, request_id)

    async def _wait_until_idle(self) -> None:
        """Wait until the engines have nothing left to do for this server."""
        async with asyncio.timeout(LATEST_S):
            while self._llm.output_processor.has_unfinished_requests():
                await asyncio.sleep(POLL_S)
            await self._describe_engines()

    async def on_hold(self, num_requests: int, notify: Any) -> None:
        """Have the engines schedule nothing until they have so many requests; don't wait for it."""
        if self._releasing is not None:  # of a round that has failed, perhaps
            self._releasing.cancel()
            await asyncio.wait([self._releasing])
        await self._llm.pause_generation(mode="keep", clear_cache=False)
        self._releasing = asyncio.create_task(self._release(num_requests))

    async def _release(self, num_requests: int) -> None:
        try:
            await self._wait_for_requests(num_requests)
        finally:
            await self._llm.resume_generation()

    async def _wait_for_requests(self, number: int) -> None:
        """Wait until the engines have so many requests, for two minutes at most."""
        async with asyncio.timeout(LATEST_S):
            while await self._num_in_engines() < number:
                await asyncio.sleep(POLL_S)

    async def _num_in_engines(self) -> int:
        return sum(int(it["num_requests"]) for it in await self._describe_engines())

    # ---- probes ----

    async def on_take_compiled(self, notify: Any) -> list[int | None]:
        """Return how many kernels each worker has compiled since the last call."""
        answers = await self._ask_engines("bench_take_compiled")
        return [worker for answer in answers for worker in json.loads(answer)]

    async def on_start_probes(self, notify: Any) -> None:
        """Begin to note the engines' steps."""
        await self._ask_engines("bench_start")

    async def on_stop_probes(self, notify: Any) -> list[Noted]:
        """Return what was noted, of each engine."""
        return [json.loads(answer) for answer in await self._ask_engines("bench_stop")]
