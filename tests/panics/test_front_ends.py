"""A panic in a front end's rings: its requests fail once, nothing waits, and its engine stops."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transport.engines import (
    Engine,
    environment_with,
    forkserver,
    running_engine,
    start_process,
)
from vllm.config import VllmConfig

from . import engines
from .front_end import STARTING, WATCHING

pytestmark = pytest.mark.timeout(600)

SHM = {"SPARKSCHED_TRANSPORT": "shm"}
IMPATIENT = {"SPARKSCHED_RING_MIB": "1", "SPARKSCHED_STUCK_AFTER_S": "0.5"}
NUM_STREAMS = 4


@contextmanager
def front_end(
    run: Any, extension: Path, config: VllmConfig, engine: Engine, *args: Any, **variables: str
) -> Iterator[Any]:
    """Run a front end that lets entry points panic; yields its report."""
    ours, theirs = forkserver.Pipe()
    log_path = engine.directory / "client.log"
    environment = environment_with(**SHM, **variables)
    process = start_process(run, log_path, environment, extension, config, *args, theirs)
    theirs.close()
    try:
        assert ours.poll(60), log_path.read_text()
        yield ours.recv()
        process.join(30)
        assert process.exitcode == 0, log_path.read_text()
        assert "PanicException" not in log_path.read_text()
    finally:
        print(log_path.read_text())
        process.kill()
        process.join()
        ours.close()


ENDING_THE_LINK = {
    "ClientRings.receive": "EngineDeadError",
    "ClientRings.send": "EngineGenerateError",
    "ClientRings.sent_before": "EngineGenerateError",
}
"""How the next request ends."""

WITHOUT_A_LOOP = ["ClientRings.receive", "ClientRings.wait"]
WAITING_FOR_ROOM = "ClientRings.without_room_for_s"
NOT_ENDING_IT = ["MeterReader.__new__", *WATCHING, "ClientRings.stuck_for_s", "ClientRings.close"]

ENTRIES = {*ENDING_THE_LINK, *WITHOUT_A_LOOP, WAITING_FOR_ROOM, *STARTING, *NOT_ENDING_IT}
"""All that panics in these tests."""


@pytest.mark.parametrize(("entry", "next_one"), ENDING_THE_LINK.items())
def test_each_request_fails_once(
    entry: str, next_one: str, extension: Path, config: VllmConfig
) -> None:
    with running_engine(config, **SHM) as engine:
        run = engines.run_front_end
        with front_end(run, extension, config, engine, engine.addresses(0), entry) as report:
            next_outcome, ends, is_errored, num_known = report
            assert next_outcome == [0, next_one]
            assert ends == [["EngineDeadError"]] * NUM_STREAMS
            assert is_errored
            # vLLM keeps those that died with the engine, but not one that was never sent.
            assert num_known == NUM_STREAMS or next_one == "EngineDeadError"
            # Also if the front end's process goes on: what it had in flight is aborted.
            assert engine.wait_for_exit() == 0
        assert len(engine.log_lines("aborted 4 requests of API server 0")) == 1


@pytest.mark.parametrize("entry", WITHOUT_A_LOOP)
def test_whoever_waits_is_told(entry: str, extension: Path, config: VllmConfig) -> None:
    """A client without an event loop has a thread that receives: it mustn't end in silence."""
    run = engines.run_sync_client
    with (
        running_engine(config, **SHM) as engine,
        front_end(run, extension, config, engine, engine.addresses(0), entry) as report,
    ):
        assert report == ("EngineDeadError", "EngineDeadError")
        assert engine.wait_for_exit() == 0


def test_requests_that_wait_for_room_fail_once(extension: Path, config: VllmConfig) -> None:
    run = engines.run_impatient_front_end
    with (
        running_engine(config, **SHM, **IMPATIENT) as engine,
        front_end(
            run, extension, config, engine, engine.addresses(0), WAITING_FOR_ROOM, **IMPATIENT
        ) as report,
    ):
        outcomes, is_errored, num_known = report
        for num_tokens, *ends in outcomes:
            assert num_tokens == 0
            assert len(ends) == 1
        assert is_errored
        assert num_known <= len(outcomes)
        assert engine.wait_for_exit() == 0


def test_starts_metrics_and_health(extension: Path, config: VllmConfig) -> None:
    """A front end starts or it doesn't; what panics in its metrics takes nothing else away."""
    num_clients = len(STARTING) + 2
    with running_engine(config, num_clients=num_clients, **SHM) as engine:
        addresses = [engine.addresses(index) for index in range(num_clients)]
        run = engines.run_watched_front_ends
        with front_end(run, extension, config, engine, addresses) as found:
            for entry in (*STARTING, "ClientRings.stuck_for_s"):
                assert f"impossible state in {entry}: " in found.pop(entry)
            whole = [5, "length"]
            assert found == {
                "MeterReader.__new__": (whole, False),
                **dict.fromkeys(WATCHING, (whole, False)),
                "nowhere": (whole, True),
            }
        log = (engine.directory / "client.log").read_text()
        for entry in ("MeterReader.__new__", *WATCHING, "ClientRings.close"):
            assert f"impossible state in {entry}: " in log
        assert engine.wait_for_exit() == 0
