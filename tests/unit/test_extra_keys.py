"""What block hashes cover besides tokens: the hashes against vLLM's, and what is too long."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sparksched.engine import hashing
from sparksched.engine.extra_keys import extra_keys_writer
from unit.bare_core import (
    BLOCK_SIZE,
    LOOKAHEADS,
    LORA,
    build_request,
    hashes_while_growing,
    images,
    stock_block_hasher,
)
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils

pytestmark = pytest.mark.release

# Three full blocks and a half, so that output tokens complete the last block.
PROMPT = [11, 300, 70_000, 2**31 - 1, *range(100, 110)]
GROWTH = [[1], [2, 3], [4, 5, 6, 7, 8], [9] * 17]


def both_hashes(algorithm: str, block_size: int, **settings: Any) -> tuple[Any, Any]:
    """Return what our hashers and vLLM's make of a request while it grows."""
    arguments = {"prompt": PROMPT, "growth": GROWTH} | settings
    native, stock = (
        [
            hashes_while_growing(build(algorithm, block_size, lookahead), **arguments)
            for lookahead in LOOKAHEADS
        ]
        for build in (hashing.native_block_hasher, stock_block_hasher)
    )
    num_tokens = len(arguments["prompt"]) + sum(map(len, arguments["growth"]))
    for lookahead, hashes in zip(LOOKAHEADS, stock, strict=True):
        assert len(hashes[-1]) == (num_tokens - lookahead) // block_size
    return native, stock


@pytest.mark.parametrize("text", ["l", "s" * 255, "s" * 256, "s" * 5000, "\N{SPARKLES}", "\x00"])
def test_salts_and_loras(algorithm: str, text: str) -> None:
    for settings in (
        {"cache_salt": text},
        {"lora_request": LoRARequest(text, 7, "path")},
        {"lora_request": LoRARequest("name", 7, text)},
    ):
        native, stock = both_hashes(algorithm, BLOCK_SIZE, **settings)
        assert native == stock


def test_one_string_for_everything(algorithm: str) -> None:
    """Pickle writes an object that it has met a second time as a reference."""
    text = "an object"
    native, stock = both_hashes(
        algorithm,
        BLOCK_SIZE,
        cache_salt=text,
        lora_request=LoRARequest(text, 1, text),
        mm_features=images((0, 1), (1, 1), (2, 5), (7, 1), identifier=text),
    )
    assert native == stock


def test_many_images_in_a_block(algorithm: str) -> None:
    """Pickle refers to the first 256 objects in another way than to later ones."""
    features = images(*((offset, 1) for offset in range(300)), identifier="the same image")
    native, stock = both_hashes(
        algorithm, 512, prompt=[7] * 300, growth=[[1] * 212, [2] * 512], mm_features=features
    )
    assert native == stock


@pytest.mark.parametrize("seed", range(20))
def test_random_requests(algorithm: str, seed: int) -> None:
    rng = random.Random(f"{algorithm}/{seed}")
    for _ in range(40):
        prompt = [rng.randrange(2 ** rng.randint(1, 31)) for _ in range(rng.randint(1, 80))]
        growth = [
            [rng.randrange(1000) for _ in range(rng.randint(1, 20))]
            for _ in range(rng.randint(1, 5))
        ]
        positions = []
        end = rng.randrange(10)
        while end < len(prompt):
            length = rng.randint(1, min(20, len(prompt) - end))
            positions.append((end, length))
            end += length + rng.choice([0, 0, 1, 15])
        random_bfloat16 = torch.rand(len(prompt), 3, dtype=torch.bfloat16)
        features = images(*positions, identifier=rng.choice([None, "the same image"]))
        for feature in features:
            if rng.random() < 0.3:  # equal, and another object
                feature.identifier = "".join([*feature.identifier])
        native, stock = both_hashes(
            algorithm,
            rng.choice([1, 2, 3, 4, 7, 16]),
            prompt=prompt,
            growth=growth,
            cache_salt=rng.choice([None, "salt", "s" * 300]),
            lora_request=rng.choice([None, LORA]),
            mm_features=features,
            prompt_embeds=rng.choice([None, torch.rand(len(prompt), 3), random_bfloat16]),
            prompt_is_token_ids=rng.choice([None, rng.choices([False, True], k=len(prompt))]),
        )
        assert native == stock


# ----------------------------------------------------------------------------------------
# The serialiser itself
# ----------------------------------------------------------------------------------------


def request_with_salt(length: int, **settings: Any) -> Any:
    return build_request(cache_salt="s" * length, **settings)


def request_with_lora(length: int, **settings: Any) -> Any:
    return build_request(lora_request=LoRARequest("l" * length, 1, "/nowhere"), **settings)


def request_with_image(length: int, **settings: Any) -> Any:
    return build_request(mm_features=images((1, 2), identifier="i" * length), **settings)


@pytest.mark.parametrize("block_size", [2, 4, 16, 5000])
@pytest.mark.parametrize("build", [request_with_salt, request_with_lora, request_with_image])
def test_longest_keys(algorithm: str, block_size: int, build: Callable[..., Any]) -> None:
    """Pickle frames what is longer in pieces, which the native hasher doesn't."""
    write = extra_keys_writer(algorithm, block_size)
    limit = 2**16 - 129 - 5 * block_size
    leading, others = write(build(1000))
    longest = limit - max(map(len, (*leading, others))) + 1000

    request = build(longest)
    leading, others = write(request)
    assert max(map(len, (*leading, others))) == limit
    prompt = [2**31 - 1] * (2 * block_size)  # the longest tokens
    native, stock = (
        build(longest, prompt=prompt, block_hasher=hasher(algorithm, block_size)).block_hashes
        for hasher in (hashing.native_block_hasher, stock_block_hasher)
    )
    assert native == stock
    assert len(stock) == 2

    message = (
        "request long has a cache salt, LoRA name or multimodal identifiers that take more than "
        f"{limit} bytes in a block's hash"
    )
    with pytest.raises(ValueError, match=message):
        write(build(longest + 1, request_id="long"))
    with pytest.raises(ValueError, match=message):
        build(
            longest + 1,
            request_id="long",
            prompt=prompt,
            block_hasher=hashing.native_block_hasher(algorithm, block_size),
        )


def test_keys_that_cannot_be_serialised() -> None:
    """Pickle takes half a surrogate pair, CBOR doesn't: neither here nor in vLLM."""
    kv_cache_utils.init_none_hash(get_hash_fn_by_name("sha256"))
    for build in (hashing.native_block_hasher, stock_block_hasher):
        request = build_request(cache_salt="\ud800", block_hasher=build("sha256", BLOCK_SIZE))
        assert len(request.block_hashes) == 2
        with pytest.raises(UnicodeEncodeError):
            build_request(cache_salt="\ud800", block_hasher=build("sha256_cbor", BLOCK_SIZE))
