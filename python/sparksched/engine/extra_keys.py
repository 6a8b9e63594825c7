"""What a block's hash covers besides its tokens: LoRA adapters, cache salts, multimodal items.

vLLM hashes the tuple `(parent, tokens, extra keys)`, serialised by pickle or CBOR. The Rust core
writes parent and tokens itself. This module gives it the extra keys, as the bytes that the
serialiser would write there. vLLM's own functions make the keys.
"""

import pickle
from collections.abc import Callable
from typing import Any

from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from sparksched.compat.kv_cache import room_for_extra_keys
from sparksched.engine.request_errors import UnsupportedRequestError

ExtraKeys = tuple[list[bytes], bytes]
"""Serialised keys of the first blocks one by one, and those of each further block."""


def extra_keys_of_block(
    request: Request, start: int, end: int, num_lookahead_tokens: int, mm_index: int
) -> tuple[tuple[Any, ...] | None, int]:
    """Return the extra keys of the block of tokens `start` to `end`, and where to go on.

    Args:
        request: A request with a prompt of at least so many tokens.
        start: Where the block begins.
        end: Where the next one begins.
        num_lookahead_tokens: Tokens behind the block that its hash covers as well.
        mm_index: The first multimodal item that may be in it: 0, or what the call for the block
            before has returned.

    """
    keys: tuple[Any, ...] | None
    if num_lookahead_tokens == 0:
        keys, mm_index = kv_cache_utils.generate_block_hash_extra_keys(
            request, start, end, mm_index
        )
    else:
        keys, mm_index = kv_cache_utils.generate_lookahead_block_hash_extra_keys(
            request, start, end, end + num_lookahead_tokens, mm_index
        )
    return keys, mm_index


def extra_keys_writer(
    algorithm: str, block_size: int, num_lookahead_tokens: int = 0
) -> Callable[[Request], ExtraKeys]:
    """Return a function that serialises the extra keys of a request.

    Args:
        algorithm: A value of `prefix_caching_hash_algo`.
        block_size: Tokens a block.
        num_lookahead_tokens: Tokens behind a block that its hash covers as well.

    The function raises UnsupportedRequestError for keys that are too long to be hashed at once.

    """
    serialised = _as_cbor if algorithm.endswith("_cbor") else _as_pickle
    limit = room_for_extra_keys(block_size + num_lookahead_tokens)

    def write_extra_keys(request: Request) -> ExtraKeys:
        num_leading = _num_blocks_with_own_keys(request, block_size)
        keys, mm_index = [], 0
        for position in range(num_leading + 1):
            start = position * block_size
            block_keys, mm_index = extra_keys_of_block(
                request, start, start + block_size, num_lookahead_tokens, mm_index
            )
            keys.append(serialised(block_keys))
        if max(map(len, keys)) > limit:
            raise UnsupportedRequestError(
                f"request {request.request_id} has a cache salt, LoRA name or multimodal "
                f"identifiers that take more than {limit} bytes in a block's hash"
            )
        *leading, others = keys
        return leading, others

    return write_extra_keys


def _num_blocks_with_own_keys(request: Request, block_size: int) -> int:
    """Count the first blocks whose keys may differ from those of all further ones."""
    end = 1 if request.cache_salt else 0
    if request.mm_features:
        last = request.mm_features[-1].mm_position
        end = max(end, last.offset + last.length)
    if request.prompt_embeds is not None:
        end = max(end, len(request.prompt_embeds))
    return -(-end // block_size)


def _as_pickle(keys: tuple[Any, ...] | None) -> bytes:
    # Pickle numbers the objects that it may refer to again: before the keys there are always two,
    # the parent and the tuple of tokens.
    def dumps(keys: tuple[Any, ...] | None) -> bytes:
        return pickle.dumps((b"parent", (0,), keys), protocol=pickle.HIGHEST_PROTOCOL)

    num_bytes_behind = len(b"\x87\x94.")  # a tuple of three, numbered, and the end
    num_bytes_before = len(dumps(None)) - len(b"N") - num_bytes_behind
    return dumps(keys)[num_bytes_before:-num_bytes_behind]


def _as_cbor(keys: tuple[Any, ...] | None) -> bytes:
    import cbor2

    before = b"\x83\x40\x80"  # an array of three: no parent, no tokens
    serialised: bytes = cbor2.dumps((b"", (), keys), canonical=True)
    return serialised[len(before) :]
