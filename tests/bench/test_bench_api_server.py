"""What the benchmark does in an API server, with engines that are made up."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from bench.serving import api_server
from bench.serving.api_server import Control


class Client:
    """A client of engines that answer at once."""

    def __init__(self, num_engines: int) -> None:
        self.core_engines = list(range(num_engines))
        self.requests: list[list[str]] = [[] for _ in self.core_engines]

    async def _call_utility_async(self, method: str, *arguments: Any, engine: int) -> Any:
        assert method == "bench_describe"
        return json.dumps({"num_requests": len(self.requests[engine])})


class LLM:
    """An `AsyncLLM` that can be paused."""

    def __init__(self, num_engines: int = 2) -> None:
        self.engine_core = Client(num_engines)
        self.output_processor = SimpleNamespace(has_unfinished_requests=lambda: False)
        self.is_running = asyncio.Event()
        self.is_running.set()

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("keep", False)
        self.is_running.clear()

    async def resume_generation(self) -> None:
        self.is_running.set()


def obey(llm: LLM, command: str, **arguments: Any) -> Any:
    async def run() -> Any:
        control = Control(llm, asyncio.get_running_loop())
        return await getattr(control, command)(notify=lambda event: None, **arguments)

    return asyncio.run(run())


# ---- rounds ----


def test_a_round_waits_until_the_balancer_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_server, "SETTLE_S", 30.0)
    llm = LLM()
    counts = [[0, 512, 0.5], [0, 0, 0.0]]
    llm.engine_core.lb_engines = counts  # type: ignore[attr-defined]
    seen = []

    async def run() -> None:
        control = Control(llm, asyncio.get_running_loop())
        waiting = asyncio.create_task(control.on_settle(lambda event: None))
        for found in ([[0, 512, 0.5], [0, 0, 0.0]], [[3, 0, 0.1], [0, 0, 0.0]], [[0, 0, 0.9]] * 2):
            llm.engine_core.lb_engines = found  # type: ignore[attr-defined]
            await asyncio.sleep(5 * api_server.POLL_S)
            seen.append(waiting.done())
        await waiting

    asyncio.run(run())
    assert seen == [False, False, True]


def test_a_balancer_that_never_comes_to_rest_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(api_server, "SETTLE_S", 0.1)
    llm = LLM()
    llm.engine_core.lb_engines = [[0, 1, 0.0]]  # type: ignore[attr-defined]
    obey(llm, "on_settle")
    obey(LLM(1), "on_settle")  # one engine has no balancer


def test_engines_that_are_held_go_on_once_all_requests_are_there() -> None:
    llm = LLM(1)

    async def run() -> None:
        control = Control(llm, asyncio.get_running_loop())
        await control.on_hold(num_requests=2, notify=lambda event: None)
        for number, is_running in ((0, False), (1, False), (2, True)):
            llm.engine_core.requests[0] = ["request"] * number
            await asyncio.sleep(5 * api_server.POLL_S)
            assert llm.is_running.is_set() == is_running

    asyncio.run(run())


def test_a_round_that_has_failed_doesn_t_let_the_next_one_s_engines_go() -> None:
    llm = LLM(1)

    async def run() -> None:
        control = Control(llm, asyncio.get_running_loop())
        for num_requests in (1, 2):
            await control.on_hold(num_requests=num_requests, notify=lambda event: None)
        llm.engine_core.requests[0] = ["request"]
        await asyncio.sleep(5 * api_server.POLL_S)
        assert not llm.is_running.is_set()

    asyncio.run(run())


def test_engines_aren_t_held_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_server, "LATEST_S", 0.1)
    llm = LLM(1)

    async def run() -> None:
        control = Control(llm, asyncio.get_running_loop())
        await control.on_hold(num_requests=2, notify=lambda event: None)
        await asyncio.wait_for(llm.is_running.wait(), 10)
        assert control._releasing is not None
        with pytest.raises(TimeoutError):
            await control._releasing

    asyncio.run(run())
