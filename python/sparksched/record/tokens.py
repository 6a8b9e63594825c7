"""What a trace has of the tokens that went by: keys, and where one of them ended a request.

This runs in the writer's thread, once for each call of the scheduler and in their order. No single
call tells which of the sampled tokens reach a request: those of steps that were on their way when
it ended or was reset don't.
"""

import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from sparksched.record.events import Arrive, Event, Finish, Reset, Settings, Step, Update
from sparksched.record.keys import Chain, segment_sizes

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

_MAX_STEPS: Final = 64
"""Steps on their way through the model, at the most."""


class _Life:
    """A request, as far as its tokens go."""

    __slots__ = ("chain", "is_over", "params", "stops", "tokens")

    def __init__(self, params: "SamplingParams | None", chain: Chain) -> None:
        self.chain = chain
        self.params = params
        tokens = set() if params is None else {*(params.stop_token_ids or ()), params.eos_token_id}
        self.stops = tokens - {None}
        self.tokens: list[int] = []
        """What it has sampled, if repetitions may end it."""
        self.is_over = False

    @property
    def may_repeat(self) -> bool:
        return self.params is not None and self.params.repetition_detection is not None

    def ends_with(self, token: int) -> bool:
        """Whether a token that was sampled ends it, besides by its length."""
        if token in self.stops:
            return True
        if not self.may_repeat:
            return False
        from vllm.v1.core.sched.utils import check_sequence_repetition

        assert self.params is not None
        self.tokens.append(token)
        is_long_enough = len(self.tokens) >= self.params.min_tokens
        repetition = self.params.repetition_detection
        return is_long_enough and bool(check_sequence_repetition(self.tokens, repetition))


@dataclass(slots=True)
class _Batch:
    """A step that is on its way through the model."""

    lives: list[_Life]
    lost: set[_Life] = field(default_factory=set)
    """Requests whose output will be dropped."""


class Tokens:
    """Completes events by what stands for tokens, and appends them; not thread-safe."""

    def __init__(self, append: Callable[[Event], None], settings: Settings) -> None:
        self._append = append
        self._sizes = segment_sizes(settings)
        self._has_keys = settings.config.enable_prefix_caching
        self._secret = secrets.token_bytes(32)
        self._lives: dict[str, _Life] = {}
        self._replaced: set[str] = set()
        """Ids that another request has got before the workers were told of the end of the first."""
        self._batches: dict[int, _Batch] = {}
        self._last_ids: list[str] = []
        self._last_lives: list[_Life] | None = None
        self._stops: Counter[int] = Counter()
        """Tokens that end a request, by how many of those that live."""
        self._num_repeating = 0

    # ---- requests ----

    def arrive(
        self, arrival: Arrive, params: "SamplingParams | None", prompt: list[int], root: str
    ) -> None:
        """Complete an arrival by its keys."""
        request_id = arrival.request_id
        if request_id in self._lives:
            self._forget(request_id)
            self._replaced.add(request_id)
        life = _Life(params, Chain(self._secret, root, self._sizes))
        self._lives[request_id] = life
        self._stops.update(life.stops)
        self._num_repeating += life.may_repeat
        if self._has_keys:
            life.chain.tail += prompt
            arrival.keys = life.chain.close_segments()
        self._append(arrival)

    def finish(self, finish: Finish) -> None:
        """Note an end from outside."""
        for request_id in self._lives if finish.ids is None else finish.ids:
            if request_id in self._lives:
                self._lives[request_id].is_over = True
        self._append(finish)

    def _forget(self, request_id: str) -> None:
        life = self._lives.pop(request_id)
        life.is_over = True
        self._last_lives = None
        self._num_repeating -= life.may_repeat
        self._stops -= Counter(life.stops)

    # ---- steps ----

    def step(self, step: Step) -> None:
        """Note who waits for the output of a step, and who ended before it."""
        if step.ids is not None:
            self._last_ids, self._last_lives = step.ids, None
        if self._last_lives is None:
            self._last_lives = [self._lives[request_id] for request_id in self._last_ids]
        for request_id in step.preempted:
            self._lose_what_follows(request_id)
        self._batches[step.sequence] = _Batch(self._last_lives)
        for request_id in step.finished:
            if request_id in self._replaced:
                self._replaced.remove(request_id)
            else:
                self._forget(request_id)
        self._append(step)

    def reset(self, reset: Reset, running: list[str]) -> None:
        """Note a reset, after which outputs of requests that ran are dropped."""
        self._lose(running)
        self._append(reset)

    def _lose(self, request_ids: list[str]) -> None:
        lives = {self._lives[it] for it in request_ids if it in self._lives}
        for batch in self._batches.values():
            batch.lost |= lives.intersection(batch.lives)

    def _lose_what_follows(self, request_id: str) -> None:
        """Go on dropping a request's outputs, if some are dropped that are still on their way.

        The output of a step without it may never come, and would be on its way for long.
        """
        life = self._lives.get(request_id)
        if any(life in batch.lost for batch in self._batches.values()):
            self._lose([request_id])

    def update(self, update: Update, tokens: list[int]) -> None:
        """Complete an output by the requests that it ends."""
        batch = self._batches.pop(update.sequence, None)
        if batch is not None and tokens:
            self._take_tokens(batch, update, tokens)
        # Outputs of steps before it never come: the engine has dropped them.
        for sequence in [it for it in self._batches if it < update.sequence - _MAX_STEPS]:
            del self._batches[sequence]
        self._append(update)

    def _take_tokens(self, batch: _Batch, update: Update, tokens: list[int]) -> None:
        update.keys, update.stops = {}, {}
        counts = update.num_sampled
        is_plain = not self._num_repeating and not batch.lost
        if counts is None and is_plain and self._stops.keys().isdisjoint(tokens):
            for row, (life, token) in enumerate(zip(batch.lives, tokens, strict=True)):
                chain = life.chain
                chain.tail.append(token)
                if len(chain.tail) >= chain.size:
                    self._close_segments(life, row, update)
            return
        begin = 0
        counts = counts or [1] * len(batch.lives)
        for row, (life, count) in enumerate(zip(batch.lives, counts, strict=True)):
            sampled = tokens[begin : begin + count]
            begin += count
            if life.is_over or life in batch.lost:
                continue
            stop = next((at for at, token in enumerate(sampled) if life.ends_with(token)), None)
            if stop is not None:
                life.is_over = True
                update.stops[row] = stop
                sampled = sampled[: stop + 1]
            life.chain.tail += sampled
            self._close_segments(life, row, update)

    def _close_segments(self, life: _Life, row: int, update: Update) -> None:
        if not self._has_keys:
            life.chain.tail.clear()
        elif keys := life.chain.close_segments():
            update.keys[row] = keys
