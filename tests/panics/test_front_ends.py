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

pytestmark = pytest.mark.timeout(180)

SHM = {"SPARKSCHED_TRANSPORT": "shm"}
NUM_STREAMS = 4


@contextmanager
def front_end(
    run: Any, extension: Path, config: VllmConfig, engine: Engine, entry: str
) -> Iterator[Any]:
    """Run a front end that lets an entry point panic; yields its report."""
    ours, theirs = forkserver.Pipe()
    log_path = engine.directory / "client.log"
    process = start_process(
        run,
        log_path,
        environment_with(**SHM),
        extension,
        config,
        engine.addresses(0),
        entry,
        theirs,
    )
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


@pytest.mark.parametrize(
    ("entry", "next_one"),
    [
        ("ClientRings.receive", "EngineDeadError"),
        ("ClientRings.send", "EngineGenerateError"),
        ("ClientRings.sent_before", "EngineGenerateError"),
    ],
)
def test_each_request_fails_once(
    entry: str, next_one: str, extension: Path, config: VllmConfig
) -> None:
    with running_engine(config, **SHM) as engine:
        with front_end(engines.run_front_end, extension, config, engine, entry) as report:
            next_outcome, ends, is_errored, num_known = report
            assert next_outcome == [0, next_one]
            assert ends == [["EngineDeadError"]] * NUM_STREAMS
            assert is_errored
            # vLLM keeps those that died with the engine, but not one that was never sent.
            assert num_known == NUM_STREAMS or next_one == "EngineDeadError"
            # Also if the front end's process goes on: what it had in flight is aborted.
            assert engine.wait_for_exit() == 0
        assert len(engine.log_lines("aborted 4 requests of API server 0")) == 1


@pytest.mark.parametrize("entry", ["ClientRings.receive", "ClientRings.wait"])
def test_whoever_waits_is_told(entry: str, extension: Path, config: VllmConfig) -> None:
    """A client without an event loop has a thread that receives: it mustn't end in silence."""
    with (
        running_engine(config, **SHM) as engine,
        front_end(engines.run_sync_client, extension, config, engine, entry) as report,
    ):
        assert report == ("EngineDeadError", "EngineDeadError")
        assert engine.wait_for_exit() == 0
