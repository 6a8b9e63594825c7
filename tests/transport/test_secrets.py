"""Prompts, keys and salts reach no log and no error, in ordinary service and when things end."""

import asyncio
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
from engine.harness import new_request
from sparksched import _core
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine import core as engine_module
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.serial_utils import MsgpackEncoder

from .clients import ENDLESS, front_end, run_async, running_llm
from .engines import Engine, running_engine

pytestmark = pytest.mark.timeout(180)

ADD, ABORT, UTILITY = 0, 1, 3

API_KEY = "sk-marked-api-key"
HF_TOKEN = "hf_markedToken"
SALT = "marked-salt"
TEXT = "marked text of a prompt"
PROMPT = [211, 163, 197, 149, 181, 173, 167, 157] * 5
"""Tokens of no other request."""
TOO_LARGE = 2**40 + 211

SECRETS = {
    "VLLM_API_KEY": API_KEY,
    "HF_TOKEN": HF_TOKEN,
    "SPARKSCHED_TRANSPORT": "shm",
}
MARKS = re.compile(
    "|".join(
        [
            *map(re.escape, (API_KEY, HF_TOKEN, SALT, TEXT)),
            str(TOO_LARGE),
            r"211\W+163\W+197",
            r"d3\W*(00)*\W*a3\W*(00)*\W*c5",  # the same in hex
        ]
    )
)


def log_everything() -> None:
    """Do in an engine what `VLLM_LOGGING_LEVEL=DEBUG` does, after it has read its environment."""
    configure = engine_module.configure_logging

    def configure_for_debugging(config: Any) -> None:
        configure(config)
        logger = logging.getLogger("vllm")
        for it in (logger, *logger.handlers):
            it.setLevel(logging.DEBUG)

    engine_module.configure_logging = configure_for_debugging


class Formatted(logging.Handler):
    """Keeps what a log file would have, tracebacks among it."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += self.format(record) + "\n"


@pytest.fixture
def our_log() -> Iterator[Formatted]:
    handler, logger = Formatted(), logging.getLogger("vllm")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


async def ask(llm: AsyncLLM, request_id: str, max_tokens: int, **settings: Any) -> str:
    """Send the marked prompt; return the error that its user sees, or why its output ends so."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **settings)
    prompt = {"prompt_token_ids": PROMPT, "prompt": TEXT, "cache_salt": SALT}
    try:
        async for output in llm.generate(prompt, params, request_id):
            (completion,) = output.outputs
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return completion.finish_reason or ""


async def serve_and_refuse(llm: AsyncLLM) -> list[str]:
    """Send requests that end well, that can't be served, and that nobody wants any more."""
    errors = [await ask(llm, "plain", 20), await ask(llm, "logprobs", 5, logprobs=2)]
    regex = StructuredOutputsParams(regex="[ab]+")
    errors.append(await ask(llm, "grammar", 5, structured_outputs=regex))
    aborted = asyncio.create_task(ask(llm, "aborted", ENDLESS))
    await asyncio.sleep(0.2)
    aborted.cancel()
    # What the front end lets through and the engine can't take, as from one without sparksched.
    for unfit in (
        new_request("too-large", [*PROMPT, TOO_LARGE], cache_salt=SALT),
        new_request("plain\udcff", PROMPT, cache_salt=SALT),
    ):
        try:
            await llm.engine_core.add_request_async(unfit)
        except Exception as error:
            errors.append(str(error))
    return errors


async def damage(llm: AsyncLLM) -> list[str]:
    """Send messages that are damaged, with the prompt in them, as another client."""
    name = await llm.engine_core.call_utility_async("ring_name")
    rings = _core.ClientRings(name, client_index=1, stuck_after_s=10.0)
    whole = MsgpackEncoder().encode(new_request("damaged", PROMPT, cache_salt=SALT))
    rings.send(ADD, [bytes(whole[0])[:-3], *whole[1:]])
    end = None
    while not isinstance(end, _core.RingEnd):
        await asyncio.to_thread(rings.wait, 1.0)
        end = next(iter(rings.receive()), None)
    rings.close()
    return [end.reason]


async def die(llm: AsyncLLM) -> list[str]:
    """Let the engine fail in the middle of a step."""
    dying = [asyncio.create_task(ask(llm, f"dies-{index}", ENDLESS)) for index in range(3)]
    await asyncio.sleep(0.3)
    failing = asyncio.create_task(llm.collective_rpc("fail"))
    errors = await asyncio.gather(*dying)
    failing.cancel()
    return [*errors, await ask(llm, "too-late", 5)]


def assert_unmarked(text: str, where: str) -> None:
    found = MARKS.search(text)
    assert found is None, f"{where}: {text[max(found.start() - 300, 0) : found.end() + 100]}"


def test_no_secret_reaches_a_log(config: VllmConfig, our_log: Formatted) -> None:
    async def run(engine: Engine) -> list[str]:
        async with running_llm(config, engine, 0, count=2) as llm:
            errors = [*await serve_and_refuse(llm), *await damage(llm), *await die(llm)]
            await asyncio.to_thread(engine.wait_for_exit)
            return errors

    with (
        front_end(**SECRETS),
        running_engine(config, num_clients=2, prepare=log_everything, **SECRETS) as engine,
    ):
        errors = run_async(run(engine))
        log = engine.log
    # All of it has happened, and the engine has said so.
    for text in ("pre-processing request", "sent a malformed message", "this step fails"):
        assert text in log, text
    assert " DEBUG " in log
    assert sum("EngineDeadError" in error for error in errors) == 4
    assert_unmarked(log, "the engine's log")
    assert_unmarked(our_log.text, "the front end's log")
    for error in errors:
        assert_unmarked(error, "an error")
