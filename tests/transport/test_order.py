"""What an engine sends arrives in the order in which it was made, whoever encoded it.

Outputs are written by Rust, aborts and answers by vLLM's encoder, and all go through one ring.
"""

import asyncio
from collections import Counter
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreOutputs, FinishReason, UtilityOutput, core_client

from .clients import Reader, endless_request, play

pytestmark = pytest.mark.timeout(180)

NUM_RUNNING = 20
NUM_CALLS = 5  # for each request that is aborted


class Arrivals:
    """Counts outputs as they come in, and notes for each answer what was there before it."""

    def __init__(self) -> None:
        self.num_tokens: Counter[str] = Counter()
        self.aborted: set[str] = set()
        self.before_answer: list[tuple[dict[str, int], set[str]]] = []

    def watch(self, queue: asyncio.Queue[Any]) -> None:
        """Look at all that is put into a client's queue from now on."""
        put = queue.put_nowait

        def put_nowait(item: EngineCoreOutputs | Exception) -> None:
            for output in getattr(item, "outputs", ()):  # an error has none
                self.num_tokens[output.request_id] += len(output.new_token_ids)
                if output.finish_reason is FinishReason.ABORT:
                    self.aborted.add(output.request_id)
            put(item)

        queue.put_nowait = put_nowait  # type: ignore[method-assign]

    def note_answer(self) -> None:
        self.before_answer.append((dict(self.num_tokens), set(self.aborted)))


@pytest.fixture
def arrivals(monkeypatch: pytest.MonkeyPatch) -> Arrivals:
    """Return what notes each answer, through whichever transport it comes."""
    found = Arrivals()
    original = core_client._process_utility_output

    def process(output: UtilityOutput, *args: Any) -> None:
        found.note_answer()
        original(output, *args)

    monkeypatch.setattr(core_client, "_process_utility_output", process)
    return found


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_outputs_aborts_and_answers(transport: str, config: VllmConfig, arrivals: Arrivals) -> None:
    """The engine is a synchronous one: when it answers, it has sent all that was sampled."""

    async def scenario(reader: Reader) -> None:
        arrivals.watch(reader.client.outputs_queue)
        await reader.call_executor("set_step_s", 0.0)
        names = [f"endless-{index}" for index in range(2 * NUM_RUNNING)]
        await reader.add(*(endless_request(it) for it in names[:NUM_RUNNING]))
        await reader.begin(*names[:NUM_RUNNING])
        for name in names[NUM_RUNNING:]:
            await reader.add(endless_request(name))
            await reader.client.abort_requests_async([names.pop(0)])
            for _ in range(NUM_CALLS):
                num_sampled = await reader.call_executor("get_num_sampled")
                num_tokens, aborted = arrivals.before_answer[-1]
                # Of requests that are aborted in the middle of a step, the last token is dropped.
                for running in names[:NUM_RUNNING]:
                    assert num_tokens.get(running) == num_sampled.get(running)
                assert not aborted
        await reader.client.pause_scheduler_async("abort")
        assert arrivals.before_answer[-1][1] == set(names)
        assert len(arrivals.before_answer) == NUM_RUNNING * NUM_CALLS + 2
        await reader.finish(names)

    play(scenario, config, SPARKSCHED_TRANSPORT=transport)
