"""Messages that make no sense, and processes that fork."""

import asyncio
import atexit
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
from engine.harness import new_request
from sparksched import _core, plugin
from sparksched.engine import output_queue as engine_side
from vllm.config import VllmConfig
from vllm.v1.serial_utils import MsgpackEncoder

from .clients import (
    Reader,
    child,
    connected,
    endless_request,
    expected_tokens,
    front_end,
    outcome_of,
    prompt_of,
    run_async,
    running_llm,
)
from .engines import (
    Engine,
    GarblingEncoder,
    running_engine,
    wait_until,
)

pytestmark = pytest.mark.timeout(180)

SHM = {"SPARKSCHED_TRANSPORT": "shm"}
ADD, ABORT, UTILITY = 0, 1, 3


# ----------------------------------------------------------------------------------------
# Malformed messages
# ----------------------------------------------------------------------------------------


NONSENSE: list[tuple[int, list[bytes]]] = [
    (ADD, [b"\xc1 is no message pack"]),
    (ADD, [b"\x01"]),
    (ADD, [b""]),
    (ABORT, [b"\xc1"]),
    (ABORT, [b"\x01"]),
    (UTILITY, [b"\xc1"]),
    (UTILITY, [b"\x01"]),
    (UTILITY, [b"\x93\x01\x02\x03"]),
    (77, [b"\x90"]),
]


def test_clients_that_send_nonsense(config: VllmConfig) -> None:
    """The link of each ends, and with it its requests; the others go on."""
    count = 1 + len(NONSENSE)

    async def send(reader: Reader, index: int, kind: int, frames: list[bytes]) -> None:
        name = await reader.call("ring_name")
        rings = _core.ClientRings(name, client_index=index, stuck_after_s=10.0)
        theirs = endless_request(f"theirs-{index}", client_index=index)
        rings.send(ADD, MsgpackEncoder().encode(theirs))
        async with asyncio.timeout(30):
            while (theirs.request_id, index) not in await reader.unfinished():
                await asyncio.sleep(0.01)
        rings.send(kind, frames)
        end = await asyncio.to_thread(last_event, rings)
        assert isinstance(end, _core.RingEnd)
        assert end.is_goodbye
        async with asyncio.timeout(30):
            while await reader.unfinished() != [("mine", 0)]:
                await asyncio.sleep(0.01)
        rings.close()

    async def run(engine: Engine) -> None:
        async with connected(config, engine, 0, count) as reader:
            await reader.add(endless_request("mine"))
            await reader.begin("mine")
            for index, (kind, frames) in enumerate(NONSENSE, start=1):
                await send(reader, index, kind, frames)
                num_tokens = len(reader.tokens["mine"])
                await reader.until(lambda num=num_tokens: len(reader.tokens["mine"]) > num + 10)
                text = f"API server {index} sent a malformed message"
                assert len(engine.log_lines(text)) == 1, frames
            assert not reader.finishes

    with front_end(**SHM), running_engine(config, num_clients=count, **SHM) as engine:
        run_async(run(engine))
        assert engine.wait_for_exit() == 0


def last_event(rings: _core.ClientRings) -> Any:
    for _ in range(600):
        for event in rings.receive():
            if not isinstance(event, _core.RingMessage):
                return event
        rings.wait(0.05)
    return None


def garble_when_told() -> None:
    engine_side.MsgpackEncoder = GarblingEncoder


def test_an_engine_that_sends_nonsense(config: VllmConfig) -> None:
    async def run(engine: Engine) -> None:
        async with running_llm(config, engine) as llm:
            begun = asyncio.Event()
            stream = asyncio.create_task(outcome_of(llm, "endless", 60_000, begun.set))
            await begun.wait()
            garbling = asyncio.create_task(llm.collective_rpc("garble"))
            num_tokens, *ends = await stream
            garbling.cancel()
            assert num_tokens > 0
            assert len(ends) == 1
            assert ends[0] in ("DecodeError", "EngineGenerateError", "EngineDeadError")
            assert llm.errored
            assert await outcome_of(llm, "too-late", 5) == [0, "EngineDeadError"]

    with (
        front_end(**SHM),
        running_engine(config, prepare=garble_when_told, **SHM) as engine,
    ):
        run_async(run(engine))


# ----------------------------------------------------------------------------------------
# Forks
# ----------------------------------------------------------------------------------------


def exit_at_once() -> None:
    os._exit(7)


def exit_normally() -> None:
    """Do what the interpreter does at its end, but leave the parent's event loop alone."""
    atexit._run_exitfuncs()
    os._exit(7)


async def fork_and_go_on(reader: Reader, leave: Callable[[], None]) -> None:
    await reader.add(endless_request("endless"))
    await reader.begin("endless")
    pid = os.fork()
    if pid == 0:
        leave()
    status = 0

    def has_ended() -> bool:
        nonlocal status
        waited, status = os.waitpid(pid, os.WNOHANG)
        return waited == pid

    await asyncio.to_thread(wait_until, has_ended, 30.0, "for a forked child to end")
    assert os.waitstatus_to_exitcode(status) == 7
    await reader.add(new_request("after", prompt_of(3), 30))
    await reader.finish(["after"])
    assert reader.tokens["after"] == expected_tokens(prompt_of(3), 30)
    assert not reader.errors
    num_tokens = len(reader.tokens["endless"])
    await reader.until(lambda: len(reader.tokens["endless"]) > num_tokens + 10)


def run_forking_client(
    config: VllmConfig, addresses: dict[str, str], leaves: str, reports: Connection
) -> None:
    plugin.register()

    async def run() -> None:
        async with connected(config, addresses) as reader:
            await fork_and_go_on(reader, globals()[leaves])
        reports.send("fine")

    run_async(run())


@pytest.mark.parametrize("leave", [exit_at_once, exit_normally])
def test_a_forked_child_leaves_the_link_alone(
    leave: Callable[[], None], config: VllmConfig
) -> None:
    """Also if it runs what is to be run at the end of a process."""
    with running_engine(config, **SHM) as engine:
        log_path, arguments = engine.directory / "client.log", (config, engine.addresses(0))
        with child(run_forking_client, log_path, *arguments, leave.__name__, **SHM) as client:
            client.process.join(90)
            assert client.process.exitcode == 0, client.log
            assert client.receive() == "fine"
            # What it says of the client is in its log by then.
            assert engine.wait_for_exit() == 0
            assert len(engine.log_lines("API server 0 is gone")) == 1


def test_a_forked_child_doesnt_keep_a_dead_client_alive(config: VllmConfig) -> None:
    """It has a copy of each descriptor of its parent's."""
    with running_engine(config, **SHM) as engine:
        log_path, arguments = engine.directory / "client.log", (config, engine.addresses(0))
        with child(run_client_with_a_child, log_path, *arguments, **SHM) as client:
            forked = client.receive()
            client.process.kill()
            client.process.join()
            assert engine.wait_for_exit() == 0
            os.kill(forked, 9)


def run_client_with_a_child(
    config: VllmConfig, addresses: dict[str, str], reports: Connection
) -> None:
    plugin.register()

    async def run() -> None:
        async with connected(config, addresses) as reader:
            await reader.add(endless_request("endless"))
            await reader.begin("endless")
            pid = os.fork()
            if pid == 0:
                time.sleep(120)
                os._exit(0)
            reports.send(pid)
            await reader.until(lambda: False, timeout_s=600)

    run_async(run(), timeout_s=600)
