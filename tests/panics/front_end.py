"""What a front end does in a process of its own while an entry point of its rings panics."""

import asyncio
import copy
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

from transport.clients import ENDLESS, endless_request, outcome_of
from transport.engines import PacedExecutor
from vllm.config import VllmConfig
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import MPClient, SyncMPClient

from .engines import arm

NUM_STREAMS = 4


async def stream_and_panic(
    config: VllmConfig, addresses: dict[str, str], entry: str, reports: Connection
) -> None:
    llm = AsyncLLM(
        vllm_config=config,
        executor_class=PacedExecutor,
        log_stats=False,
        log_requests=False,
        client_addresses=addresses,
    )
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
