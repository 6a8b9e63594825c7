"""The Rust encoder of outputs makes the bytes that vLLM's own makes of the same content."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from scale import FULL
from sparksched import _core
from sparksched.engine.encoder import PartEncoder, request_ids_in
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
)
from vllm.v1.metrics.stats import (
    KV_FETCH_STAGES,
    CUDAGraphStat,
    PrefillStats,
    PrefixCacheStats,
    SchedulerStats,
)
from vllm.v1.outputs import LogprobsLists, LogprobsTensors
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

pytestmark = pytest.mark.release

NUM_MESSAGES = 100_000 if FULL else 20_000
INT32_MAX = 2**31 - 1

# At each of these the form of an integer, a string or an array changes.
EDGES = (0, 1, 15, 16, 31, 32, 127, 128, 255, 256, 65_535, 65_536)


class RandomOutputs:
    """Draws messages: what the scheduler writes itself, and what it leaves to vLLM's encoder."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.num_native = 0

    def message(self) -> EngineCoreOutputs:
        """Draw a message."""
        rng = self._rng
        self.num_native = 0
        return EngineCoreOutputs(
            engine_index=rng.choice((0, 0, 1, 127, 128, 70_000)),
            outputs=[self._output() for _ in range(rng.choice((0, 1, 1, 2, 3, 5)))],
            scheduler_stats=self._stats() if rng.random() < 0.5 else None,
            timestamp=rng.choice((0.5, rng.random() * 1e6, 1e300)),
            finished_requests=rng.choice((None, None, {self._text()})),
            weight_version=rng.choice((None, "default", self._text())),
        )

    def _output(self) -> EngineCoreOutput:
        rng = self._rng
        output = EngineCoreOutput(self._text(), self._token_ids())
        if rng.random() < 0.3:
            output.events = [self._event() for _ in range(rng.choice((1, 2, 3, 17)))]
        if rng.random() < 0.2:
            output.prefill_stats = self._prefill_stats()
        if rng.random() < 0.3:
            output.finish_reason = rng.choice(list(FinishReason))
            output.stop_reason = rng.choice(
                (None, self._int32(), -self._int32(), "repetition_detected")
            )
        if rng.random() < 0.1:
            output.num_nans_in_logits = rng.choice((1, self._int32()))
        if rng.random() < 0.8:
            self.num_native += 1
        else:
            name, value = rng.choice(self._foreign_fields())
            setattr(output, name, value)
        return output

    def _foreign_fields(self) -> list[tuple[str, Any]]:
        rng = self._rng
        shape = (rng.choice((1, 2, 40)), rng.choice((1, 5)))
        ids, ranks = np.arange(shape[0] * shape[1]).reshape(shape), np.arange(shape[0])
        floats = ids.astype(np.float32)
        tensor = torch.from_numpy(floats)
        return [
            ("new_logprobs", LogprobsLists(ids, floats, ranks)),
            (
                "new_prompt_logprobs_tensors",
                LogprobsTensors(torch.from_numpy(ids), tensor, torch.from_numpy(ranks)),
            ),
            ("trace_headers", {self._text(): self._text()}),
            ("prompt_token_id_logprobs", tensor),
            ("routed_experts", ids),
            ("stop_reason", "a string that ends a text"),
            ("kv_transfer_params", {"remote": [1, None, {"port": 5600}]}),
            ("mm_cache_miss_hashes", [self._text()]),
            ("prefill_stats", PrefillStats(100, 50, 50, 25, 25, 0)),
        ]

    def _text(self) -> str:
        rng = self._rng
        length = rng.choice(EDGES[:10] if rng.random() < 0.1 else (0, 10, 40))
        return "".join(rng.choices("a0-é漢😀", k=length))

    def _token_ids(self) -> list[int]:
        rng = self._rng
        length = rng.choice((0, 1, 1, 1, 2, 15, 16, 70_000 if rng.random() < 0.001 else 3))
        return [rng.choice((self._int32(), -self._int32())) for _ in range(length)]

    def _int32(self) -> int:
        rng = self._rng
        return rng.choice((*EDGES, INT32_MAX, rng.randrange(INT32_MAX)))

    def _event(self) -> EngineCoreEvent:
        event_type = self._rng.choice(list(EngineCoreEventType))
        return EngineCoreEvent(event_type, self._rng.random() * 1e5)

    def _prefill_stats(self) -> PrefillStats:
        num_prompt_tokens = self._int32()
        num_cached = self._rng.randrange(num_prompt_tokens + 1)
        return PrefillStats(
            num_prompt_tokens,
            num_prompt_tokens - num_cached,
            num_cached,
            num_cached,
            0,
            self._int32(),
        )

    def _stats(self) -> SchedulerStats:
        rng = self._rng
        cache = PrefixCacheStats(rng.random() < 0.5, *(self._count() for _ in range(6)))
        stats = SchedulerStats(
            num_running_reqs=self._count(),
            num_waiting_reqs=self._count(),
            num_skipped_waiting_reqs=self._count(),
            num_kv_fetch_reqs_by_stage=dict.fromkeys(KV_FETCH_STAGES, 0),
            kv_cache_usage=rng.random(),
            prefix_cache_stats=cache,
        )
        if rng.random() < 0.2:
            stats.cudagraph_stats = CUDAGraphStat(1, 2, 3, "FULL")
        return stats

    def _count(self) -> int:
        return self._rng.choice((*EDGES, 2**32, 2**53))


def frames_of(outputs: EngineCoreOutputs) -> tuple[list[bytes], int]:
    """Return the frames that the Rust encoder makes, and for how many outputs it was alone."""
    step, num_native = _core.encode_like_scheduler(outputs, PartEncoder().encode_part)
    return [bytes(frame) for frame in step.frames()], num_native


def vllm_frames_of(outputs: EngineCoreOutputs) -> list[bytes]:
    return [bytes(frame) for frame in MsgpackEncoder().encode(outputs)]


def as_objects(outputs: _core.StepOutputs) -> EngineCoreOutputs:
    """Return what a client that gets this message will have."""
    return MsgpackDecoder(EngineCoreOutputs).decode(outputs.frames())


def test_random_messages_are_written_as_vllm_writes_them() -> None:
    random_outputs = RandomOutputs(seed=0)
    num_native = num_frames = 0
    for number in range(NUM_MESSAGES):
        message = random_outputs.message()
        expected = vllm_frames_of(message)
        frames, native = frames_of(message)
        assert frames == expected, number
        assert native >= random_outputs.num_native, number
        num_native += native
        num_frames += len(frames) - 1
    assert num_native > NUM_MESSAGES
    assert num_frames > NUM_MESSAGES / 100, "out-of-band buffers"


def test_the_requests_of_a_message_are_found_without_decoding_it() -> None:
    random_outputs = RandomOutputs(seed=2)
    for _ in range(500):
        message = random_outputs.message()
        expected = {output.request_id for output in message.outputs}
        expected |= message.finished_requests or set()
        assert request_ids_in(vllm_frames_of(message)) == expected


def test_fields_may_change_until_a_message_is_sent() -> None:
    step, _ = _core.encode_like_scheduler(
        EngineCoreOutputs(outputs=[EngineCoreOutput("a", [1])], timestamp=1.0),
        PartEncoder().encode_part,
    )
    step.frames()
    step.engine_index = 300
    step.weight_version = "2"
    step.finished_requests = {"a"}
    step.scheduler_stats = SchedulerStats(num_running_reqs=5)
    decoded = as_objects(step)
    assert decoded.engine_index == 300
    assert decoded.weight_version == "2"
    assert decoded.finished_requests == {"a"}
    assert decoded.scheduler_stats == SchedulerStats(num_running_reqs=5)
    assert decoded.outputs == [EngineCoreOutput("a", [1])]


def test_statistics_that_somebody_has_looked_at_can_be_changed() -> None:
    stats = SchedulerStats(
        num_running_reqs=3, num_kv_fetch_reqs_by_stage=dict.fromkeys(KV_FETCH_STAGES, 0)
    )
    message = EngineCoreOutputs(scheduler_stats=stats, timestamp=1.0)
    step, _ = _core.encode_like_scheduler(message, PartEncoder().encode_part)
    assert step.scheduler_stats == stats
    assert step.scheduler_stats is not stats, "it was kept as numbers"
    step.scheduler_stats.num_running_reqs = 4
    assert as_objects(step).scheduler_stats.num_running_reqs == 4
