"""What stands for tokens in a trace that has none: keys in the file, made-up tokens in a replay.

A block of tokens is one segment, or two, if the hash of the block before covers its first tokens
as well. A segment's key says that it and all before it are the same as elsewhere in the file, and
nothing else: it is a keyed hash, and the key to it is drawn for each file and stored nowhere.
"""

import hashlib
import itertools
import secrets
from array import array
from collections.abc import Iterator

from sparksched.record.events import KEY_BYTES

_MAX_TOKEN = 0x7FFF_FFFF


def segment_sizes(block_size: int, num_lookahead_tokens: int) -> tuple[int, ...]:
    """Return the tokens of a block's segments."""
    if 0 < num_lookahead_tokens < block_size:
        return (num_lookahead_tokens, block_size - num_lookahead_tokens)
    return (block_size,)


class KeyMaker:
    """Makes the keys of one file."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def root(self, *parts: str) -> bytes:
        """Return what stands for the parent of a first segment: of an adapter and a salt."""
        text = "\0".join(parts).encode(errors="surrogatepass")
        return self._hash(b"root" + text)

    def after(self, parent: bytes, tokens: list[int]) -> bytes:
        """Return the key of a segment."""
        return self._hash(parent + array("q", tokens).tobytes())

    def _hash(self, content: bytes) -> bytes:
        return hashlib.blake2b(content, digest_size=KEY_BYTES, key=self._secret).digest()


class Chain:
    """The keys of one request, as its tokens become known."""

    __slots__ = ("_key", "_maker", "_sizes", "num_whole_tokens", "size", "tail")

    def __init__(self, maker: KeyMaker, root: bytes, sizes: tuple[int, ...]) -> None:
        self._maker = maker
        self._key = root
        self._sizes: Iterator[int] = itertools.cycle(sizes)
        self.size = next(self._sizes)
        """Tokens of the segment that is being filled."""
        self.tail: list[int] = []
        """Those of them that are known."""
        self.num_whole_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Return how many are known."""
        return self.num_whole_tokens + len(self.tail)

    def take(self, tokens: list[int]) -> bytes:
        """Add tokens; return the keys of the segments that they complete."""
        self.tail += tokens
        return self.close_segments()

    def close_segments(self) -> bytes:
        """Return the keys of the whole segments in the tail, and take these away."""
        keys = []
        begin = 0
        while len(self.tail) - begin >= self.size:
            end = begin + self.size
            self._key = self._maker.after(self._key, self.tail[begin:end])
            keys.append(self._key)
            self.num_whole_tokens += self.size
            begin, self.size = end, next(self._sizes)
        if begin:
            del self.tail[:begin]
        return b"".join(keys)


def tokens_of(key: bytes, num_tokens: int) -> list[int]:
    """Return the tokens that stand for a segment: the same for the same key, else others."""
    words = array("I")
    words.frombytes(hashlib.shake_128(key).digest(num_tokens * words.itemsize))
    return [word & _MAX_TOKEN for word in words]


class StandIns:
    """Tokens that are equal where the recorded ones were: in whole blocks behind equal blocks."""

    def __init__(self, number: int, keys: bytes, sizes: tuple[int, ...]) -> None:
        self._number = number
        self._keys = keys
        self._sizes = sizes
        self._tokens: list[int] = []
        self._num_segments = 0

    def between(self, begin: int, end: int) -> list[int]:
        """Return the tokens from one position up to another."""
        while len(self._tokens) < end:
            self._add_segment()
        return self._tokens[begin:end]

    def _add_segment(self) -> None:
        size = self._sizes[self._num_segments % len(self._sizes)]
        begin = self._num_segments * KEY_BYTES
        key = self._keys[begin : begin + KEY_BYTES]
        if not key:
            # Never whole, so nobody else has it.
            key = b"%d of request %d" % (self._num_segments, self._number)
        self._tokens += tokens_of(key, size)
        self._num_segments += 1
