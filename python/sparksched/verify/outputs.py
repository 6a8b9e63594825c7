"""A step's outputs for clients: objects, or messages that are ready to be sent."""

from collections.abc import Mapping
from typing import Any, Final

from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from sparksched._core import StepOutputs
from sparksched.verify.compare import Difference, first_difference

IGNORED_FIELDS: Final = frozenset(
    {
        "timestamp",  # of outputs and events: the schedulers run one after the other
        "ts",  # of batches of KV cache events
        "data_parallel_rank",  # the publisher of these fills it in
        "calc_duration",  # how long each took to estimate a step's work, for debugging
        "kv_cache_eviction_events",  # of a random sample of blocks, which each scheduler draws
    }
)
"""What may differ between two schedulers in one process."""


def difference_of_outputs(
    reference: Mapping[int, EngineCoreOutputs],
    candidate: Mapping[int, EngineCoreOutputs | StepOutputs],
    path: str,
) -> Difference | None:
    """Compare what the clients are told: messages by what a client would read."""
    shown: tuple[dict[int, Any], dict[int, Any]] = dict(reference), dict(candidate)
    for client, outputs in candidate.items():
        if isinstance(outputs, StepOutputs) and client in reference:
            shown[0][client], shown[1][client] = _as_read(reference[client], outputs)
    return first_difference(*shown, path, IGNORED_FIELDS)


def _as_read(reference: EngineCoreOutputs, candidate: StepOutputs) -> tuple[Any, Any]:
    """Return what a client would read of either message; nothing if they have the same bytes."""
    reference.timestamp = candidate.timestamp
    frames = MsgpackEncoder().encode(reference), candidate.frames()
    if [*map(bytes, frames[0])] == [*map(bytes, frames[1])]:
        return None, None
    decoder = MsgpackDecoder(EngineCoreOutputs)
    return decoder.decode(frames[0]), decoder.decode(frames[1])
