"""A panic while a prompt is at hand: what is logged, printed and told has nothing of it."""

import asyncio
import functools
from pathlib import Path

import pytest
from transport.clients import front_end, run_async, running_llm
from transport.engines import Engine, running_engine
from transport.test_secrets import (
    SECRETS,
    Formatted,
    ask,
    assert_unmarked,
    our_log,
)
from vllm.config import VllmConfig

from .engines import prepare_talkative_engine
from .test_engines import arm

__all__ = ["our_log"]

pytestmark = pytest.mark.timeout(600)

VARIABLES = {**SECRETS, "RUST_BACKTRACE": "full"}
OF_ONE_REQUEST = ["NativeBlockHasher.__call__", "read_prompt"]
LAST = "SchedulerCore.update_from_output"


def test_no_secret_reaches_a_log(extension: Path, config: VllmConfig, our_log: Formatted) -> None:
    async def run(engine: Engine) -> list[str]:
        async with running_llm(config, engine) as llm:
            errors = []
            for entry in OF_ONE_REQUEST:
                await arm(llm, entry, at_end=True)
                errors.append(await ask(llm, f"fails-{entry}", 5))
            await arm(llm, LAST, at_end=True)
            errors.append(await ask(llm, "dies", 50))
            await asyncio.to_thread(engine.wait_for_exit)
            return errors

    prepare = functools.partial(prepare_talkative_engine, extension)
    with (
        front_end(**VARIABLES),
        running_engine(config, prepare=prepare, **VARIABLES) as engine,
    ):
        errors = run_async(run(engine))
        log = engine.log
    for entry in (*OF_ONE_REQUEST, LAST):
        assert f"impossible state in {entry}: " in log
    assert "EngineDeadError" in errors[-1]
    assert_unmarked(log, "the engine's log")
    assert_unmarked(our_log.text, "the front end's log")
    for error in errors:
        assert_unmarked(error, "an error")
