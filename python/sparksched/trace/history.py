"""What becomes of each request in a trace: its tokens, or what stands for them, to the last one."""

from collections.abc import Iterable

from sparksched.trace.events import KEY_BYTES, Arrive, Event, Grow, Settings, Stop
from sparksched.trace.keys import segment_sizes, tokens_of


class History:
    """What is known of requests when all of a trace has been read."""

    def __init__(self, settings: Settings, events: Iterable[Event]) -> None:
        self.arrivals: list[Arrive] = []
        """By number."""
        self.stops: dict[int, int] = {}
        """How many tokens had been sampled with the one that ended a request, by number."""
        self._sizes = segment_sizes(settings.hash_block_size, settings.num_hash_lookahead_tokens)
        self._keys: dict[int, bytearray] = {}
        for event in events:
            match event:
                case Arrive():
                    self._keys[len(self.arrivals)] = bytearray(event.keys)
                    self.arrivals.append(event)
                case Grow(grown):
                    for number, keys in grown:
                        self._keys[number] += keys
                case Stop(number, num_output_tokens):
                    self.stops[number] = num_output_tokens
                case _:
                    pass

    def tokens(self, number: int) -> "StandIns":
        """Return what stands for a request's tokens."""
        return StandIns(number, bytes(self._keys[number]), self._sizes)


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
