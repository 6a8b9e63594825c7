"""What the Rust encoder of outputs needs of vLLM's encoder: the parts that only Python knows.

vLLM's `MsgpackEncoder` (`vllm/v1/serial_utils.py`) also encodes outputs, and both must make the
same bytes. Tests compare many messages, and each engine compares one when it starts.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
)
from vllm.v1.metrics.stats import (
    KV_FETCH_STAGES,
    PrefillStats,
    PrefixCacheStats,
    SchedulerStats,
)
from vllm.v1.serial_utils import MsgpackEncoder

from sparksched import _core


class PartEncoder(MsgpackEncoder):  # type: ignore[misc]
    """Encodes parts of a message that share its out-of-band buffers. Not thread-safe."""

    def encode_part(self, part: Any, frames: list[Any]) -> bytes:
        """Return a part as msgpack; append its large arrays and tensors to the message's frames."""
        self.aux_buffers: list[Any] | None = frames
        try:
            encoded: bytes = self.encoder.encode(part)
            return encoded
        finally:
            self.aux_buffers = None


class _IdOfOutput(msgspec.Struct, array_like=True, gc=False):
    request_id: str


_IDS: Final[dict[str, Any]] = {
    "outputs": list[_IdOfOutput],
    "finished_requests": list[str] | None,
}

_IdsOfOutputs: Final = msgspec.defstruct(
    "_IdsOfOutputs",
    # What is raw is skipped.
    [(name, _IDS.get(name, msgspec.Raw), None) for name in EngineCoreOutputs.__struct_fields__],
    array_like=True,
    gc=False,
)


def request_ids_in(frames: Sequence[Any]) -> set[str]:
    """Return the requests that a message of outputs is about, without decoding the rest of it."""
    outputs: Any = msgspec.msgpack.decode(frames[0], type=_IdsOfOutputs)
    return {output.request_id for output in outputs.outputs}.union(outputs.finished_requests or ())


def difference_from_vllm() -> str | None:
    """Encode one message with both encoders; return in words how they differ, or None."""
    message = _sample_outputs()
    expected = MsgpackEncoder().encode(message)
    outputs, num_native = _core.encode_like_scheduler(message, PartEncoder().encode_part)
    if num_native != len(message.outputs):
        return "it can't represent an output that it should"
    if outputs.frames() != expected:
        return "it makes other bytes of the same message"
    return None


def _sample_outputs() -> EngineCoreOutputs:
    """Return a message with all that the Rust encoder writes by itself."""
    usual = EngineCoreOutput("request-0", [0, 127, 128, 255, 256, 65_535, 65_536, 2**31 - 1])
    first = EngineCoreOutput(
        "request-1",
        [-1],
        events=[
            EngineCoreEvent(event_type, 1.5)
            for event_type in (
                EngineCoreEventType.QUEUED,
                EngineCoreEventType.SCHEDULED,
                EngineCoreEventType.PREEMPTED,
            )
        ],
        prefill_stats=PrefillStats(300, 200, 100, 100, 0, 150),
        num_nans_in_logits=70_000,
    )
    stopped = EngineCoreOutput("3", [7], finish_reason=FinishReason.STOP, stop_reason=7)
    repeated = EngineCoreOutput(
        "4", [], finish_reason=FinishReason.REPETITION, stop_reason="repetition_detected"
    )
    return EngineCoreOutputs(
        engine_index=1,
        outputs=[usual, first, stopped, repeated],
        scheduler_stats=SchedulerStats(
            num_running_reqs=1,
            num_waiting_reqs=2,
            num_skipped_waiting_reqs=3,
            num_kv_fetch_reqs_by_stage=dict.fromkeys(KV_FETCH_STAGES, 0),
            kv_cache_usage=0.25,
            prefix_cache_stats=PrefixCacheStats(True, 1, 2, 3, 4, 5, 6),
        ),
        timestamp=2.5,
        finished_requests={"3"},
        weight_version="default",
    )
