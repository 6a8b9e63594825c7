"""Drafts, grammars and priorities in one real engine: the same tokens as from vLLM's scheduler.

And the statistics that people turn on to find out where the time goes.
"""

import asyncio
import json
import re
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from testkit.server import SPARKSCHED_LINE, Server
from testkit.streaming import Completion, Prompt, mixed_prompts, stream_all
from testkit.tiny_gpt_oss import write_model

from .pair import Pair, observe_pair
from .test_rings import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

VOCAB_SIZE = 400  # ids below this are in the tiny model's vocabulary, and none ends a text
SPECULATION = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
ARGUMENTS = (
    f"--speculative-config={json.dumps(SPECULATION)}",
    "--scheduling-policy=priority",
    # Otherwise the tiny model likes spaces better than an end.
    '--structured-outputs-config={"backend": "xgrammar", "disable_any_whitespace": true}',
    # Enough for half of the growing requests: some are preempted even if the last ones come late.
    "--num-gpu-blocks-override=52",
    "--enable-mfu-metrics",
    "--cudagraph-metrics",
    "--enable-logging-iteration-details",
)
# No VLLM_DEBUG_MFU_METRICS: vLLM's API server can't read the details, whichever scheduler runs.
ENVIRONMENT = {"VLLM_LOG_STATS_INTERVAL": "1"}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["spark", "ember"]},
        "digits": {"type": "string", "pattern": "^[0-9]{6}$"},
    },
    "required": ["kind", "digits"],
    "additionalProperties": False,
}
# The answer repeats it: its drafts are taken from here.
EXAMPLE = '{"kind":"spark","digits":"123456"}'


@dataclass(frozen=True)
class Observed:
    """What one server made of the prompts."""

    streams: dict[str, list[Completion]]
    num_drafted: float
    num_accepted: float
    num_preemptions: float
    flops: float
    log: str = field(repr=False)


def observe(server: Server) -> Observed:
    streams = {
        name: asyncio.run(stream_all(server.base_url, server.model, prompts))
        for name, prompts in waves().items()
    }
    wait_until(lambda: "MFU: " in server.log, "for a line with statistics")
    return Observed(
        streams,
        server.metric("vllm:spec_decode_num_draft_tokens_total"),
        server.metric("vllm:spec_decode_num_accepted_tokens_total"),
        server.metric("vllm:num_preemptions_total"),
        server.metric("vllm:estimated_flops_per_gpu_total"),
        server.log,
    )


def waves() -> dict[str, list[Prompt]]:
    """Return what is sent at once, by name."""
    structured = {"structured_outputs": {"json": SCHEMA}}
    growing = [Prompt([it, 1, 2, 3], 200, {"ignore_eos": True}) for it in range(14)]
    return {
        "mixed": [
            with_priority(it, at % 3)
            for at, it in enumerate(mixed_prompts(8, vocab_size=VOCAB_SIZE))
        ],
        "growing": [with_priority(it, at % 2) for at, it in enumerate(growing)],
        "structured": [Prompt(f"{at}: {EXAMPLE * 2}", 60, structured) for at in range(4)],
    }


def with_priority(prompt: Prompt, priority: int) -> Prompt:
    return replace(prompt, extra=prompt.extra | {"priority": priority})


@pytest.fixture(scope="module", name="pair")
def _pair(tmp_path_factory: pytest.TempPathFactory) -> Pair[Observed]:
    model_dir = write_model(tmp_path_factory.mktemp("model"))
    return observe_pair(model_dir, tmp_path_factory.mktemp("logs"), observe, ARGUMENTS, ENVIRONMENT)


def test_ours_schedules_by_priority(pair: Pair[Observed]) -> None:
    (line,) = [it for it in pair.log.splitlines() if SPARKSCHED_LINE in it]
    assert "priority" in line


@pytest.mark.parametrize("name", waves())
def test_streams_are_equal_token_for_token(name: str, pair: Pair[Observed]) -> None:
    streams = zip(pair.stock.streams[name], pair.ours.streams[name], strict=True)
    for index, (expected, actual) in enumerate(streams):
        assert actual.outcome == expected.outcome, f"request {index} differs"


@pytest.mark.parametrize("side", ["stock", "ours"])
def test_drafts_were_accepted_and_rejected(side: str, pair: Pair[Observed]) -> None:
    observed: Observed = getattr(pair, side)
    assert 0 < observed.num_accepted < observed.num_drafted


@pytest.mark.parametrize("side", ["stock", "ours"])
def test_speculating_requests_were_preempted(side: str, pair: Pair[Observed]) -> None:
    assert getattr(pair, side).num_preemptions > 0


def test_answers_follow_the_schema(pair: Pair[Observed]) -> None:
    for completion in pair.ours.streams["structured"]:
        answer: dict[str, str] = json.loads(completion.text)
        assert answer["kind"] in ("spark", "ember")
        assert re.fullmatch("[0-9]{6}", answer["digits"])


@pytest.mark.parametrize("side", ["stock", "ours"])
def test_the_work_of_steps_is_estimated(side: str, pair: Pair[Observed]) -> None:
    observed: Observed = getattr(pair, side)
    assert observed.flops > 0
    assert re.search(r"MFU: \d+\.\d TF/s/device \d+\.\d GB/s/device", observed.log)
