"""Real servers, each with vLLM's scheduler and with sparksched: users can't tell them apart."""

import asyncio
import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from testkit.server import Server, serve
from testkit.streaming import Completion, Prompt, mixed_prompts, stream_all, stream_chunks
from testkit.tiny_models import write_model

from .test_rings import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

VOCAB_SIZE = 400  # ids below this are in the tiny model's vocabulary, and none ends a text
# Enough for the longest request alone, and a third of what the growing ones want together.
FEW_BLOCKS = "--num-gpu-blocks-override=52"
NUM_WITH_LOGPROBS = 40
STRICT = {"SPARKSCHED_STRICT": "1"}

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


# ----------------------------------------------------------------------------------------
# Servers, and what they are asked
# ----------------------------------------------------------------------------------------


def mixed(count: int) -> list[Prompt]:
    return mixed_prompts(count, vocab_size=VOCAB_SIZE)


def growing(count: int) -> list[Prompt]:
    """Return prompts that fit into the KV cache; with their outputs three don't: they preempt."""
    return [Prompt([index, 1, 2, 3], 400, {"ignore_eos": True}) for index in range(count)]


def by_priority(prompts: list[Prompt]) -> list[Prompt]:
    return [replace(it, extra=it.extra | {"priority": at % 3}) for at, it in enumerate(prompts)]


@dataclass(frozen=True)
class Case:
    """What is sent to servers with some arguments: waves of requests at once, by name."""

    arguments: tuple[str, ...]
    waves: dict[str, list[Prompt]]
    above_zero: tuple[str, ...] = ()
    """Metrics which say that a situation has been met."""
    said: tuple[str, ...] = ()
    """What ours says in its log."""
    environment: dict[str, str] = field(default_factory=dict)
    is_preloaded: bool = True
    """Whether processes of ours are forked from one that has vLLM and the plugin loaded."""


# Otherwise the tiny model likes spaces better than an end.
NO_SPACES = '--structured-outputs-config={"backend": "xgrammar", "disable_any_whitespace": true}'
PLAIN = Case(
    (FEW_BLOCKS, NO_SPACES),
    {
        "mixed": mixed(12),
        "growing": growing(6),
        "structured": [
            Prompt("a spark:", 200, {"structured_outputs": {"json": SCHEMA}}),
            Prompt("a colour:", 32, {"structured_outputs": {"choice": CHOICES}}),
            Prompt("a number:", 32, {"structured_outputs": {"regex": PATTERN}}),
        ],
        # Steps bring outputs with logprobs and without.
        "logprobs": [
            Prompt([at, 9, 8], NUM_WITH_LOGPROBS, {"ignore_eos": True, "logprobs": at % 2 * 3})
            for at in range(8)
        ],
    },
    ("vllm:num_preemptions_total", "vllm:prefix_cache_hits_total"),
    is_preloaded=False,
)
VERIFIED = replace(
    PLAIN,
    said=("verifies each step", r"[1-9]\d+ steps verified, no difference"),
    environment={"SPARKSCHED_VERIFY": "stop"},
    is_preloaded=True,
)
NGRAMS = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
# Drafts come from here, for the answer repeats it.
EXAMPLE = '{"kind":"spark","lit":true,"digits":"1234"}'
SPECULATING = Case(
    (
        FEW_BLOCKS,
        f"--speculative-config={json.dumps(NGRAMS)}",
        "--scheduling-policy=priority",
        NO_SPACES,
        *("--enable-mfu-metrics", "--cudagraph-metrics", "--enable-logging-iteration-details"),
    ),
    {
        "mixed": by_priority(mixed(8)),
        "growing": by_priority(growing(6)),
        "structured": [
            Prompt(f"{at}: {EXAMPLE * 2}", 60, {"structured_outputs": {"json": SCHEMA}})
            for at in range(4)
        ],
    },
    (
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:num_preemptions_total",
        "vllm:estimated_flops_per_gpu_total",
    ),
    (
        r"scheduling in Rust.*priority",
        r"MFU: \d+\.\d TF/s/device \d+\.\d GB/s/device",
    ),
    # No VLLM_DEBUG_MFU_METRICS: vLLM's API server can't read the details, whichever scheduler runs.
    {"VLLM_LOG_STATS_INTERVAL": "1"},
)
# Short, for ranks spin while they wait for each other.
TENSOR_PARALLEL = Case(("--tensor-parallel-size=2",), {"mixed": mixed(2)}, said=("Worker_TP1",))
CASES = {
    "plain": PLAIN,
    "verified": VERIFIED,
    "speculating": SPECULATING,
    "tensor-parallel": TENSOR_PARALLEL,
}


@dataclass
class Observed:
    """What one server made of the waves."""

    streams: dict[str, list[Completion]]
    log: str = field(repr=False)


def run_server(case: Case, model: Path, log_path: Path, scheduler: str | None) -> Observed:
    """Observe a server from its start to its end, by SIGTERM."""
    with serve(
        model,
        log_path,
        scheduler=scheduler,
        is_preloaded=case.is_preloaded or scheduler is None,
        arguments=case.arguments,
        environment={**case.environment, **(STRICT if scheduler else {})},
    ) as server:
        streams = {
            name: asyncio.run(stream_all(server.base_url, server.model, prompts))
            for name, prompts in case.waves.items()
        }
        met = {name: server.metric(name) for name in case.above_zero}
        assert all(value > 0 for value in met.values()), met
        if "MFU" in str(case.said):
            wait_until(lambda: "MFU: " in server.log, "for a line with statistics")
        asyncio.run(read_and_leave(server))
        server.wait_until_idle()
        again = stream_all(server.base_url, server.model, case.waves["mixed"][:1])
        streams["after aborts"] = asyncio.run(again)
        assert server.runs_sparksched == (scheduler is not None)
    return Observed(streams, log_path.read_text(errors="replace"))


async def read_and_leave(server: Server) -> None:
    """Read a few chunks of some completions, then disconnect."""
    endless = Prompt("nobody reads to the end of this", 900, {"ignore_eos": True})
    async with httpx.AsyncClient(base_url=server.base_url, timeout=60) as client:
        for _ in range(4):
            chunks = stream_chunks(client, server.model, endless)
            for _ in range(5):
                await anext(chunks)
            await chunks.aclose()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


SHORT = ("plain", "tensor-parallel")
"""Cases of `make test`."""


@pytest.mark.parametrize(
    "name", [pytest.param(it, marks=() if it in SHORT else pytest.mark.full) for it in CASES]
)
def test_users_cannot_tell_them_apart(name: str, model: Path, tmp_path: Path) -> None:
    case = CASES[name]
    stock = run_server(case, model, tmp_path / "stock.log", None)
    ours = run_server(case, model, tmp_path / "ours.log", "sparksched")
    for wave, expected in stock.streams.items():
        for index, (one, other) in enumerate(zip(expected, ours.streams[wave], strict=True)):
            assert other.outcome == one.outcome, f"request {index} of {wave} differs"
            check_usage(other)
            check_logprobs(other, one)
    check_variety(stock.streams["mixed"])
    check_structure(case, ours)
    # Told by a client that has left nothing behind.
    assert ours.streams["after aborts"][0].outcome == ours.streams["mixed"][0].outcome
    assert all(re.search(it, ours.log) for it in case.said)
    check_log(ours.log)


def check_variety(streams: list[Completion]) -> None:
    """Otherwise equality would say little."""
    assert len({tuple(it.token_ids) for it in streams}) == len(streams)
    assert len(set(max((it.token_ids for it in streams), key=len))) > 20


def check_usage(completion: Completion) -> None:
    num_prompt, num_completion = len(completion.prompt_token_ids), len(completion.token_ids)
    assert completion.usage == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
    }


def check_logprobs(ours: Completion, stock: Completion) -> None:
    # The model's arithmetic depends on who else is in a step.
    assert len(ours.logprobs) == len(stock.logprobs)
    for mine, theirs in zip(ours.logprobs, stock.logprobs, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-3)


def check_structure(case: Case, ours: Observed) -> None:
    for prompt, completion in zip(
        case.waves.get("structured", ()), ours.streams.get("structured", ()), strict=True
    ):
        match prompt.extra["structured_outputs"]:
            case {"json": schema}:
                assert json.loads(completion.text).keys() == set(schema["required"])
            case {"choice": choices}:
                assert completion.text in choices
            case {"regex": pattern}:
                assert re.fullmatch(pattern, completion.text)


def check_log(log: str) -> None:
    """Expect no warning of a life with aborts and preemptions that SIGTERM has ended."""
    lines = [line for line in log.splitlines() if "sparksched" in line]
    assert any("shared memory" in line for line in lines)
    # A traceback has a line with the path of each frame's file.
    assert not [line for line in lines if re.search(r'WARNING|ERROR|CRITICAL|File "', line)]
