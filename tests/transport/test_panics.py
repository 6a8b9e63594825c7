"""A panic in Rust while vLLM's processes run: each request fails once, and nothing hangs.

`tests/unit/test_panics.py` has what the extension does by itself.
"""

import asyncio
from typing import Any

import pytest
from sparksched.engine import hashing, output_queue, scheduler
from vllm.config import VllmConfig
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.outputs import ModelRunnerOutput

from testkit.panics import Panicking

from .clients import ENDLESS, front_end, outcome_of, run_async, running_llm
from .engines import Engine, GarblingEncoder, PacedExecutor, running_engine
from .test_death import NUM_STREAMS, streams_of
from .test_secrets import SECRETS, Formatted, ask, assert_unmarked, log_everything, our_log

__all__ = ["our_log"]

pytestmark = pytest.mark.timeout(180)

VARIABLES = {**SECRETS, "RUST_BACKTRACE": "full"}


class PanickingEncoder(GarblingEncoder):
    """Encodes what Rust code can't look at, once it was told to."""

    def encode(self, obj: Any) -> Any:
        return Panicking() if self.garbles else super().encode(obj)


class PanickingExecutor(PacedExecutor):
    """Returns what Rust code can't look at, once it was told to."""

    panics = False

    def on_panic(self) -> None:
        self.panics = True

    def on_garble(self) -> None:
        PanickingEncoder.garbles = True

    def note_sample(self, grammar_output: Any, output: ModelRunnerOutput) -> None:
        if self.panics:
            output.logprobs = Panicking()


def panic_when_told() -> None:
    log_everything()
    output_queue.MsgpackEncoder = PanickingEncoder


def panic_at_salts() -> None:
    """Let the hashing of requests panic that have a salt."""
    log_everything()
    hashing.extra_keys_writer = lambda *_: lambda _request: bool(Panicking())


def panic_at_start() -> None:
    core_config = scheduler.core_config
    scheduler.core_config = lambda *args, **kwargs: {
        **core_config(*args, **kwargs),
        "block_size": Panicking(),
    }


async def end_of_engine(llm: AsyncLLM, engine: Engine, call: str) -> str:
    """Let it panic while requests run; return the error of one with secrets."""
    streams = await streams_of(llm)
    marked = asyncio.create_task(ask(llm, "marked", ENDLESS))
    failing = asyncio.create_task(llm.collective_rpc(call))
    for num_tokens, *ends in await asyncio.gather(*streams):
        assert num_tokens > 0
        assert ends == ["EngineDeadError"]
    failing.cancel()
    assert await outcome_of(llm, "too-late", 5) == [0, "EngineDeadError"]
    with pytest.raises(EngineDeadError):
        await llm.check_health()
    assert await asyncio.to_thread(engine.wait_for_exit) == 1, "not by a signal"
    return await marked


@pytest.mark.parametrize(
    ("call", "entry"),
    [("panic", "SchedulerCore.update_from_output"), ("garble", "EngineLinks.send")],
    ids=["in-a-step", "in-an-answer"],
)
def test_the_engine_stops_and_each_request_fails_once(
    call: str, entry: str, config: VllmConfig, our_log: Formatted
) -> None:
    async def run(engine: Engine) -> str:
        async with running_llm(config, engine) as llm:
            return await end_of_engine(llm, engine, call)

    executor = PanickingExecutor
    with (
        front_end(**VARIABLES),
        running_engine(
            config, prepare=panic_when_told, executor_class=executor, **VARIABLES
        ) as engine,
    ):
        error = run_async(run(engine))
        log = engine.log
    assert f"RuntimeError: sparksched found itself in an impossible state in {entry}: " in log
    assert " DEBUG " in log
    assert "EngineDeadError" in error
    for text, where in (
        (log, "the engine's log"),
        (our_log.text, "the front end's log"),
        (error, "an error"),
    ):
        assert_unmarked(text, where)


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_only_the_request_fails(transport: str, config: VllmConfig, our_log: Formatted) -> None:
    """Whichever of the two input threads has prepared it."""

    async def run(engine: Engine) -> None:
        async with running_llm(config, engine) as llm:
            other, *_ = streams = await streams_of(llm)
            assert await ask(llm, "salted", 5) == "error"
            assert await outcome_of(llm, "lives", 5) == [5, "length"]
            assert not other.done()
            for stream in streams:
                stream.cancel()

    variables = {**VARIABLES, "SPARKSCHED_TRANSPORT": transport}
    with (
        front_end(**variables),
        running_engine(config, prepare=panic_at_salts, **variables) as engine,
    ):
        run_async(run(engine))
        log = engine.log
    assert "impossible state in NativeBlockHasher.__call__: " in log
    assert_unmarked(log + our_log.text, "a log")


def test_an_engine_does_not_start(config: VllmConfig) -> None:
    with (
        pytest.raises(AssertionError, match=r"(?s)an engine ended:.*in SchedulerCore\.new: "),
        running_engine(config, prepare=panic_at_start, **VARIABLES),
    ):
        pass


def test_a_front_end_gives_up_its_link(config: VllmConfig) -> None:
    """Its requests fail, and the engine aborts them."""

    async def run(engine: Engine) -> None:
        async with running_llm(config, engine) as llm:
            streams = await streams_of(llm)
            llm.engine_core.encoder.encode = lambda _: Panicking()
            assert await outcome_of(llm, "next", 5) == [0, "EngineGenerateError"]
            ends = [ends for _, *ends in await asyncio.gather(*streams)]
            assert ends == [["EngineDeadError"]] * NUM_STREAMS
            assert llm.errored

    with front_end(**VARIABLES), running_engine(config, **VARIABLES) as engine:
        run_async(run(engine))
        assert engine.wait_for_exit() == 0
        assert len(engine.log_lines(f"aborted {NUM_STREAMS} requests of API server 0")) == 1
