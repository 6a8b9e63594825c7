"""What stands for tokens in a trace that has none: keys in the file, made-up tokens in a replay.

A block of tokens is one segment, or two, if the hash of the block before covers its first tokens
as well. A segment's key says that it and all before it are the same as elsewhere in the file, and
nothing else: it is a keyed hash, and the key to it is drawn for each file and stored nowhere.
"""

import hashlib
import itertools
from array import array
from collections.abc import Iterator
from typing import Final

from sparksched.record.events import KEY_BYTES, Settings

STOP: Final = 0x7FFF_FFFF
"""Stands for each token that ends a request, and for nothing else."""

_MAX_TOKEN: Final = 0x3FFF_FFFF


def segment_sizes(settings: Settings) -> tuple[int, ...]:
    """Return the tokens of a block's segments."""
    block_size, num_lookahead_tokens = settings.hash_block_size, settings.num_hash_lookahead_tokens
    if 0 < num_lookahead_tokens < block_size:
        return (num_lookahead_tokens, block_size - num_lookahead_tokens)
    return (block_size,)


class Chain:
    """The keys of one request, as its tokens become known.

    `root` is whatever else a block's hash covers: an adapter, and a salt.
    """

    __slots__ = ("_key", "_secret", "_sizes", "size", "tail")

    def __init__(self, secret: bytes, root: str, sizes: tuple[int, ...]) -> None:
        self._secret = secret
        self._key = self._hash(root.encode(errors="surrogatepass"))
        self._sizes: Iterator[int] = itertools.cycle(sizes)
        self.size = next(self._sizes)
        """Tokens of the segment that is being filled."""
        self.tail: list[int] = []
        """Those of them that are known."""

    def close_segments(self) -> bytes:
        """Return the keys of the whole segments in the tail, and take these away."""
        keys = []
        begin = 0
        while len(self.tail) - begin >= self.size:
            end = begin + self.size
            self._key = self._hash(self._key + array("q", self.tail[begin:end]).tobytes())
            keys.append(self._key)
            begin, self.size = end, next(self._sizes)
        if begin:
            del self.tail[:begin]
        return b"".join(keys)

    def _hash(self, content: bytes) -> bytes:
        return hashlib.blake2b(content, digest_size=KEY_BYTES, key=self._secret).digest()


class StandIns:
    """Tokens that are equal where the recorded ones were: in whole blocks behind equal blocks."""

    def __init__(self, number: int, keys: bytes, sizes: tuple[int, ...]) -> None:
        self._number = number
        self._keys = keys
        self._sizes = itertools.cycle(sizes)
        self._tokens: list[int] = []
        self._num_segments = 0

    def between(self, begin: int, end: int) -> list[int]:
        """Return the tokens from one position up to another."""
        while len(self._tokens) < end:
            self._add_segment(next(self._sizes))
        return self._tokens[begin:end]

    def _add_segment(self, num_tokens: int) -> None:
        begin = self._num_segments * KEY_BYTES
        # Without a key: never whole, so nobody else has it.
        key = self._keys[begin : begin + KEY_BYTES] or b"%d of request %d" % (begin, self._number)
        words = array("I")
        words.frombytes(hashlib.shake_128(key).digest(num_tokens * words.itemsize))
        self._tokens += [word & _MAX_TOKEN for word in words]
        self._num_segments += 1
