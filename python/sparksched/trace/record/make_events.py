"""Makes events of the calls that the engine's loop has noted.

This runs in the writer's thread, once for each call and in their order. It keeps what no single
call tells: numbers of requests, keys of what they have sampled, which outputs never reached them.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from sparksched.trace.events import (
    UNKNOWN,
    Arrive,
    Difference,
    Drafts,
    Event,
    Finish,
    Grow,
    Pause,
    Ready,
    Reset,
    Step,
    Stop,
    Update,
)
from sparksched.trace.tokens import Chain, KeyMaker

_GROWTH_BYTES: Final = 1 << 14
_MAX_STEPS: Final = 64
"""Steps on their way through the model, at the most."""


class _Life:
    """A request, as far as its tokens go."""

    __slots__ = ("chain", "is_over", "num_prompt_tokens", "number", "repetition", "stops", "tokens")

    def __init__(
        self, number: int, num_prompt_tokens: int, chain: Chain, stops: set[int], repetition: Any
    ) -> None:
        self.number = number
        self.num_prompt_tokens = num_prompt_tokens
        self.chain = chain
        self.stops = stops
        self.repetition = repetition
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
    """Appends events; not thread-safe."""

    def __init__(
        self,
        append: Callable[[Event], None],
        sizes: tuple[int, ...],
        *,
        has_keys: bool,
        has_tokens: bool,
    ) -> None:
        self._append = append
        self._sizes = sizes
        self._has_keys = has_keys and not has_tokens
        self._has_tokens = has_tokens
        self._key_maker = KeyMaker()
        self._lives: dict[str, _Life] = {}
        self._replaced: dict[str, _Life] = {}
        """Requests whose id another one has got before the workers were told of their end."""
        self._num_arrivals = 0
        self._ids: list[str] | None = None
        self._batches: dict[int, _Batch] = {}
        self._last_lives: list[_Life] = []
        self._stops: set[int] = set()
        self._num_stops: dict[int, int] = {}
        self._repeats = 0
        self._growth: dict[int, bytearray] = {}
        self._growth_bytes = 0

    # ---- requests ----

    def arrive(self, arrival: Arrive, prompt: list[int], roots: tuple[str, str]) -> None:
        """Complete an arrival by its number and keys. `roots` are its adapter and its salt."""
        number, self._num_arrivals = self._num_arrivals, self._num_arrivals + 1
        chain = Chain(self._key_maker, self._key_maker.root(*roots), self._sizes)
        keys = chain.take(prompt) if self._has_keys else b""
        if not self._has_keys:
            chain.num_whole_tokens = len(prompt)
        stops = {*arrival.stop_token_ids}
        if arrival.eos_token_id is not None:
            stops.add(arrival.eos_token_id)
        repetition = arrival.repetition and (*arrival.repetition, arrival.min_tokens)
        life = _Life(number, len(prompt), chain, stops, repetition)
        before = self._lives.get(arrival.request_id)
        if before is not None:
            self._forget(before)
            self._replaced[arrival.request_id] = before
        self._lives[arrival.request_id] = life
        self._count_stops(life, 1)
        if self._has_tokens:
            salt = self._key_maker.root(roots[1]) if roots[1] else b""
            arrival = msgspec.structs.replace(arrival, prompt=prompt, salt=salt)
        else:
            # What the tokens are called is nobody's business.
            arrival = msgspec.structs.replace(
                arrival, keys=keys, eos_token_id=None, stop_token_ids=[], repetition=None
            )
        self._append(arrival)

    def ready(self, request_id: str, is_compiled: bool) -> None:
        """Note that a grammar is there, or has failed."""
        life = self._lives.get(request_id)
        if life is not None:
            self._append(Ready(life.number, is_compiled))

    def finish(self, time: float, request_ids: Sequence[str] | None, status: str) -> None:
        """Note an end from outside."""
        ids = list(self._lives) if request_ids is None else request_ids
        lives = [self._lives[request_id] for request_id in ids if request_id in self._lives]
        for life in lives:
            life.is_over = True
        numbers = None if request_ids is None else [life.number for life in lives]
        self._append(Finish(time, numbers, status))

    def _forget(self, life: _Life) -> None:
        life.is_over = True
        self._count_stops(life, -1)

    def _count_stops(self, life: _Life, change: int) -> None:
        """Keep what ends any request in one set, which a step's tokens are held against."""
        for token in life.stops:
            count = self._num_stops.get(token, 0) + change
            self._num_stops[token] = count
            if count:
                self._stops.add(token)
            else:
                del self._num_stops[token]
                self._stops.discard(token)
        self._repeats += change * (life.repetition is not None)

    # ---- steps ----

    def step(
        self,
        step: Step,
        ids: list[str],
        new: list[tuple[str, int, Any]],
        told: tuple[list[str], list[str], list[str]],
    ) -> None:
        """Complete a step by numbers. `told` are the resumed, preempted and finished requests."""
        is_same = ids == self._ids
        if not is_same:
            self._ids = ids
            self._last_lives = [self._lives[request_id] for request_id in ids]
        resumed, preempted, finished = told
        for request_id in preempted:
            self._lose_what_follows(request_id)
        self._batches[step.sequence] = _Batch(self._last_lives)
        numbers = None if is_same else [life.number for life in self._last_lives]
        self._append(
            msgspec.structs.replace(
                step,
                numbers=numbers,
                new=[(self._lives[request_id].number, *rest) for request_id, *rest in new],
                resumed=self._numbers(resumed),
                preempted=self._numbers(preempted),
                finished=[self._end(request_id) for request_id in finished],
            )
        )

    def _numbers(self, request_ids: list[str]) -> list[int]:
        return [self._lives[it].number for it in request_ids if it in self._lives]

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
        self._append(
            msgspec.structs.replace(
                update,
                tokens=tokens if self._has_tokens else None,
                rejected=self._numbers(rejected),
            )
        )

    def _take_tokens(self, batch: _Batch, counts: list[int] | None, tokens: list[int]) -> None:
        if self._has_tokens:
            return
        is_plain = not self._repeats and not batch.lost and self._stops.isdisjoint(tokens)
        if counts is None and is_plain:
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
            if row and not life.is_over and life.number not in batch.lost:
                self._take_row(life, row)

    def _take_row(self, life: _Life, row: list[int]) -> None:
        for token in row:
            life.chain.tail.append(token)
            self._grow(life)
            if token in life.stops or self._is_repeated(life, token):
                life.is_over = True
                num_output_tokens = life.chain.num_tokens - life.num_prompt_tokens
                self._append(Stop(life.number, num_output_tokens))
                return

    def _is_repeated(self, life: _Life, token: int) -> bool:
        if life.repetition is None:
            return False
        from vllm.sampling_params import RepetitionDetectionParams
        from vllm.v1.core.sched.utils import check_sequence_repetition

        life.tokens.append(token)
        largest, smallest, count, min_tokens = life.repetition
        if len(life.tokens) < min_tokens:
            return False
        repetition = RepetitionDetectionParams(
            max_pattern_size=largest, min_pattern_size=smallest, min_count=count
        )
        return bool(check_sequence_repetition(life.tokens, repetition))

    def _grow(self, life: _Life) -> None:
        if not self._has_keys:
            life.chain.num_whole_tokens += len(life.chain.tail)
            life.chain.tail.clear()
            return
        keys = life.chain.close_segments()
        if not keys:
            return
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
        self._append(
            msgspec.structs.replace(
                drafts,
                numbers=[numbers.get(it, UNKNOWN) for it in request_ids],
                tokens=drafts.tokens if self._has_tokens else None,
                num_valid=[(numbers[it], count) for it, count in valid if it in numbers],
            )
        )

    def reset(self, time: float, reset_running_requests: bool, running: list[str]) -> None:
        """Note a reset, after which outputs of requests that ran are dropped."""
        if reset_running_requests:
            numbers = set(self._numbers(running))
            for batch in self._batches.values():
                batch.lost |= numbers.intersection(life.number for life in batch.lives)
        self._append(Reset(time, reset_running_requests))

    def pause(self, time: float, state: int) -> None:
        """Note a pause or its end."""
        self._append(Pause(time, state))

    def difference(self, time: float, text: str) -> None:
        """Note what another scheduler would have done."""
        self._append(Difference(time, text))
