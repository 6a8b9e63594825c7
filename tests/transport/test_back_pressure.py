"""A side that takes no messages: what waits, what is refused, and that nothing is lost."""

import asyncio
import os
import signal
import time
from http import HTTPStatus
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from engine.harness import new_request
from sparksched.api_server.errors import EngineBusyError
from sparksched.shared import offer
from vllm.config import VllmConfig
from vllm.v1.engine import FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.serial_utils import MsgpackDecoder

from .clients import (
    ENDLESS,
    Ear,
    Reader,
    bulk_of,
    bulky_request,
    connected,
    endless_request,
    engines_of_clients,
    expected_tokens,
    front_end,
    outcome_of,
    prompt_of,
    run_async,
    running_llm,
)
from .conftest import make_config
from .engines import Engine, running_engine, send_signal

pytestmark = pytest.mark.timeout(180)

BULK = 300_000
SMALL_RINGS = {
    "SPARKSCHED_TRANSPORT": "shm",
    "SPARKSCHED_RING_MIB": "1",
    "SPARKSCHED_STUCK_AFTER_S": "0.5",
}


async def fill_ring(reader: Reader, **settings: Any) -> tuple[list[str], list[str]]:
    """Send large requests until one is refused; return those that were accepted, and the other."""
    accepted: list[str] = []
    for index in range(20):
        request_id = f"bulky-{index}"
        try:
            await reader.add(bulky_request(request_id, BULK, **settings))
        except EngineBusyError:
            return accepted, [request_id]
        accepted.append(request_id)
    raise AssertionError("6 MiB went into a ring of 1 MiB")


def test_a_full_ring_refuses_requests_and_loses_none(config: VllmConfig) -> None:
    async def run(engine: Engine) -> None:
        async with connected(config, engine) as reader:
            await reader.add(endless_request("endless"))
            await reader.begin("endless")
            engine.signal(signal.SIGSTOP)
            accepted, refused = await fill_ring(reader)
            assert 2 <= len(accepted) <= 3
            # Another one, which has nothing of it in the ring, leaves no trace at all.
            with pytest.raises(EngineBusyError, match=r"it has made no room for 0\.5 s") as error:
                await reader.add(bulky_request("untraceable", BULK))
            assert error.value.http_status == HTTPStatus.SERVICE_UNAVAILABLE
            # Aborts are accepted all the same, and nobody waits for room.
            async with asyncio.timeout(60):
                await reader.client.abort_requests_async(["endless", *refused])
            engine.signal(signal.SIGCONT)
            await reader.finish(accepted)
            assert await reader.unfinished() == []
            for request_id in accepted:
                assert reader.tokens[request_id] == expected_tokens(prompt_of(2), 2)
                assert len(reader.finishes[request_id]) == 1
            assert "untraceable" not in reader.tokens
            await reader.add(new_request("later", prompt_of(5), 30))
            await reader.finish(["later"])
            assert reader.tokens["later"] == expected_tokens(prompt_of(5), 30)
            tokens = reader.tokens["endless"]
            assert tokens == expected_tokens(prompt_of(1), len(tokens), ignore_eos=True)

    with front_end(**SMALL_RINGS), running_engine(config, **SMALL_RINGS) as engine:
        run_async(run(engine))


def take_large_messages_slowly() -> None:
    decode = MsgpackDecoder.decode

    def slow_decode(self: MsgpackDecoder, frames: Any) -> Any:
        if sum(map(len, frames)) > BULK:
            time.sleep(0.15)
        return decode(self, frames)

    MsgpackDecoder.decode = slow_decode


def test_a_burst_is_not_an_overload(model_directory: Path) -> None:
    """Far more than a backlog may hold, for longer than a ring may stay full: the engine reads."""
    variables = {**SMALL_RINGS, "SPARKSCHED_STUCK_AFTER_S": "5"}
    config = make_config(model_directory, enable_prompt_embeds=True)
    prompt = prompt_of(2)
    # 8 MiB, which all have in common until they are encoded. The model looks at the tokens.
    embeds = torch.zeros(len(prompt), (8 << 20) // 4 // len(prompt))
    requests = {
        it: new_request(it, prompt, 2, prompt_embeds=embeds)
        for it in (f"large-{number}" for number in range(40))
    }

    async def run(engine: Engine) -> None:
        async with connected(config, engine) as reader:
            encode = reader.client.encoder.encode
            reader.client.encoder.encode = mock.Mock(side_effect=encode)
            engine.signal(signal.SIGSTOP)
            adding = [asyncio.create_task(reader.add(it)) for it in requests.values()]
            await asyncio.sleep(0.1)
            # The others are as large as their senders' objects, no more.
            assert reader.client.encoder.encode.call_count == 1
            engine.signal(signal.SIGCONT)
            await asyncio.gather(*adding)
            await reader.finish(requests)
            assert all(reader.tokens[it] == expected_tokens(prompt, 2) for it in requests)

    prepare = take_large_messages_slowly
    with front_end(**variables), running_engine(config, prepare=prepare, **variables) as engine:
        run_async(run(engine))


@pytest.mark.parametrize("num_sequences", [1, 3])
def test_async_llm_forgets_what_was_refused(num_sequences: int, config: VllmConfig) -> None:
    settings = {"n": num_sequences, **bulk_of(BULK)}

    async def bulky(llm: AsyncLLM, request_id: str) -> list[Any]:
        return await outcome_of(llm, request_id, 4, **settings)

    async def run(engine: Engine) -> None:
        async with running_llm(config, engine) as llm:
            whole = [4 * num_sequences, *["length"] * num_sequences]
            assert await bulky(llm, "before") == whole
            engine.signal(signal.SIGSTOP)
            streams = [asyncio.create_task(bulky(llm, f"request-{it}")) for it in range(10)]
            # The ring has room for three messages, and a fourth is half in it.
            async with asyncio.timeout(60):
                while sum(stream.done() for stream in streams) < 7:
                    await asyncio.sleep(0.01)
            done = [stream.result() for stream in streams if stream.done()]
            assert done == [[0, "EngineBusyError"]] * len(done)
            assert llm.output_processor.get_num_unfinished_requests() <= 3 * num_sequences
            assert not llm.errored
            engine.signal(signal.SIGCONT)
            outcomes = await asyncio.gather(*streams)
            assert all(it in (whole, [0, "EngineBusyError"]) for it in outcomes)
            assert llm.output_processor.get_num_unfinished_requests() == 0
            assert not llm.output_processor.request_states
            assert not llm.output_processor.parent_requests
            assert await bulky(llm, "after") == whole
            assert await llm.engine_core.call_utility_async("unfinished_requests") == []

    with front_end(**SMALL_RINGS), running_engine(config, **SMALL_RINGS) as engine:
        run_async(run(engine))


def test_async_llm_forgets_what_was_cancelled(config: VllmConfig) -> None:
    """A user goes away while the request waits for room."""
    variables = {**SMALL_RINGS, "SPARKSCHED_STUCK_AFTER_S": "60"}

    async def run(engine: Engine) -> None:
        async with running_llm(config, engine) as llm:
            assert await outcome_of(llm, "before", 4) == [4, "length"]
            engine.signal(signal.SIGSTOP)
            streams = [
                asyncio.create_task(outcome_of(llm, f"request-{it}", ENDLESS, **bulk_of(BULK)))
                for it in range(10)
            ]
            async with asyncio.timeout(60):
                while llm.output_processor.get_num_unfinished_requests() < len(streams):
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            for stream in streams:
                stream.cancel()
            await asyncio.wait(streams)
            assert all(stream.cancelled() for stream in streams)
            assert llm.output_processor.get_num_unfinished_requests() == 0
            engine.signal(signal.SIGCONT)
            async with asyncio.timeout(60):
                while await llm.engine_core.call_utility_async("unfinished_requests"):
                    await asyncio.sleep(0.01)
            assert await outcome_of(llm, "after", 4) == [4, "length"]

    with front_end(**variables), running_engine(config, **variables) as engine:
        run_async(run(engine))


def test_a_balancer_forgets_what_was_refused(model_directory: Path, tmp_path: Path) -> None:
    """No engine will ever report a request that none has got."""
    with front_end(**SMALL_RINGS):
        config = make_config(model_directory, data_parallel_size=2)

    async def run() -> None:
        async with connected(config, None) as reader:
            client = reader.client
            pids = [process.pid for process in client.resources.engine_manager.processes]
            for pid in pids:
                send_signal(pid, signal.SIGSTOP)
            ids = [f"bulky-{index}" for index in range(14)]
            adding = [reader.add(bulky_request(it, BULK)) for it in ids]
            results = await asyncio.gather(*adding, return_exceptions=True)
            accepted = {it for it, result in zip(ids, results, strict=True) if result is None}
            refused = {type(result) for result in results if result is not None}
            assert refused == {EngineBusyError}
            assert 4 <= len(accepted) <= 6
            # One of each engine's may be half in the ring: that one arrives after all.
            assert client.reqs_in_flight.keys() >= accepted
            assert len(client.reqs_in_flight) <= len(accepted) + len(pids)
            assert sum(client.engine_inflight.values()) == len(client.reqs_in_flight)
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            await reader.finish(accepted)
            await reader.until(lambda: not client.reqs_in_flight)
            assert not any(client.engine_inflight.values())
            assert all(len(reasons) == 1 for reasons in reader.finishes.values())

    with front_end(**SMALL_RINGS), engines_of_clients(tmp_path / "log", **SMALL_RINGS):
        run_async(run())


# ----------------------------------------------------------------------------------------
# A client that takes no messages
# ----------------------------------------------------------------------------------------


SMALL_BACKLOG = 1 << 16


def allow_a_small_backlog() -> None:
    offer.MAX_BACKLOG_BYTES = SMALL_BACKLOG


def test_a_client_that_reads_nothing(config: VllmConfig) -> None:
    """Its requests fail, those of others go on at their pace."""
    endless = [f"endless-{index}" for index in range(20)]
    # Some of these end, while their last messages wait and are dropped: it is a few dozen steps
    # that fit into the backlog.
    ending = {f"ending-{index}": 150 + 30 * index for index in range(30)}
    mine = [*endless, *ending]

    async def run(engine: Engine) -> None:
        async with (
            connected(config, engine, 0, count=2) as deaf,
            connected(config, engine, 1, count=2) as other,
        ):
            await deaf.add(*(endless_request(it) for it in endless))
            for request_id, length in ending.items():
                await deaf.add(new_request(request_id, prompt_of(1), length, ignore_eos=True))
            await deaf.begin(*mine)
            ear = Ear(deaf)
            ear.close()
            await other.call_executor("set_step_s", 0.0)
            call = asyncio.create_task(deaf.call_executor("echo", "an answer"))
            await other.add(endless_request("other"))
            while any(client == 0 for _, client in await other.unfinished()):
                await asyncio.sleep(0.05)
            await asyncio.to_thread(engine.wait_for_line, "API server 0 takes no messages")
            await other.call_executor("set_step_s", 0.002)
            assert not call.done()
            late_call = asyncio.create_task(deaf.call_executor("echo", "a late answer"))
            # The other client's request is still the same one, and it runs.
            assert await other.unfinished() == [("other", 1)]
            num_tokens = len(other.tokens["other"])
            await other.until(lambda: len(other.tokens["other"]) > num_tokens + 100)
            assert not other.finishes
            ear.open()
            assert await call == "an answer"
            assert await late_call == "a late answer"
            await deaf.finish(mine)
            for request_id in mine:
                tokens = deaf.tokens[request_id]
                assert tokens == expected_tokens(prompt_of(1), len(tokens), ignore_eos=True)
                is_whole = len(tokens) == ending.get(request_id)
                reason = FinishReason.LENGTH if is_whole else FinishReason.ERROR
                assert deaf.finishes[request_id] == [reason]
            # It is a client like any other again.
            await deaf.add(new_request("again", prompt_of(4), 30))
            await deaf.finish(["again"])
            assert deaf.tokens["again"] == expected_tokens(prompt_of(4), 30)
            assert set(deaf.finishes) == {*mine, "again"}
            await other.client.abort_requests_async(["other"])
            assert await other.unfinished() == []
            tokens = other.tokens["other"]
            assert (
                tokens[:2000] == expected_tokens(prompt_of(1), 2000, ignore_eos=True)[: len(tokens)]
            )
            assert len(engine.log_lines("takes no messages")) == 1
            assert "ERROR" not in engine.log

    with (
        front_end(**SMALL_RINGS),
        running_engine(
            config, num_clients=2, prepare=allow_a_small_backlog, **SMALL_RINGS
        ) as engine,
    ):
        run_async(run(engine))
