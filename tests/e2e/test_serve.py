"""One real server with vLLM's scheduler, one with sparksched: users can't tell them apart."""

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from testkit.server import Server, serve
from testkit.streaming import (
    Completion,
    Prompt,
    mixed_prompts,
    stream_all,
    stream_chunks,
    stream_one,
)
from testkit.tiny_gpt_oss import write_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

NUM_REQUESTS = 32
VOCAB_SIZE = 400  # ids below this are in the tiny model's vocabulary, and none ends a text
# Enough for the longest request alone, and a third of what the growing ones want together.
NUM_BLOCKS = 52
NUM_GROWING = 16  # as many as the server runs at once
NUM_WITH_LOGPROBS = 40

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["spark", "ember", "flame"]},
        "lit": {"type": "boolean"},
        "digits": {"type": "string", "pattern": "^[0-9]{4}$"},
    },
    "required": ["kind", "lit", "digits"],
    "additionalProperties": False,
}
CHOICES = ["red", "green", "blue", "ultraviolet"]
PATTERN = r"[a-f]{3}-[0-9]{5}"
STRUCTURED = {
    "json": Prompt("a spark:", 200, {"structured_outputs": {"json": SCHEMA}}),
    "choice": Prompt("a colour:", 32, {"structured_outputs": {"choice": CHOICES}}),
    "regex": Prompt("a number:", 32, {"structured_outputs": {"regex": PATTERN}}),
}


@dataclass
class Observed:
    """All that the tests ask of one server, gathered while it ran."""

    mixed: list[Completion]
    growing: list[Completion]
    structured: dict[str, Completion]
    with_logprobs: list[Completion]
    before_abort: Completion
    after_abort: Completion
    num_preemptions: float
    num_cached_tokens: float
    runs_sparksched: bool
    log: str = field(repr=False)


def observe(server: Server) -> Observed:
    """Put one server through its paces."""
    mixed_wave = mixed_prompts(NUM_REQUESTS, vocab_size=VOCAB_SIZE)
    mixed = asyncio.run(stream_all(server.base_url, server.model, mixed_wave))
    growing = asyncio.run(stream_all(server.base_url, server.model, growing_prompts()))
    structured = asyncio.run(stream_all(server.base_url, server.model, list(STRUCTURED.values())))
    with_logprobs = asyncio.run(stream_all(server.base_url, server.model, logprobs_prompts()))
    num_preemptions = server.metric("vllm:num_preemptions_total")
    num_cached_tokens = server.metric("vllm:prefix_cache_hits_total")
    before_abort, after_abort = asyncio.run(complete_around_an_abort(server))
    server.wait_until_idle()
    return Observed(
        mixed=mixed,
        growing=growing,
        structured=dict(zip(STRUCTURED, structured, strict=True)),
        with_logprobs=with_logprobs,
        before_abort=before_abort,
        after_abort=after_abort,
        num_preemptions=num_preemptions,
        num_cached_tokens=num_cached_tokens,
        runs_sparksched=server.runs_sparksched,
        log=server.log,
    )


def growing_prompts() -> list[Prompt]:
    """Return prompts that all fit into the KV cache, with outputs that don't: they preempt."""
    return [
        Prompt([index, 1, 2, 3], max_tokens=200, extra={"ignore_eos": True})
        for index in range(NUM_GROWING)
    ]


def logprobs_prompts() -> list[Prompt]:
    """Return prompts of which every other one asks for logprobs: steps bring both kinds."""
    return [
        Prompt([index, 9, 8], NUM_WITH_LOGPROBS, {"ignore_eos": True, "logprobs": index % 2 * 3})
        for index in range(8)
    ]


async def complete_around_an_abort(server: Server) -> tuple[Completion, Completion]:
    """Complete a prompt, leave several streams in the middle, and complete it again."""
    prompt = Prompt("the same text, twice", 24)
    endless = Prompt("nobody reads to the end of this", 900, {"ignore_eos": True})
    async with httpx.AsyncClient(base_url=server.base_url, timeout=60) as client:
        before = await stream_one(client, server.model, prompt)
        await asyncio.gather(*(read_and_leave(client, server.model, endless) for _ in range(4)))
        after = await stream_one(client, server.model, prompt)
    return before, after


async def read_and_leave(client: httpx.AsyncClient, model: str, prompt: Prompt) -> None:
    """Read a few chunks of a completion, then disconnect."""
    chunks = stream_chunks(client, model, prompt)
    for _ in range(5):
        await anext(chunks)
    await chunks.aclose()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", name="stock")
def _stock(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Observed:
    return run_server(model_dir, tmp_path_factory.mktemp("stock"), scheduler=None)


@pytest.fixture(scope="module", name="ours")
def _ours(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Observed:
    return run_server(model_dir, tmp_path_factory.mktemp("ours"), scheduler="sparksched")


@pytest.fixture(scope="module", name="verified")
def _verified(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Observed:
    """Observe a server that would stop if the schedulers differed."""
    log_dir = tmp_path_factory.mktemp("verified")
    variables = {"SPARKSCHED_VERIFY": "stop", "SPARKSCHED_STRICT": "1"}
    return run_server(model_dir, log_dir, scheduler="sparksched", environment=variables)


def run_server(
    model_dir: Path,
    log_dir: Path,
    scheduler: str | None,
    environment: Mapping[str, str] | None = None,
) -> Observed:
    """Observe a server of its own, from start to end."""
    arguments = [f"--num-gpu-blocks-override={NUM_BLOCKS}"]
    with serve(
        model_dir,
        log_dir / "serve.log",
        scheduler=scheduler,
        # One in which each process imports vLLM and loads the plugin by itself, as with users.
        is_preloaded=scheduler is None or environment is not None,
        arguments=arguments,
        environment=environment,
    ) as server:
        observed = observe(server)
    # With what is said at the end.
    return replace(observed, log=server.log)


def test_the_outputs_are_worth_comparing(stock: Observed) -> None:
    distinct = {tuple(completion.token_ids) for completion in stock.mixed}
    assert len(distinct) == NUM_REQUESTS
    longest = max(stock.mixed, key=lambda completion: len(completion.token_ids))
    assert len(set(longest.token_ids)) > 20
    assert {completion.finish_reason for completion in stock.mixed} == {"stop", "length"}


def test_the_second_server_schedules_in_rust(stock: Observed, ours: Observed) -> None:
    assert ours.runs_sparksched
    assert not stock.runs_sparksched


def test_streams_are_equal_token_for_token(stock: Observed, ours: Observed) -> None:
    pairs = zip(stock.mixed + stock.growing, ours.mixed + ours.growing, strict=True)
    for index, (expected, actual) in enumerate(pairs):
        assert actual.outcome == expected.outcome, f"request {index} differs"


@pytest.mark.parametrize("observed_name", ["stock", "ours"])
def test_the_pool_was_under_pressure(observed_name: str, request: pytest.FixtureRequest) -> None:
    observed: Observed = request.getfixturevalue(observed_name)
    assert observed.num_preemptions > 0
    assert observed.num_cached_tokens > 0


def test_usage_counts_the_tokens(ours: Observed) -> None:
    for completion in ours.mixed + ours.growing:
        num_prompt, num_completion = len(completion.prompt_token_ids), len(completion.token_ids)
        assert completion.usage == {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
        }


@pytest.mark.parametrize("kind", STRUCTURED)
def test_structured_outputs_are_equal(kind: str, stock: Observed, ours: Observed) -> None:
    assert ours.structured[kind].outcome == stock.structured[kind].outcome


def test_structured_outputs_keep_their_structure(ours: Observed) -> None:
    answer: dict[str, Any] = json.loads(ours.structured["json"].text)
    assert set(answer) == set(SCHEMA["required"])
    assert ours.structured["choice"].text in CHOICES
    assert re.fullmatch(PATTERN, ours.structured["regex"].text)


def test_logprobs_are_equal(stock: Observed, ours: Observed) -> None:
    for index, (expected, actual) in enumerate(
        zip(stock.with_logprobs, ours.with_logprobs, strict=True)
    ):
        assert actual.outcome == expected.outcome
        assert len(actual.logprobs) == len(expected.logprobs) == NUM_WITH_LOGPROBS
        assert {len(it) for it in actual.logprobs} == {3 if index % 2 else 1}
        # The model's arithmetic depends on who else is in a step.
        for ours_at, stock_at in zip(actual.logprobs, expected.logprobs, strict=True):
            assert ours_at == pytest.approx(stock_at, abs=1e-3)


def test_the_server_answers_after_aborts(stock: Observed, ours: Observed) -> None:
    # That both gauges of running and waiting requests went back to 0 has been seen in `observe`.
    assert ours.after_abort.outcome == ours.before_abort.outcome == stock.before_abort.outcome


def test_a_clean_life_has_no_warning(ours: Observed) -> None:
    """From start to end, with aborts and preemptions; the server ended at SIGTERM."""
    lines = [line for line in ours.log.splitlines() if "sparksched" in line]
    assert lines
    assert not [line for line in lines if re.search(r"WARNING|ERROR|CRITICAL", line)]
    # A traceback has a line with the path of each frame's file.
    assert not [line for line in lines if 'File "' in line]


# ----------------------------------------------------------------------------------------
# With verification
# ----------------------------------------------------------------------------------------


@pytest.mark.full
def test_users_notice_nothing_of_verification(verified: Observed, stock: Observed) -> None:
    assert "verifies each step" in verified.log
    for kind in ("mixed", "growing", "with_logprobs"):
        pairs = zip(getattr(verified, kind), getattr(stock, kind), strict=True)
        for index, (actual, expected) in enumerate(pairs):
            assert actual.outcome == expected.outcome, f"request {index} of {kind} differs"
    for kind, completion in stock.structured.items():
        assert verified.structured[kind].outcome == completion.outcome
    assert verified.num_preemptions > 0
    assert re.search(r"[1-9]\d+ steps verified, no difference", verified.log)
    assert "the schedulers differ" not in verified.log
