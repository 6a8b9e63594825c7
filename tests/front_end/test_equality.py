"""The same requests and the same outputs of the engine, with vLLM's functions and with ours."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
from scale import FULL
from sparksched.api_server import output_processor
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.output_processor import (
    OutputProcessor,
    RequestOutputCollector,
    RequestState,
)

from .implementations import OURS, STOCK, Implementation
from .scenario import TEXT, Arrival, Scenario
from .world import live_through

pytestmark = pytest.mark.release

NUM_SEEDS = 60 if FULL else 12
SEEDS_OF_COVERAGE = range(16)


def scenario(seed: int, tokenizer: Any) -> Scenario:
    return Scenario(seed, [*tokenizer.encode(TEXT), tokenizer.eos_token_id])


def album_of(implementation: Implementation, scenario: Scenario, tokenizer: Any) -> list[Any]:
    with implementation.in_use():
        return live_through(scenario, tokenizer)


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_all_is_as_with_vllm(seed: int, tokenizer: Any) -> None:
    it = scenario(seed, tokenizer)
    stock = album_of(STOCK, it, tokenizer)
    ours = album_of(OURS, it, tokenizer)
    assert len(stock) == len(ours)
    for number, (expected, seen) in enumerate(zip(stock, ours, strict=True)):
        assert seen == expected, f"picture {number}"


class Stream:
    """A request whose outputs go into a queue, a token each."""

    def __init__(self, queue: Any, kind: RequestOutputKind = RequestOutputKind.DELTA) -> None:
        params = SamplingParams(detokenize=False, output_kind=kind)
        self._processor = OutputProcessor(None, log_stats=False)
        self._processor.add_request(Arrival("request", params).request(), None, None, 0, queue)

    def generate(self, *token_ids: int) -> None:
        for token_id in token_ids:
            self._processor.process_outputs([EngineCoreOutput("request", [token_id])])


def test_whoever_replaces_put_sees_all_outputs() -> None:
    seen: list[Any] = []
    with OURS.in_use():
        put = RequestOutputCollector.put

        def put_and_note(self: RequestOutputCollector, output: Any) -> None:
            seen.append(output)
            put(self, output)

        with mock.patch.object(RequestOutputCollector, "put", put_and_note):
            queue = RequestOutputCollector(RequestOutputKind.DELTA, "request")
            stream = Stream(queue)
            stream.generate(0)
            queue.get_nowait()  # what vLLM's own code has made
            stream.generate(1, 2, 3, 4)
    assert len(seen) == 5
    assert queue.output.outputs[0].token_ids == [1, 2, 3, 4]


def test_what_a_subclass_changes_stays_changed() -> None:
    class Changed(OutputProcessor):  # type: ignore[misc]
        def _update_stats_from_output(self, *args: Any) -> None:
            seen.append(args)

    seen: list[Any] = []
    arrival = Arrival("request", SamplingParams(detokenize=False))
    with OURS.in_use():
        processor = Changed(None, log_stats=False)
        processor.add_request(arrival.request(), None)
        for _ in range(3):
            processor.process_outputs([EngineCoreOutput("request", [1])])
    assert len(seen) == 3


@contextmanager
def counted(owner: Any, name: str) -> Iterator[mock.Mock]:
    function = getattr(owner, name)
    with mock.patch.object(owner, name, autospec=True, side_effect=function) as counter:
        yield counter


@pytest.mark.full
def test_scenarios_come_to_the_interesting_places(tokenizer: Any) -> None:
    """Else their equality would prove nothing."""
    calls: dict[str, int] = {}
    merges: dict[str, int] = {}
    for implementation in (STOCK, OURS):
        with (
            counted(RequestState, "make_request_output") as by_vllm,
            counted(output_processor, "_finish_at_stop_string") as stopped,
            counted(RequestOutput, "add") as merged,
        ):
            for seed in SEEDS_OF_COVERAGE:
                album_of(implementation, scenario(seed, tokenizer), tokenizer)
        calls[implementation.name] = by_vllm.call_count
        merges[implementation.name] = merged.call_count
    assert stopped.call_count > 4
    # Many of both kinds: outputs that need vLLM's code, and outputs that don't.
    assert 0.2 < calls["sparksched"] / calls["vllm"] < 0.7
    # So are those that become a part of what waits, by `RequestOutput.add` and without.
    assert merges["sparksched"] > 200
    assert merges["vllm"] - merges["sparksched"] > 50
