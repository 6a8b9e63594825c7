"""What must hold from event to event, so that nothing behind the reader has to ask."""

import math
from collections.abc import Sequence
from typing import Final

from sparksched.trace.events import (
    KEY_BYTES,
    UNKNOWN,
    Arrive,
    Begin,
    Drafts,
    End,
    Event,
    Finish,
    Grow,
    Pause,
    Ready,
    Settings,
    Step,
    Stop,
    TraceError,
    Update,
)
from sparksched.trace.settings import GROUP_KINDS, SCHEDULER_SETTINGS
from sparksched.trace.tokens import segment_sizes

MAX_BLOCKS: Final = 1 << 24
MAX_TOKENS: Final = 1 << 24
"""Of a request, and of a step."""
MAX_ID_LENGTH: Final = 1 << 16

_INT32: Final = 1 << 31
_INT63: Final = 1 << 63
_MAX_ROW: Final = 1 << 10
_MAX_STEPS_IN_FLIGHT: Final = 1 << 12
_MAX_GROUPS: Final = 64
_MAX_TIME: Final = 1e12
_FINISHED: Final = (
    "FINISHED_STOPPED",
    "FINISHED_LENGTH_CAPPED",
    "FINISHED_ABORTED",
    "FINISHED_IGNORED",
    "FINISHED_ERROR",
    "FINISHED_REPETITION",
)


class EventChecker:
    """Checks events one after the other. What it raises says what is wrong, not where."""

    def __init__(self, settings: Settings) -> None:
        _check_settings(settings)
        self._settings = settings
        self._sizes = segment_sizes(settings.hash_block_size, settings.num_hash_lookahead_tokens)
        self._num_arrivals = 0
        self._num_steps = 0
        self._num_rows = 0
        self._rows_in_flight: dict[int, int] = {}
        self._has_begun = False
        self.has_ended = False

    def check(self, event: Event) -> None:
        """Take in the next event.

        Raises:
            TraceError: if it can't follow what was there before.

        """
        _expect(not self.has_ended, "goes on behind the end")
        _expect(isinstance(event, Begin) != self._has_begun, "begins once more")
        _expect(_is_time(getattr(event, "time", 0.0)), "happens at no time")
        _expect(_is_time(getattr(event, "duration_us", 0.0)), "takes no time that there is")
        match event:
            case Begin():
                self._has_begun = True
            case Arrive():
                self._check_arrival(event)
            case Step():
                self._check_step(event)
            case Update():
                self._check_update(event)
            case Drafts():
                self._check_drafts(event)
            case Finish(_, numbers, status):
                self._check_numbers(numbers or ())
                _expect(status in _FINISHED, "ends requests by an unknown status")
            case Pause(_, state):
                _expect(0 <= state <= 2, "has an unknown pause")
            case Grow(grown):
                self._check_numbers([number for number, _ in grown])
                _expect(all(len(keys) % KEY_BYTES == 0 for _, keys in grown), "has half a key")
            case Ready(number, _):
                self._check_numbers((number,))
            case Stop(number, num_output_tokens):
                self._check_numbers((number,))
                _expect(0 < num_output_tokens <= MAX_TOKENS, "stops at an impossible token")
            case End():
                self.has_ended = True
            case _:
                pass

    def _check_numbers(self, numbers: Sequence[int]) -> None:
        _expect(
            all(0 <= number < self._num_arrivals for number in numbers),
            "names a request that has not arrived",
        )

    def _check_arrival(self, event: Arrive) -> None:
        self._num_arrivals += 1
        limit = self._settings.max_model_len
        _expect(0 < event.num_prompt_tokens <= limit, "has a prompt of impossible length")
        _expect(0 < len(event.request_id) <= MAX_ID_LENGTH, "has a request with an impossible id")
        _expect(math.isfinite(event.arrival_time), "has an arrival at no time")
        _expect(
            1 <= event.max_tokens < _INT32 and 0 <= event.min_tokens <= event.max_tokens,
            "has an output of impossible length",
        )
        _expect(
            0 <= event.client_index < _INT32
            and abs(event.priority) < _INT32
            and 0 <= event.lora_id < _INT63,
            "has a request with an impossible number",
        )
        if self._settings.has_tokens:
            _expect(
                event.prompt is not None and len(event.prompt) == event.num_prompt_tokens,
                "has a prompt without its tokens",
            )
            _check_tokens(event.prompt or ())
            _check_tokens(event.stop_token_ids)
            _check_tokens(() if event.eos_token_id is None else (event.eos_token_id,))
            _check_repetition(event.repetition)
            return
        num_keys = 0
        if self._settings.enable_prefix_caching:
            num_keys = _num_segments(event.num_prompt_tokens, self._sizes)
        _expect(len(event.keys) == num_keys * KEY_BYTES, "has a prompt with other keys")

    def _check_step(self, event: Step) -> None:
        _expect(event.sequence == self._num_steps, "has steps that don't follow each other")
        self._num_steps += 1
        if event.numbers is not None:
            self._check_numbers(event.numbers)
            self._num_rows = len(event.numbers)
            _expect(len(set(event.numbers)) == self._num_rows, "schedules a request twice")
        _check_row_counts(event.num_tokens, self._num_rows, 1, MAX_TOKENS)
        _check_row_counts(event.num_drafts, self._num_rows, 0, _MAX_ROW)
        self._check_numbers([number for number, _, _ in event.new])
        for numbers in (event.resumed, event.preempted, event.finished):
            self._check_numbers(numbers)
        self._rows_in_flight[event.sequence] = self._num_rows
        if len(self._rows_in_flight) > _MAX_STEPS_IN_FLIGHT:
            del self._rows_in_flight[next(iter(self._rows_in_flight))]

    def _check_update(self, event: Update) -> None:
        num_rows = self._rows_in_flight.pop(event.sequence, None)
        _expect(num_rows is not None, "has the output of no step")
        assert num_rows is not None
        if event.num_sampled:
            _check_row_counts(event.num_sampled, num_rows, 0, _MAX_ROW)
        _check_row_counts(event.num_tokens, num_rows, 0, MAX_TOKENS)
        _check_row_counts(event.num_drafts, num_rows, 0, _MAX_ROW)
        _expect(event.pooled is None or len(event.pooled) == num_rows, "pools other rows")
        self._check_numbers(event.rejected)
        if self._settings.has_tokens:
            num_tokens = num_rows if event.num_sampled is None else sum(event.num_sampled)
            _expect(
                event.tokens is not None and len(event.tokens) == num_tokens,
                "has an output with other tokens",
            )
            _check_tokens(event.tokens or ())

    def _check_drafts(self, event: Drafts) -> None:
        self._check_numbers([number for number in event.numbers if number != UNKNOWN])
        _check_row_counts(event.num_drafts, len(event.numbers), 0, _MAX_ROW)
        _check_row_counts(event.num_padding, len(event.numbers), 0, _MAX_ROW)
        self._check_numbers([number for number, _ in event.num_valid])
        _expect(
            all(0 <= count <= _MAX_ROW for _, count in event.num_valid),
            "has an impossible number of valid drafts",
        )
        if self._settings.has_tokens:
            tokens = event.tokens
            _expect(
                tokens is not None and len(tokens) == sum(event.num_drafts),
                "has other drafts",
            )
            _expect(all(-1 <= it < _INT32 for it in tokens or ()), "has an impossible token")


def _check_settings(settings: Settings) -> None:
    counts = {
        "block size": (settings.block_size, MAX_TOKENS),
        "hash block size": (settings.hash_block_size, MAX_TOKENS),
        "number of blocks": (settings.num_blocks, MAX_BLOCKS),
        "length of requests": (settings.max_model_len, MAX_TOKENS),
        "number of stages": (settings.pipeline_parallel_size, 1 << 10),
        "number of engines": (settings.data_parallel_size, 1 << 16),
    }
    for what, (count, limit) in counts.items():
        _expect(1 <= count <= limit, f"has an impossible {what}")
    _expect(len(settings.groups) <= _MAX_GROUPS, "has too many KV cache groups")
    _expect(0 <= settings.num_hash_lookahead_tokens <= _MAX_ROW, "looks ahead impossibly far")
    _expect(
        set(settings.scheduler_config) == set(SCHEDULER_SETTINGS), "has other scheduler settings"
    )
    for group in settings.groups:
        _expect(group.kind in GROUP_KINDS, "has an unknown kind of KV cache")


def _check_row_counts(counts: Sequence[int] | None, num_rows: int, least: int, most: int) -> None:
    if counts is None:
        return
    _expect(len(counts) == num_rows, "has other rows than its step")
    _expect(all(least <= count <= most for count in counts), "has an impossible count")


def _check_tokens(tokens: Sequence[int]) -> None:
    _expect(all(0 <= token < _INT32 for token in tokens), "has an impossible token")


def _check_repetition(repetition: tuple[int, int, int] | None) -> None:
    if repetition is None:
        return
    largest, smallest, count = repetition
    _expect(
        0 <= smallest <= largest <= MAX_TOKENS and 0 <= count <= MAX_TOKENS,
        "has an impossible repetition",
    )


def _num_segments(num_tokens: int, sizes: tuple[int, ...]) -> int:
    num_blocks, rest = divmod(num_tokens, sum(sizes))
    return num_blocks * len(sizes) + (len(sizes) > 1 and rest >= sizes[0])


def _is_time(value: float) -> bool:
    return 0.0 <= value <= _MAX_TIME


def _expect(condition: bool, problem: str) -> None:
    if not condition:
        raise TraceError(problem)
