"""A step's decision: copied in the engine's loop, and compared with a recorded one in a replay."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from sparksched.record.events import BlockIds, Step

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

_encode: Final = msgspec.json.Encoder().encode
_encode_counts: Final = msgspec.msgpack.Encoder().encode
_MAX_CHARACTERS: Final = 400


class Decision(msgspec.Struct):
    """What a `Step` says, with ids in the place of numbers."""

    ids: list[str]
    counts: list[int]
    """Tokens of each."""
    num_tokens: list[int] | None
    num_drafts: list[int] | None
    new: list[tuple[str, int, BlockIds]]
    new_block_ids: msgspec.Raw
    resumed: list[str]
    preempted: list[str]
    finished: list[str]
    checksum: int


def decision_of(output: "SchedulerOutput") -> Decision:
    """Return a copy, which nobody changes later."""
    cached = output.scheduled_cached_reqs
    counts = list(output.num_scheduled_tokens.values())
    return Decision(
        list(output.num_scheduled_tokens),
        counts,
        None if counts.count(1) == len(counts) else counts,
        num_drafts_of(output),
        [
            (it.req_id, it.num_computed_tokens, [list(ids) for ids in it.block_ids])
            for it in output.scheduled_new_reqs
        ],
        # The shortest way to a copy, and what is written of it.
        msgspec.Raw(_encode(cached.new_block_ids)),
        sorted(cached.resumed_req_ids),
        sorted(output.preempted_req_ids or ()),
        sorted(output.finished_req_ids),
        zlib.crc32(_encode_counts((cached.num_computed_tokens, cached.num_output_tokens))),
    )


def num_drafts_of(output: "SchedulerOutput") -> list[int] | None:
    """Return how many drafts each request of a step has; None for none at all."""
    drafts = output.scheduled_spec_decode_tokens
    return [len(drafts.get(it, ())) for it in output.num_scheduled_tokens] if drafts else None


@dataclass(frozen=True)
class Mismatch:
    """The first decision that is another than the recorded one."""

    step: int
    """Number of the step, from 0."""
    field: str
    recorded: str
    replayed: str


def first_mismatch(
    recorded: Step, numbers: Sequence[int], ids: Sequence[str], output: "SchedulerOutput"
) -> Mismatch | None:
    """Compare a decision with the recorded one; `ids` are those of all requests, by number."""
    now = decision_of(output)
    then: dict[str, Any] = {
        "ids": [ids[number] for number in numbers],
        "new": [(ids[number], *rest) for number, *rest in recorded.new],
        "new_block_ids": msgspec.Raw(_encode(recorded.new_block_ids)),
    }
    for name in ("resumed", "preempted", "finished"):
        then[name] = sorted(ids[number] for number in getattr(recorded, name))
    for name in ("finished", "preempted", "ids", *Decision.__struct_fields__[2:]):
        before, after = then.get(name, getattr(recorded, name, None)), getattr(now, name)
        if before != after:
            return Mismatch(recorded.sequence, name, _shown(before), _shown(after))
    return None


def _shown(value: object) -> str:
    text = bytes(value).decode() if isinstance(value, msgspec.Raw) else str(value)
    is_long = len(text) > _MAX_CHARACTERS
    return f"{text[:_MAX_CHARACTERS]}... ({len(text)} characters)" if is_long else text
