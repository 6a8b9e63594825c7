"""Every kind of message arrives through rings as it does through ZMQ, whatever its size."""

import asyncio
import hashlib
from typing import Any

import numpy as np
import pytest
import torch
from engine.harness import new_request
from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreRequest, FinishReason
from vllm.v1.engine.core import EngineCoreProc

from .clients import (
    Reader,
    endless_request,
    expected_tokens,
    play,
    play_both,
    prompt_of,
)

pytestmark = pytest.mark.timeout(180)

RING_BYTES = 1 << 20
HUGE_BYTES = 64 << 20


def test_utility_calls(config: VllmConfig) -> None:
    async def scenario(reader: Reader) -> list[Any]:
        client = reader.client
        return [
            await client.get_supported_tasks_async(),
            await client.is_sleeping_async(),
            await client.reset_prefix_cache_async(),
            await client.profile_async(True, "prefix"),
            await client.sleep_async(1),
            await client.is_sleeping_async(),
            await client.wake_up_async(),
            await client.is_sleeping_async(),
            await client.pause_scheduler_async("keep"),
            await client.is_scheduler_paused_async(),
            await client.resume_scheduler_async(),
            await client.is_scheduler_paused_async(),
            await reader.call_executor("echo", {"a": [1, None, "b", b"c", 0.5], "d": {}}),
            await reader.call_executor("get_calls"),
        ]

    answers = play_both(scenario, config)
    assert answers[1:3] == [False, True]
    assert answers[5:8] == [True, True, False]
    assert answers[9:12] == [True, None, False]
    assert answers[12] == {"a": [1, None, "b", b"c", 0.5], "d": {}}
    assert any(call.startswith("profile(True") for call in answers[13])


def test_a_utility_call_that_raises(config: VllmConfig) -> None:
    async def scenario(reader: Reader) -> list[str]:
        messages = []
        for call in (
            reader.call_executor("raise", "an ünusual text"),
            reader.call("no_such_method"),
            reader.call("is_sleeping", "one argument too many"),
        ):
            with pytest.raises(Exception) as error:  # noqa: PT011 - vLLM raises nothing narrower
                await call
            assert type(error.value) is Exception
            messages.append(str(error.value))
        assert await reader.call("is_sleeping") is False
        return messages

    messages = play_both(scenario, config)
    assert messages[0] == "Call to collective_rpc method failed: an ünusual text"


# ----------------------------------------------------------------------------------------
# Tensors
# ----------------------------------------------------------------------------------------


def refuse_and_note_embeddings() -> None:
    """Look at prompt embeddings where they arrive; this model has no use for them."""
    seen: list[Any] = []

    def preprocess_add_request(self: EngineCoreProc, request: EngineCoreRequest) -> Any:
        embeds = request.prompt_embeds
        seen.append([str(embeds.dtype), list(embeds.shape), digest(embeds)])
        raise ValueError("refused")

    EngineCoreProc.preprocess_add_request = preprocess_add_request
    EngineCoreProc.get_seen = lambda self: seen


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def test_tensors_of_requests(config: VllmConfig) -> None:
    """Large ones are frames of their own, as in messages with images."""
    torch.manual_seed(0)
    tensors = [
        torch.randn(1000, 64, dtype=torch.bfloat16),
        torch.randn(3, 4),  # below the threshold
        torch.randn(500, 1000),  # larger than the ring
        torch.randn(64, 64).T,  # not contiguous
        torch.randn(0, 64),
    ]

    async def scenario(reader: Reader) -> list[Any]:
        for index, tensor in enumerate(tensors):
            request = new_request(f"tensor-{index}", prompt_of(1), prompt_embeds=tensor)
            await reader.add(request)
        await reader.finish(f"tensor-{index}" for index in range(len(tensors)))
        assert all(it == [FinishReason.ERROR] for it in reader.finishes.values())
        seen: list[Any] = await reader.call("get_seen")
        return seen

    seen = play_both(scenario, config, prepare=refuse_and_note_embeddings, SPARKSCHED_RING_MIB="1")
    assert seen == [[str(it.dtype), list(it.shape), digest(it)] for it in tensors]


# ----------------------------------------------------------------------------------------
# Sizes
# ----------------------------------------------------------------------------------------


def test_messages_larger_than_the_ring(config: VllmConfig) -> None:
    data = np.random.default_rng(0).bytes(HUGE_BYTES)

    async def scenario(reader: Reader) -> None:
        await reader.add(endless_request("endless"))
        assert await reader.call_executor("echo", data) == data
        sizes = [HUGE_BYTES, 1, 3 << 20]
        results = await asyncio.gather(*(reader.call_executor("make_bytes", it) for it in sizes))
        assert [len(it) for it in results] == sizes
        assert not any(map(any, results))
        # Others' messages went on between, each in its order.
        tokens = reader.tokens["endless"]
        assert tokens == expected_tokens(prompt_of(1), len(tokens), ignore_eos=True)

    play(scenario, config, SPARKSCHED_RING_MIB="1")


def test_messages_of_just_the_size_of_the_ring(config: VllmConfig) -> None:
    """Both ways: what is around the data is shorter than the range of its sizes."""

    async def scenario(reader: Reader) -> None:
        for num_bytes in range(RING_BYTES - 250, RING_BYTES + 3):
            assert len(await reader.call_executor("echo", bytes(num_bytes))) == num_bytes

    play(scenario, config, SPARKSCHED_RING_MIB="1")
