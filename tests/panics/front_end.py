"""What a front end does in a process of its own while an entry point of its rings panics."""

import asyncio
import copy
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

from prometheus_client import REGISTRY
from transport.clients import ENDLESS, bulk_of, endless_request, outcome_of
from transport.engines import PacedExecutor, send_signal
from vllm.config import VllmConfig
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import MPClient, SyncMPClient

from .engines import arm

NUM_STREAMS = 4


STARTING = ["ClientRings.__new__", "ClientRings.ring_bytes", "ClientRings.fileno"]
"""Without these no front end starts."""

WATCHING = [
    "MeterReader.steps",
    "MeterReader.rings",
    "meter_bounds_s",
]
"""What `/metrics` needs."""


def new_llm(
    config: VllmConfig, addresses: dict[str, str], index: int = 0, count: int = 1
) -> AsyncLLM:
    return AsyncLLM(
        vllm_config=copy.deepcopy(config),
        executor_class=PacedExecutor,
        log_stats=True,
        log_requests=False,
        client_addresses=addresses,
        client_index=index,
        client_count=count,
    )


async def stream_and_panic(
    config: VllmConfig, addresses: dict[str, str], entry: str, reports: Connection
) -> None:
    llm = new_llm(config, addresses)
    events = [asyncio.Event() for _ in range(NUM_STREAMS)]
    streams = [
        asyncio.create_task(outcome_of(llm, f"mine-{index}", ENDLESS, event.set))
        for index, event in enumerate(events)
    ]
    await asyncio.gather(*(event.wait() for event in events))
    arm(entry)
    next_one = await outcome_of(llm, "next", 5)
    outcomes = await asyncio.gather(*streams)
    arm("nowhere")
    num_known = len(llm.output_processor.request_states)
    reports.send((next_one, [ends for _, *ends in outcomes], llm.errored, num_known))
    llm.shutdown()


async def wait_for_room_and_panic(
    config: VllmConfig, addresses: dict[str, str], entry: str, reports: Connection
) -> None:
    """Report what becomes of requests for which a stopped engine makes no room."""
    llm = new_llm(config, addresses)
    await llm.get_supported_tasks()
    (channel,) = llm.engine_core.resources.sparksched_rings.channels.values()
    engine_pid = channel.rings.engine_pid
    send_signal(engine_pid, signal.SIGSTOP)
    arm(entry)
    bulk = bulk_of(600_000)
    outcomes = await asyncio.gather(*(outcome_of(llm, f"{it}", 5, **bulk) for it in range(4)))
    os.kill(engine_pid, signal.SIGCONT)
    arm("nowhere")
    reports.send((outcomes, llm.errored, len(llm.output_processor.request_states)))
    llm.shutdown()


async def start_watch_and_panic(
    config: VllmConfig, addresses: list[dict[str, str]], reports: Connection
) -> None:
    """Report by entry point what became of starts, of metrics, and of a question for health."""
    found: dict[str, Any] = {}
    count = len(addresses)
    for index, entry in enumerate(STARTING):
        arm(entry, at_end=True)
        try:
            new_llm(config, addresses[index], index, count)
        except RuntimeError as error:
            found[entry] = str(error)
    arm("MeterReader.__new__")
    llm = new_llm(config, addresses[-2], count - 2, count)
    arm("nowhere")
    found["MeterReader.__new__"] = await outcome_of(llm, "unmeasured", 5), shown_engines()
    llm.shutdown()

    llm = new_llm(config, addresses[-1], count - 1, count)
    for entry in [*WATCHING, "nowhere"]:
        arm(entry)
        found[entry] = await outcome_of(llm, f"measured-{entry}", 5), shown_engines()
    arm("ClientRings.stuck_for_s")
    try:
        await llm.check_health()
    except RuntimeError as error:
        found["ClientRings.stuck_for_s"] = str(error)
    arm("ClientRings.close")
    llm.shutdown()
    reports.send(found)


def shown_engines() -> bool:
    """Whether `/metrics` shows an engine of ours; vLLM's series are there in any case."""
    names = {family.name for family in REGISTRY.collect()}
    assert "vllm:num_requests_running" in names
    return "sparksched:schedule_seconds" in names


def read_and_panic(
    config: VllmConfig, addresses: dict[str, str], entry: str, reports: Connection
) -> None:
    """Report the first error that somebody gets who only waits for outputs, and who sends."""
    initialize = MPClient.__init__

    def connect(self: MPClient, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, client_addresses=addresses, **kwargs)

    # Such a client always starts an engine of its own; this one finds it running.
    with mock.patch.object(MPClient, "__init__", connect):
        client = SyncMPClient(copy.deepcopy(config), PacedExecutor, True)
    client.add_request(endless_request("endless"))
    client.get_output()
    arm(entry)
    error = error_of(lambda: read_for_ever(client))
    reports.send((error, error_of(lambda: client.add_request(endless_request("late")))))
    client.shutdown()


def read_for_ever(client: SyncMPClient) -> None:
    while True:
        client.get_output()


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return "none"
