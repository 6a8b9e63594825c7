"""Servers over a device that can't lie, in storms: preemptions, cancellations, resets, two engines.

Requests of every kind are answered in peace first, by vLLM's own scheduler. In a storm each of them
gets the same answer, or is left by its client in the middle.
"""

import asyncio
import base64
import io
import json
import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import scale
from PIL import Image

from testkit import vllm_rs
from testkit.executor import (
    ASYNC_SCHEDULING,
    IMAGE,
    IMAGE_SIZE,
    write_model_directory,
    write_model_that_sees,
)
from testkit.server import Server, serve
from testkit.streaming import Prompt, stream_chunks

from .test_serve import CHOICES, PATTERN, SCHEMA

pytestmark = [pytest.mark.e2e, pytest.mark.release, pytest.mark.timeout(900)]

NUM_REQUESTS = scale.size("SPARKSCHED_STORM_REQUESTS", short=120, full=2000)
SEED = scale.size("SPARKSCHED_STORM_SEED", short=0, full=0, minimum=0)
CONCURRENCY = 40
NUM_BLOCKS_IN_PEACE = 2000
NUM_BLOCKS = 90
"""A third of what the running requests want."""
FEWEST_BLOCKS = 70
"""A few more than the longest request needs."""
NUM_IMAGES = 12
"""The encoder's cache holds 7."""
RESET_PAUSE_S = 0.1
ADAPTERS = ("first", "second")
ROOT = Path(__file__).resolve().parents[2]

BACKEND = "--distributed-executor-backend=testkit.executor.AsynchronousExecutor"


# ----------------------------------------------------------------------------------------
# Requests
# ----------------------------------------------------------------------------------------

NOT_STREAMED = "prompt_logprobs"

GRAMMARS = (
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"regex": PATTERN}},
    {"structured_outputs": {"choice": CHOICES}},
)
SAMPLING = (
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.5, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "seed": 1},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"logit_bias": {"65": 5.0, "66": -5.0}},
    {"bad_words": ["ab"]},
    {"allowed_token_ids": list(range(30, 90))},
)
ENDS = (
    {"ignore_eos": True},
    {"min_tokens": 4},
    {"stop_token_ids": [10, 20, 30]},
    {"stop": ["a"]},
    {"stop": ["bc", "d"], "include_stop_str_in_output": True},
)
OTHERS = (
    {"n": 2, "seed": 3, "temperature": 0.7},
    {"cache_salt": "another"},
)
SCORES = (
    {"logprobs": 2},
    {NOT_STREAMED: 1},
)

TEMPLATE = (
    "{% for part in messages[0].content %}"
    f"{{{{ part.text if part.type == 'text' else '{IMAGE}' }}}}"
    "{% endfor %}"
)


def image(number: int) -> dict[str, Any]:
    """Return a part of a message: one of several images."""
    file = io.BytesIO()
    Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE), (20 * number, 0, 0)).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


@dataclass(frozen=True)
class Seen(Prompt):
    """A message of images, each with the same text behind it."""

    images: tuple[int, ...] = ()
    path = "/v1/chat/completions"

    def body(self, model: str) -> dict[str, Any]:
        text = {"type": "text", "text": self.content}
        parts = [part for number in self.images for part in (image(number), text)]
        body = super().body(model) | {"messages": [{"role": "user", "content": parts}]}
        del body["prompt"]
        return body


@dataclass
class Plan:
    """A request, and after how many chunks its client leaves, if it does."""

    prompt: Prompt
    adapter: str | None
    num_chunks_to_leave: int | None


def plans(rng: random.Random) -> list[Plan]:
    prefixes = [[rng.randrange(200) for _ in range(100)] for _ in range(3)]
    found = []
    for _ in range(NUM_REQUESTS):
        own = [rng.randrange(200) for _ in range(rng.choice((1, 20, 70, 250)))]
        content = rng.choice(prefixes) + own if rng.random() < 0.6 else own
        images = rng.choices(range(NUM_IMAGES), k=3) if rng.random() < 0.3 else []
        extra: dict[str, Any] = {"priority": rng.randrange(3), "temperature": 0}
        kind = rng.random()
        if kind < 0.25:
            extra |= rng.choice(GRAMMARS)
        elif kind < 0.5:
            extra |= rng.choice(SAMPLING)
        elif kind < 0.65:
            extra |= rng.choice(OTHERS if images else OTHERS + SCORES)
        if kind >= 0.25:
            extra |= rng.choice(ENDS)
        adapter = rng.choice(ADAPTERS) if rng.random() < 0.3 else None
        is_left = rng.random() < 0.25 and NOT_STREAMED not in extra
        leaves = rng.randrange(20) if is_left else None
        max_tokens = rng.choice((4, 40, 120))
        prompt = Prompt(content, max_tokens, extra)
        if images:
            text = "".join(chr(65 + token % 26) for token in own[:60])
            prompt = Seen(text, max_tokens, extra, tuple(images))
        found.append(Plan(prompt, adapter, leaves))
    return found


@dataclass
class Answer:
    """What came of one sequence."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    end: tuple[Any, ...] | None = None
    logprobs: list[Any] = field(default_factory=list)

    def absorb(self, choice: Mapping[str, Any]) -> None:
        self.tokens += choice.get("token_ids") or []
        self.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
        if choice.get("finish_reason") is not None:
            self.end = choice["finish_reason"], choice.get("stop_reason")
        logprobs = choice.get("logprobs") or {}
        self.logprobs += logprobs.get("token_logprobs", [])
        self.logprobs += choice.get("prompt_logprobs") or []

    def begins_as(self, other: "Answer") -> bool:
        return self.tokens == other.tokens[: len(self.tokens)]


async def ask(client: httpx.AsyncClient, plan: Plan, leaves: int | None) -> dict[int, Answer]:
    """Return the answer, as far as it was read."""
    answers: dict[int, Answer] = {}
    model = plan.adapter or "tiny"
    if NOT_STREAMED in plan.prompt.extra:
        body = plan.prompt.body(model) | {"stream": False, "stream_options": None}
        answer = await client.post("/v1/completions", json=body)
        assert answer.is_success, answer.text
        for choice in answer.json()["choices"]:
            answers.setdefault(choice["index"], Answer()).absorb(choice)
        return answers
    chunks = stream_chunks(client, model, plan.prompt)
    num_read = 0
    async for chunk in chunks:
        for choice in chunk["choices"]:
            answers.setdefault(choice["index"], Answer()).absorb(choice)
        num_read += 1
        if leaves is not None and num_read > leaves:
            await chunks.aclose()
            break
    return answers


async def ask_all(
    server: Server, wanted: list[Plan], *, is_storm: bool, resets: bool
) -> list[dict[int, Answer]]:
    places = asyncio.Semaphore(CONCURRENCY)
    limits = httpx.Limits(max_connections=None)

    async with httpx.AsyncClient(base_url=server.base_url, timeout=300, limits=limits) as client:

        async def ask_in_turn(plan: Plan) -> dict[int, Answer]:
            async with places:
                return await ask(client, plan, plan.num_chunks_to_leave if is_storm else None)

        resetting = asyncio.create_task(reset_again_and_again(client)) if resets else None
        answers = await asyncio.gather(*map(ask_in_turn, wanted))
        if resetting is not None:
            assert not resetting.done(), resetting.result()
            resetting.cancel()
        return answers


async def reset_again_and_again(client: httpx.AsyncClient) -> None:
    """Forget the prefix cache: every other time with what runs, which is computed again."""
    for number in range(1 << 30):
        await asyncio.sleep(RESET_PAUSE_S)
        params = {"reset_running_requests": str(bool(number % 2)).lower()}
        answer = await client.post("/reset_prefix_cache", params=params)
        assert answer.is_success, answer.text


# ----------------------------------------------------------------------------------------
# Servers
# ----------------------------------------------------------------------------------------


@contextmanager
def serving(
    model: Path,
    log_path: Path,
    *arguments: str,
    scheduler: str | None = "sparksched",
    num_blocks: int = NUM_BLOCKS,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    variables = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": path, **(environment or {})}
    with serve(
        model,
        log_path,
        scheduler=scheduler,
        is_preloaded=True,
        arguments=(
            BACKEND,
            f"--additional-config={json.dumps({ASYNC_SCHEDULING: True})}",
            "--load-format=dummy",
            "--max-model-len=512",
            "--block-size=16",
            f"--num-gpu-blocks-override={num_blocks}",
            "--scheduling-policy=priority",
            f"--chat-template={TEMPLATE}",
            *arguments,
        ),
        environment=variables,
    ) as server:
        yield server


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    writers = {"text": write_model_directory, "images": write_model_that_sees}
    return {
        name: write(folder / name, max_position_embeddings=1024) for name, write in writers.items()
    }


@pytest.fixture(scope="module")
def wanted() -> list[Plan]:
    return plans(random.Random(SEED))


@pytest.fixture(scope="module")
def in_peace(
    models: dict[str, Path], wanted: list[Plan], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[int, Answer]]:
    """Return what vLLM's scheduler answers where nothing is in the way."""
    model, log_path = models["images"], tmp_path_factory.mktemp("peace") / "log"
    with serving(
        model, log_path, *with_adapters(model), scheduler=None, num_blocks=NUM_BLOCKS_IN_PEACE
    ) as server:
        answers = asyncio.run(ask_all(server, wanted, is_storm=False, resets=False))
        assert server.metric("vllm:num_preemptions_total") == 0
        return answers


RINGS = {"SPARKSCHED_TRANSPORT": "shm", "SPARKSCHED_STRICT": "1"}
ZMQ = RINGS | {"SPARKSCHED_TRANSPORT": "zmq"}
# Each has half of the requests, so blocks have to be scarcer.
TWO_ENGINES = (
    *("--data-parallel-size=2", "--api-server-count=2"),
    f"--num-gpu-blocks-override={FEWEST_BLOCKS}",
)
STORMS = {
    "rings": ("images", (), RINGS),
    "zmq-fcfs": ("text", ("--scheduling-policy=fcfs",), ZMQ),
    "two-engines": ("images", TWO_ENGINES, RINGS),
}


def with_adapters(model: Path) -> list[str]:
    modules = (f"{name}={model}" for name in ADAPTERS)
    return ["--enable-lora", "--max-loras=1", "--lora-modules", *modules]


@pytest.mark.parametrize("name", STORMS)
def test_a_storm(
    name: str,
    models: dict[str, Path],
    wanted: list[Plan],
    in_peace: list[dict[int, Answer]],
    tmp_path: Path,
) -> None:
    kind, arguments, environment = STORMS[name]
    arguments = (*arguments, *with_adapters(models[kind]))
    known = [at for at, it in enumerate(wanted) if kind == "images" or is_text(it)]
    with serving(models[kind], tmp_path / "log", *arguments, environment=environment) as server:
        storm(server, known, wanted, in_peace, resets=True)


# vLLM's Rust front end refuses several answers and LLaVA's images. Its bad words are other tokens.
# vLLM's engine can't read how it names adapters.
NOT_IN_RUST = {"n", "bad_words"}


@pytest.mark.skipif(vllm_rs.binary() is None, reason="make test fetches it")
def test_a_storm_before_the_rust_front_end(
    models: dict[str, Path], wanted: list[Plan], in_peace: list[dict[int, Answer]], tmp_path: Path
) -> None:
    """Tokens are compared: it has other text for single bytes."""
    known = [
        at
        for at, plan in enumerate(wanted)
        if is_text(plan) and plan.adapter is None and not plan.prompt.extra.keys() & NOT_IN_RUST
    ]
    variables = vllm_rs.variables()
    # Nobody resets what runs, so blocks alone have to be scarce.
    with serving(
        models["text"], tmp_path / "log", num_blocks=FEWEST_BLOCKS, environment=variables
    ) as server:
        storm(server, known, wanted, in_peace, resets=False, with_text=False)


def is_text(plan: Plan) -> bool:
    return not isinstance(plan.prompt, Seen)


def storm(
    server: Server,
    known: list[int],
    wanted: list[Plan],
    in_peace: list[dict[int, Answer]],
    *,
    resets: bool,
    with_text: bool = True,
) -> None:
    """Ask for some of what is wanted; compare each answer with that in peace."""
    wanted, in_peace = [wanted[at] for at in known], [in_peace[at] for at in known]
    answers = asyncio.run(ask_all(server, wanted, is_storm=True, resets=resets))
    assert server.runs_sparksched
    server.wait_until_idle()
    assert server.metric("vllm:num_preemptions_total") > 0
    for plan, answer, expected in zip(wanted, answers, in_peace, strict=True):
        if plan.num_chunks_to_leave is None:
            assert answer.keys() == expected.keys()
        for index, sequence in answer.items():
            of_peace = expected[index]
            assert sequence.begins_as(of_peace), plan
            if sequence.end is not None or plan.num_chunks_to_leave is None:
                assert sequence.tokens == of_peace.tokens, plan
                assert sequence.end == of_peace.end, plan
            if with_text and sequence.end is not None:
                assert sequence.text == of_peace.text, plan
                # vLLM's runners send a prompt's once: a reset may drop the step that has them.
                if not (resets and sequence.logprobs == [None]):
                    assert sequence.logprobs == of_peace.logprobs, plan
