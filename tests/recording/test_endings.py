"""Engine processes that are signalled, killed, or fail, and what their recordings hold then."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sparksched.record import write
from sparksched.record.events import End, Finish, Step
from sparksched.record.load import Trace
from transport.clients import Reader, connected, endless_request, front_end, run_async
from transport.conftest import config, model_directory
from transport.engines import Engine, running_engine, wait_until
from vllm.config import VllmConfig

from .samples import ENDED
from .scenarios import events, replayed

__all__ = ["config", "model_directory"]

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(name="path")
def _path(tmp_path: Path) -> Path:
    return tmp_path / "trace"


@pytest.fixture(name="serve")
def _serve(config: VllmConfig, path: Path) -> Callable[..., None]:
    """Have a recorded engine serve, until a scenario ends it."""

    def serve(scenario: Callable[[Engine, Reader], Any]) -> None:
        async def run(engine: Engine) -> None:
            async with connected(config, engine) as reader:
                await reader.add(*map(endless_request, "abc"))
                await reader.begin(*"abc")
                await scenario(engine, reader)
                await asyncio.to_thread(engine.wait_for_exit)

        with (
            front_end(),
            running_engine(
                config, prepare=wait_for_the_disk, SPARKSCHED_RECORD=str(path)
            ) as engine,
        ):
            run_async(run(engine))

    return serve


def wait_for_the_disk() -> None:
    """Have the engine's end wait longer for it than a busy machine can take."""
    write._CLOSE_S = 60.0  # type: ignore[misc]


def test_signalled(path: Path, serve: Callable[..., None]) -> None:
    """The recording has its end, and replays up to there."""

    async def scenario(engine: Engine, _reader: Reader) -> None:
        engine.signal(signal.SIGTERM)

    serve(scenario)
    found = events(path)
    assert found[-1] == End(found[-1].time, ENDED)  # type: ignore[union-attr]
    assert replayed(path, "sparksched").num_steps == sum(isinstance(event, Step) for event in found)
    assert any(event.ids is None for event in found if isinstance(event, Finish))


def test_killed(path: Path, serve: Callable[..., None]) -> None:
    """Whole lines are left and replay with either scheduler."""

    async def scenario(engine: Engine, _reader: Reader) -> None:
        num_bytes = path.stat().st_size
        await asyncio.to_thread(wait_until, lambda: path.stat().st_size > num_bytes)
        engine.signal(signal.SIGKILL)

    serve(scenario)
    trace = Trace(path)
    num_steps = sum(isinstance(event, Step) for event in trace.events())
    assert trace.missing is not None
    assert num_steps > 0
    for scheduler in ("sparksched", "vllm"):
        outcome = replayed(path, scheduler, lacks_end=True)
        assert (outcome.mismatch, outcome.num_steps) == (None, num_steps)
