"""What the benchmark does in an API server, with engines that are made up."""

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from bench.serving import api_server
from bench.serving.api_server import Control
from bench.serving.workload import MIXED, Workload

WORKLOAD = Workload(MIXED, 8, 100, (4, 4), (3, 3))


class Client:
    """A client of engines that answer at once."""

    def __init__(self, num_engines: int) -> None:
        self.core_engines = list(range(num_engines))
        self.requests: list[list[str]] = [[] for _ in self.core_engines]
        self.resets: list[list[bool]] = [[True] for _ in self.core_engines]
        self.asked: list[str] = []

    async def _call_utility_async(self, method: str, *arguments: Any, engine: int) -> Any:
        self.asked.append(method)
        if method == "bench_describe":
            return json.dumps({"num_requests": len(self.requests[engine])})
        assert (method, arguments) == ("reset_prefix_cache", (False, False))
        answers = self.resets[engine]
        return answers.pop(0) if len(answers) > 1 else answers[0]


class LLM:
    """An `AsyncLLM` whose requests wait until it is resumed, and then bring their own number."""

    def __init__(self, num_engines: int = 2) -> None:
        self.engine_core = Client(num_engines)
        self.output_processor = SimpleNamespace(has_unfinished_requests=lambda: False)
        self.sent: list[tuple[int | None, Any]] = []
        self.fails = False
        self.is_running = asyncio.Event()
        self.is_running.set()

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("keep", False)
        self.is_running.clear()

    async def resume_generation(self) -> None:
        self.is_running.set()

    async def generate(
        self, prompt: Any, params: Any, request_id: str, data_parallel_rank: int | None
    ) -> AsyncIterator[Any]:
        if self.fails:
            raise RuntimeError("no more requests")
        self.sent.append((data_parallel_rank, params))
        self.engine_core.requests[data_parallel_rank or 0].append(request_id)
        await self.is_running.wait()
        for _ in range(params.max_tokens):
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[len(self.sent)])])
        self.engine_core.requests[data_parallel_rank or 0].remove(request_id)


def obey(llm: LLM, command: str, **arguments: Any) -> Any:
    async def run() -> Any:
        control = Control(llm, asyncio.get_running_loop())
        return await getattr(control, command)(notify=lambda event: None, **arguments)

    return asyncio.run(run())


# ---- the same tokens ----


@pytest.mark.parametrize(
    ("num_engines", "ranks"), [(1, [None] * 8), (2, [0, 1] * 4), (3, [0, 1, 2, 0, 1, 2, 0, 1])]
)
def test_requests_that_are_compared_go_to_the_engines_in_turn(
    num_engines: int, ranks: list[int | None]
) -> None:
    llm = LLM(num_engines)
    streams = obey(llm, "on_collect", workload=WORKLOAD, is_sampled=True)
    assert [rank for rank, _ in llm.sent] == ranks
    assert [len(stream) for stream in streams] == [3] * 8


def test_sampled_requests_have_seeds_of_their_own_and_greedy_ones_none() -> None:
    llm = LLM()
    obey(llm, "on_collect", workload=WORKLOAD, is_sampled=True)
    assert [(it.temperature, it.seed) for _, it in llm.sent] == [(1.0, it) for it in range(8)]
    llm = LLM()
    obey(llm, "on_collect", workload=WORKLOAD, is_sampled=False)
    assert {(it.temperature, it.seed) for _, it in llm.sent} == {(0.0, None)}


def test_the_prefix_caches_of_all_engines_are_empty_before_tokens_are_compared() -> None:
    llm = LLM()
    llm.engine_core.resets[1] = [False, False, True]
    obey(llm, "on_collect", workload=WORKLOAD, is_sampled=True)
    assert llm.engine_core.resets[1] == [True]


def test_engines_go_on_after_a_comparison_that_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_server, "LATEST_S", 0.2)
    llm = LLM()
    llm.fails = True
    with pytest.raises(TimeoutError):
        obey(llm, "on_collect", workload=WORKLOAD, is_sampled=True)
    assert llm.is_running.is_set()


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
