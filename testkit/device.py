"""A device on a CPU that can't lie: whatever it samples, it reads from the KV cache.

Each slot holds a hash of the token that it was computed from, of its KV cache group and of the
slot before it. A step writes the slots of its tokens. Then it reads those of all earlier ones
through the request's block tables, as attention does, and fails if one doesn't hold what it
should: if a block is another's, is given away too early or found by a wrong hash, or if a token
was left out. A sampled token depends on the last slot: one that is wrong, doubled or lost changes
all behind it.
"""

import itertools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import LogprobsLists, LogprobsTensors, ModelRunnerOutput

EOS_TOKEN_ID: Final = 256  # after the 256 single bytes
VOCAB_SIZE: Final = EOS_TOKEN_ID + 1
ANYTHING: Final = 0  # a token that no grammar of the tests allows
NUM_TOKENS_TO_EOS: Final = 24  # one sampled token in so many ends its request

POISON: Final = 250
"""As the first token of a prompt: the device forgets the request in its second output."""

UNRULY: Final = 251
"""As the first token of a prompt: the device overlooks what the grammar allows, once."""

_NULL_BLOCK: Final = 0

_SAMPLING: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "logit_bias",
    "_bad_words_token_ids",
)
"""Parameters that change what is sampled."""


class WrongSlotError(RuntimeError):
    """The KV cache, or the encoder's, doesn't hold what a step needs."""


def continuation(prompt: Iterable[int]) -> Iterator[int]:
    """Yield what is sampled behind a prompt with sampling parameters that say nothing of it."""
    slot = 0
    for token in prompt:
        slot = _next_slot(slot, token)
    while True:
        token = _token_of(slot, allowed=None)
        yield token
        slot = _next_slot(slot, token)


def _next_slot(slot: int, token: int) -> int:
    return zlib.crc32(b"%d/" % token, slot)


def _token_of(slot: int, allowed: Sequence[int] | None) -> int:
    number = zlib.crc32(b"sampled", slot)
    if allowed is not None:
        return allowed[number % len(allowed)]
    return EOS_TOKEN_ID if number % NUM_TOKENS_TO_EOS == 0 else number % EOS_TOKEN_ID


def ends_of_computed_tokens(step: SchedulerOutput) -> dict[str, int]:
    """Return for each request how many of its tokens are computed after the step."""
    cached = step.scheduled_cached_reqs
    starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    starts |= {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
    return {
        request_id: starts[request_id] + num_tokens
        for request_id, num_tokens in step.num_scheduled_tokens.items()
    }


class _Sequence:
    """What a model runner keeps of a request."""

    def __init__(self, new: NewRequestData) -> None:
        # A prompt of vectors counts as one of zeros: what is sampled behind it is beside the point.
        self.prompt = list(new.prompt_token_ids or [0] * new.prompt_len)
        # Model Runner V2 gets a resumed request as a new one, with what it had been given.
        self.sampled = list((new.prefill_token_ids or self.prompt)[len(self.prompt) :])
        self.params = new.sampling_params or SamplingParams()
        self.salt = _salt_of(self.params)
        self.owes_prompt_logprobs = self.params.prompt_logprobs is not None
        self.set_tables(new.block_ids)
        lora = new.lora_request
        self._first = 0 if lora is None else zlib.crc32(lora.lora_name.encode())
        self.features = new.mm_features
        self._images = {
            feature.mm_position.offset + at: zlib.crc32(f"{feature.identifier}/{at}".encode())
            for feature in new.mm_features
            for at in range(feature.mm_position.length)
        }
        self._slots = np.zeros(0, np.uint32)
        self._num_slots = 0

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.sampled

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.sampled)

    def set_tables(self, block_ids: Sequence[Sequence[int]]) -> None:
        self.tables = [np.array(ids, np.int64) for ids in block_ids]

    def extend_tables(self, block_ids: Sequence[Sequence[int]]) -> None:
        pairs = zip(self.tables, block_ids, strict=True)
        self.tables = [np.append(table, np.array(ids, np.int64)) for table, ids in pairs]

    def forget_sampled(self, num_kept: int) -> None:
        del self.sampled[num_kept:]
        self._num_slots = min(self._num_slots, self.num_tokens)

    def slots(self, end: int) -> np.ndarray:
        """Return what the slots of the first tokens are to hold, whoever has computed them."""
        if end > self.num_tokens:
            raise WrongSlotError("the scheduler counts on a token that was not sampled")
        if end > len(self._slots):
            self._slots = np.resize(self._slots, max(64, 2 * end))
        start = self._num_slots
        if start < end:
            slot = int(self._slots[start - 1]) if start else self._first
            split = len(self.prompt)
            new = self.prompt[start:end] + self.sampled[max(0, start - split) : max(0, end - split)]
            for position, token in enumerate(new, start):
                slot = _next_slot(slot, self._images.get(position, token))
                self._slots[position] = slot
            self._num_slots = end
        return self._slots[:end]


def _salt_of(params: SamplingParams) -> int:
    """Return what changes each sampled token; 0 for parameters that say nothing of it."""
    told, usual = map(_sampling_of, (params, SamplingParams()))
    return 0 if told == usual else zlib.crc32(repr(told).encode())


def _sampling_of(params: SamplingParams) -> list[Any]:
    # vLLM's Rust front end has numbers in single precision, and biases in whatever order.
    values = [getattr(params, name) for name in _SAMPLING]
    values = [sorted(it.items()) if isinstance(it, dict) else it for it in values]
    return [round(it, 5) if isinstance(it, float) else it for it in values]


class Device:
    """The blocks of a KV cache, and the model that computes them.

    Block ids are those of all groups together: each block belongs to one of them at a time.
    """

    def __init__(self, config: KVCacheConfig) -> None:
        specs = [group.kv_cache_spec for group in config.kv_cache_groups]
        self._block_sizes: list[int] = [spec.block_size for spec in specs]
        self._windows: list[int | None] = [getattr(it, "sliding_window", None) for it in specs]
        self._marks = [np.uint32(zlib.crc32(b"group %d" % index)) for index in range(len(specs))]
        self._blocks = np.zeros((config.num_blocks, max(self._block_sizes)), np.uint32)
        self._sequences: dict[str, _Sequence] = {}
        self._encoded: set[str] = set()

    @property
    def num_sequences(self) -> int:
        """Requests that it knows of."""
        return len(self._sequences)

    def tokens_of(self, request_id: str) -> list[int]:
        """Return a request's prompt and what has been sampled behind it."""
        return self._sequences[request_id].tokens

    def execute(self, step: SchedulerOutput) -> None:
        """Take notice of requests that ended, came or came back, and compute the step's tokens.

        Raises:
            WrongSlotError: if a cache doesn't hold what it should.

        """
        for request_id in step.finished_req_ids:
            self._sequences.pop(request_id, None)
        for new in step.scheduled_new_reqs:
            self._sequences[new.req_id] = _Sequence(new)
        self._update_cached(step)
        self._encode(step)
        if step.new_block_ids_to_zero:
            self._blocks[step.new_block_ids_to_zero] = 0
        for copy in step.kv_cache_block_copies or ():
            self._blocks[copy.dst_block_id] = self._blocks[copy.src_block_id]
        spans = [
            (request_id, end - step.num_scheduled_tokens[request_id], end)
            for request_id, end in ends_of_computed_tokens(step).items()
            if not self._is_forgotten(request_id)
        ]
        # All write before one reads: they do so at the same time.
        for span in spans:
            self._write(*span)
        for span in spans:
            self._read(*span)

    def _update_cached(self, step: SchedulerOutput) -> None:
        cached = step.scheduled_cached_reqs
        for request_id, block_ids, num_output_tokens in zip(
            cached.req_ids, cached.new_block_ids, cached.num_output_tokens, strict=True
        ):
            sequence = self._sequences[request_id]
            if request_id in cached.resumed_req_ids:
                sequence.forget_sampled(num_output_tokens)
                sequence.set_tables(block_ids or [[] for _ in self._block_sizes])
            elif block_ids is not None:
                sequence.extend_tables(block_ids)

    def _encode(self, step: SchedulerOutput) -> None:
        """Keep in mind which images the encoder's cache holds; their values are in `_images`."""
        self._encoded.difference_update(step.free_encoder_mm_hashes)
        # Not looked at: whether an image has data. What a prefix hit covers comes without any, and
        # is encoded all the same if its request is preempted and the hit is gone by then.
        for request_id, indices in step.scheduled_encoder_inputs.items():
            features = self._sequences[request_id].features
            self._encoded.update(features[index].identifier for index in indices)

    def _write(self, request_id: str, start: int, end: int) -> None:
        sequence = self._sequences[request_id]
        for feature in sequence.features:
            offset, length = feature.mm_position.offset, feature.mm_position.length
            is_needed = offset < end and start < offset + length
            if is_needed and feature.identifier not in self._encoded:
                raise WrongSlotError(
                    f"{request_id}: the image at {offset} is not encoded for {start} to {end}"
                )
        slots = sequence.slots(end)[start:]
        positions = np.arange(start, end)
        for group, block_size in enumerate(self._block_sizes):
            blocks = self._blocks_of(request_id, group, start, end)[positions // block_size]
            self._blocks[blocks, positions % block_size] = slots ^ self._marks[group]

    def _read(self, request_id: str, start: int, end: int) -> None:
        slots = self._sequences[request_id].slots(end)
        for group, block_size in enumerate(self._block_sizes):
            window = self._windows[group]
            first = 0 if window is None else max(0, start - window + 1)
            table = self._blocks_of(request_id, group, first, end)
            first_block = first // block_size
            blocks = table[first_block : -(-end // block_size)]
            found = self._blocks[blocks, :block_size].reshape(-1) ^ self._marks[group]
            offset = first_block * block_size
            is_wrong = found[first - offset : end - offset] != slots[first:]
            if is_wrong.any():
                position = first + int(is_wrong.argmax())
                raise WrongSlotError(
                    f"{request_id}: block {table[position // block_size]} of group {group} "
                    f"doesn't hold token {position} of {end}"
                )

    def _blocks_of(self, request_id: str, group: int, first: int, end: int) -> np.ndarray:
        """Return a block table, in which these tokens have blocks."""
        block_size = self._block_sizes[group]
        table = self._sequences[request_id].tables[group]
        needed = table[first // block_size : -(-end // block_size)]
        if len(table) * block_size < end or (needed == _NULL_BLOCK).any():
            raise WrongSlotError(
                f"{request_id}: of tokens {first} to {end}, some have no block in group {group}"
            )
        return table

    # ---- samples ----

    def sample(self, step: SchedulerOutput, allowed: dict[str, list[int]]) -> ModelRunnerOutput:
        """Return one token for each request whose known tokens are all computed by this step."""
        request_ids = [it for it in step.num_scheduled_tokens if not self._is_forgotten(it)]
        ends = ends_of_computed_tokens(step)
        sampled = [self._sample_one(it, ends[it], allowed.get(it)) for it in request_ids]
        return ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: row for row, request_id in enumerate(request_ids)},
            sampled_token_ids=sampled,
            logprobs=self._logprobs(request_ids, sampled),
            prompt_logprobs_dict={
                it: prompt_logprobs for it in request_ids if (prompt_logprobs := self._owed(it))
            },
        )

    def _is_forgotten(self, request_id: str) -> bool:
        sequence = self._sequences[request_id]
        return sequence.prompt[0] == POISON and bool(sequence.sampled)

    def _sample_one(self, request_id: str, end: int, allowed: list[int] | None) -> list[int]:
        sequence = self._sequences[request_id]
        if end < sequence.num_tokens:
            return []
        block_size = self._block_sizes[-1]
        block = sequence.tables[-1][(end - 1) // block_size]
        slot = int(self._blocks[block, (end - 1) % block_size] ^ self._marks[-1])
        if allowed is None:
            allowed = sequence.params.allowed_token_ids
        is_overlooked = sequence.prompt[0] == UNRULY and len(sequence.sampled) == 2
        token = ANYTHING if is_overlooked else _token_of(slot ^ sequence.salt, allowed)
        sequence.sampled.append(token)
        return [token]

    def _logprobs(self, request_ids: list[str], sampled: list[list[int]]) -> LogprobsLists | None:
        wanted = [self._sequences[it].params.logprobs for it in request_ids]
        if all(it is None for it in wanted):
            return None
        count = max(it or 0 for it in wanted)
        rows = [_scores(tokens[0] if tokens else 0, count) for tokens in sampled]
        token_ids = np.array([token_ids for token_ids, _ in rows], np.int32)
        logprobs = np.array([logprobs for _, logprobs in rows], np.float32)
        return LogprobsLists(token_ids, logprobs, np.ones(len(rows), np.int32))

    def _owed(self, request_id: str) -> LogprobsTensors | None:
        sequence = self._sequences[request_id]
        if not (sequence.owes_prompt_logprobs and sequence.sampled):
            return None
        sequence.owes_prompt_logprobs = False
        count = sequence.params.prompt_logprobs or 0
        rows = [_scores(token, count) for token in itertools.islice(sequence.prompt, 1, None)]
        shape = (len(rows), count + 1)
        return LogprobsTensors(
            torch.tensor([token_ids for token_ids, _ in rows], dtype=torch.int64).reshape(shape),
            torch.tensor([logprobs for _, logprobs in rows]).reshape(shape),
            torch.ones(len(rows), dtype=torch.int64),
        )


def _scores(token: int, count: int) -> tuple[list[int], list[float]]:
    """Return a token and others, with what may be their logarithmic probabilities."""
    token_ids = [(token + at) % VOCAB_SIZE for at in range(count + 1)]
    return token_ids, [-(1 + at + token / VOCAB_SIZE) for at in range(count + 1)]
