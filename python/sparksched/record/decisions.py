"""A step's decision: copied in the engine's loop, and compared with a recorded one in a replay."""

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from sparksched.record.events import Step

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

_encode: Final = msgspec.json.Encoder().encode
_encode_counts: Final = msgspec.msgpack.Encoder().encode
_MAX_CHARACTERS: Final = 400
_DECIDED: Final = Step.__struct_fields__[Step.__struct_fields__.index("finished") :]


def decide(step: Step, output: "SchedulerOutput", last_ids: list[str]) -> list[str]:
    """Complete a step by its decision, which nobody changes later; return its requests' ids.

    `last_ids` are those of the step before. `new_block_ids` becomes JSON.
    """
    cached = output.scheduled_cached_reqs
    ids = list(output.num_scheduled_tokens)
    step.ids = None if ids == last_ids else ids
    step.num_tokens, step.num_drafts = num_tokens_of(output), num_drafts_of(output)
    step.new = [
        (it.req_id, it.num_computed_tokens, [list(ids) for ids in it.block_ids])
        for it in output.scheduled_new_reqs
    ]
    # The shortest way to a copy, and what is written of it.
    blocks: Any = msgspec.Raw(_encode(cached.new_block_ids))
    step.new_block_ids = blocks
    step.resumed = sorted(cached.resumed_req_ids)
    step.preempted = sorted(output.preempted_req_ids or ())
    step.finished = sorted(output.finished_req_ids)
    step.checksum = zlib.crc32(
        _encode_counts((cached.num_computed_tokens, cached.num_output_tokens))
    )
    return ids


def num_tokens_of(output: "SchedulerOutput") -> list[int] | None:
    """Return how many tokens each request of a step has; None for one each."""
    counts = list(output.num_scheduled_tokens.values())
    return None if counts.count(1) == len(counts) else counts


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
    recorded: Step, output: "SchedulerOutput", last_ids: list[str]
) -> Mismatch | None:
    """Compare a decision with the recorded one, as a file would have it."""
    decided = Step(recorded.sequence, recorded.time)
    decide(decided, output, last_ids)
    replayed = msgspec.json.decode(_encode(decided), type=Step)
    for name in _DECIDED:
        before, after = getattr(recorded, name), getattr(replayed, name)
        if before != after:
            return Mismatch(recorded.sequence, name, _shown(before), _shown(after))
    return None


def _shown(value: object) -> str:
    text = str(value)
    is_long = len(text) > _MAX_CHARACTERS
    return f"{text[:_MAX_CHARACTERS]}... ({len(text)} characters)" if is_long else text
