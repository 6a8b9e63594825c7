"""Completes the events of the calls that the engine's loop has noted.

This runs in the writer's thread, once for each call and in their order. It keeps what no single
call tells: numbers of requests, keys of what they have sampled, which outputs never reached them.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from sparksched.record.decisions import Decision
from sparksched.record.events import (
    UNKNOWN,
    Arrive,
    Drafts,
    Event,
    Finish,
    Grow,
    Ready,
    Reset,
    Step,
    Stop,
    Update,
)
from sparksched.record.keys import Chain, KeyMaker

_GROWTH_BYTES: Final = 1 << 14
_MAX_STEPS: Final = 64
"""Steps on their way through the model, at the most."""


class Ends(NamedTuple):
    """What ends a request besides its length. None of it is written."""

    tokens: frozenset[int]
    repetition: tuple[int, int, int] | None
    """Largest and smallest pattern, and how many of them end the request."""
    min_tokens: int
    """Before which a repetition doesn't."""


class _Life:
    """A request, as far as its tokens go."""

    __slots__ = ("chain", "ends", "is_over", "num_prompt_tokens", "number", "tokens")

    def __init__(self, number: int, num_prompt_tokens: int, chain: Chain, ends: Ends) -> None:
        self.number = number
        self.num_prompt_tokens = num_prompt_tokens
        self.chain = chain
        self.ends = ends
        self.tokens: list[int] = []
        """What it has sampled, if repetitions may end it."""
        self.is_over = False


class _Batch:
    """A step that is on its way through the model."""

    __slots__ = ("lives", "lost")

    def __init__(self, lives: list[_Life]) -> None:
        self.lives = lives
        self.lost: set[int] = set()
        """Numbers of requests whose output will be dropped."""


class EventMaker:
    """Completes events and appends them; not thread-safe."""

    def __init__(
        self,
        append: Callable[[Event], None],
        sizes: tuple[int, ...],
        *,
        has_keys: bool,
    ) -> None:
        self._append = append
        self._sizes = sizes
        self._has_keys = has_keys
        self._key_maker = KeyMaker()
        self._lives: dict[str, _Life] = {}
        self._replaced: dict[str, _Life] = {}
        """Requests whose id another one has got before the workers were told of their end."""
        self._num_arrivals = 0
        self._ids: list[str] | None = None
        self._batches: dict[int, _Batch] = {}
        self._last_lives: list[_Life] = []
        self._stops: Counter[int] = Counter()
        """Tokens that end a request, by how many of those that live."""
        self._num_repeating = 0
        self._growth: dict[int, bytearray] = {}
        self._growth_bytes = 0

    # ---- requests ----

    def arrive(
        self, arrival: Arrive, ends: Ends, prompt: list[int], adapter: str, salt: str
    ) -> None:
        """Complete an arrival by its keys."""
        chain = Chain(self._key_maker, self._key_maker.root(adapter, salt), self._sizes)
        life = _Life(self._num_arrivals, arrival.num_prompt_tokens, chain, ends)
        self._num_arrivals += 1
        before = self._lives.get(arrival.request_id)
        if before is not None:
            self._forget(before)
            self._replaced[arrival.request_id] = before
        self._lives[arrival.request_id] = life
        self._stops.update(ends.tokens)
        self._num_repeating += ends.repetition is not None
        if self._has_keys:
            arrival.keys = chain.take(prompt)
        else:
            chain.num_whole_tokens = len(prompt)
        self._append(arrival)

    def ready(self, request_id: str, is_compiled: bool) -> None:
        """Note that a grammar is there, or has failed."""
        life = self._lives.get(request_id)
        if life is not None:
            self._append(Ready(life.number, is_compiled))

    def finish(self, finish: Finish, request_ids: Sequence[str] | None) -> None:
        """Complete an end from outside."""
        ids = list(self._lives) if request_ids is None else request_ids
        for life in self._known(ids):
            life.is_over = True
        finish.numbers = None if request_ids is None else self._numbers(ids)
        self._append(finish)

    def _known(self, request_ids: Iterable[str]) -> list[_Life]:
        return [self._lives[it] for it in request_ids if it in self._lives]

    def _numbers(self, request_ids: Iterable[str]) -> list[int]:
        return [life.number for life in self._known(request_ids)]

    def _forget(self, life: _Life) -> None:
        life.is_over = True
        self._num_repeating -= life.ends.repetition is not None
        for token in life.ends.tokens:
            self._stops[token] -= 1
            if not self._stops[token]:
                del self._stops[token]

    # ---- steps ----

    def step(self, step: Step, decision: Decision) -> None:
        """Complete a step by its decision, with numbers in the place of ids."""
        if decision.ids != self._ids:
            self._ids = decision.ids
            self._last_lives = [self._lives[request_id] for request_id in decision.ids]
            step.numbers = [life.number for life in self._last_lives]
        for request_id in decision.preempted:
            self._lose_what_follows(request_id)
        self._batches[step.sequence] = _Batch(self._last_lives)
        step.num_tokens, step.num_drafts = decision.num_tokens, decision.num_drafts
        step.new = [(self._lives[it].number, computed, ids) for it, computed, ids in decision.new]
        step.new_block_ids = decision.new_block_ids  # type: ignore[assignment]
        step.resumed = self._numbers(decision.resumed)
        step.preempted = self._numbers(decision.preempted)
        step.finished = [self._end(request_id) for request_id in decision.finished]
        step.checksum = decision.checksum
        self._append(step)

    def _end(self, request_id: str) -> int:
        """Return the number of a request that has ended, and forget it."""
        life = self._replaced.pop(request_id, None)
        if life is None:
            life = self._lives.pop(request_id)
            self._forget(life)
            self._ids = None
        return life.number

    def _lose_what_follows(self, request_id: str) -> None:
        """Go on dropping a request's outputs, if some are dropped that are still on their way."""
        life = self._lives.get(request_id)
        if life is not None and any(life.number in it.lost for it in self._batches.values()):
            for batch in self._batches.values():
                # The output of a step without it may never come, and would be on its way for long.
                if life in batch.lives:
                    batch.lost.add(life.number)

    def update(self, update: Update, tokens: list[int], rejected: list[str]) -> None:
        """Complete an output by what requests make of it."""
        batch = self._batches.pop(update.sequence, None)
        if batch is not None and tokens:
            self._take_tokens(batch, update.num_sampled, tokens)
        # Outputs of steps before it never come: the engine has dropped them.
        for sequence in [it for it in self._batches if it < update.sequence - _MAX_STEPS]:
            del self._batches[sequence]
        update.rejected = self._numbers(rejected)
        self._append(update)

    def _take_tokens(self, batch: _Batch, counts: list[int] | None, tokens: list[int]) -> None:
        is_plain = not self._num_repeating and not batch.lost
        if counts is None and is_plain and self._stops.keys().isdisjoint(tokens):
            for life, token in zip(batch.lives, tokens, strict=True):
                chain = life.chain
                chain.tail.append(token)
                if len(chain.tail) >= chain.size:
                    self._grow(life)
            return
        begin = 0
        for life, count in zip(batch.lives, counts or [1] * len(batch.lives), strict=True):
            row = tokens[begin : begin + count]
            begin += count
            if not life.is_over and life.number not in batch.lost:
                self._take_row(life, row)

    def _take_row(self, life: _Life, row: list[int]) -> None:
        for token in row:
            life.chain.tail.append(token)
            self._grow(life)
            if token in life.ends.tokens or self._is_repeated(life, token):
                life.is_over = True
                num_output_tokens = life.chain.num_tokens - life.num_prompt_tokens
                self._append(Stop(life.number, num_output_tokens))
                return

    def _is_repeated(self, life: _Life, token: int) -> bool:
        if life.ends.repetition is None:
            return False
        from vllm.sampling_params import RepetitionDetectionParams
        from vllm.v1.core.sched.utils import check_sequence_repetition

        life.tokens.append(token)
        largest, smallest, count = life.ends.repetition
        repetition = RepetitionDetectionParams(
            max_pattern_size=largest, min_pattern_size=smallest, min_count=count
        )
        is_long_enough = len(life.tokens) >= life.ends.min_tokens
        return is_long_enough and bool(check_sequence_repetition(life.tokens, repetition))

    def _grow(self, life: _Life) -> None:
        if not self._has_keys:
            life.chain.num_whole_tokens += len(life.chain.tail)
            life.chain.tail.clear()
            return
        keys = life.chain.close_segments()
        if keys:
            self._growth.setdefault(life.number, bytearray()).extend(keys)
            self._growth_bytes += len(keys)
            if self._growth_bytes >= _GROWTH_BYTES:
                self.write_growth()

    def write_growth(self) -> None:
        """Write the keys that have come up since the last time."""
        if self._growth:
            self._append(Grow([(number, bytes(keys)) for number, keys in self._growth.items()]))
            self._growth = {}
            self._growth_bytes = 0

    # ---- the rest ----

    def drafts(self, drafts: Drafts, request_ids: list[str], valid: list[tuple[str, int]]) -> None:
        """Complete draft tokens by numbers."""
        numbers = {it: self._lives[it].number for it in request_ids if it in self._lives}
        drafts.numbers = [numbers.get(it, UNKNOWN) for it in request_ids]
        drafts.num_valid = [(numbers[it], count) for it, count in valid if it in numbers]
        self._append(drafts)

    def reset(self, reset: Reset, running: list[str]) -> None:
        """Note a reset, after which outputs of requests that ran are dropped."""
        if reset.reset_running_requests:
            numbers = set(self._numbers(running))
            for batch in self._batches.values():
                batch.lost |= numbers.intersection(life.number for life in batch.lives)
        self._append(reset)
