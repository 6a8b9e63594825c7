"""Compares what a scheduler decides with the decision that was recorded."""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import msgspec

from sparksched.trace.events import Step

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

_encode: Final = msgspec.msgpack.Encoder().encode


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
    """Return the first part of a decision that is another than the recorded one.

    Args:
        recorded: The step as it was decided then.
        numbers: Its requests, also if they are those of the step before.
        ids: Of all requests so far, by number.
        output: The decision now.

    """
    pairs = chain(_batches(recorded, numbers, ids, output), _blocks(recorded, ids, output))
    for name, before, now in pairs:
        if before != now:
            return Mismatch(recorded.sequence, name, _shortened(before), _shortened(now))
    return None


def _batches(
    recorded: Step, numbers: Sequence[int], ids: Sequence[str], output: "SchedulerOutput"
) -> Iterator[tuple[str, Any, Any]]:
    """Yield who ended, who is scheduled, and for what, as it was and as it is."""
    ended, preempted = _ids(recorded.finished, ids), _ids(recorded.preempted, ids)
    yield "finished requests", ended, sorted(output.finished_req_ids)
    yield "preempted requests", preempted, sorted(output.preempted_req_ids or ())
    scheduled = [ids[number] for number in numbers]
    yield "scheduled requests", scheduled, list(output.num_scheduled_tokens)
    counts = recorded.num_tokens or [1] * len(scheduled)
    counts_by_id = dict(zip(scheduled, counts, strict=True))
    yield "scheduled tokens", counts_by_id, output.num_scheduled_tokens
    drafts = output.scheduled_spec_decode_tokens
    num_drafts = recorded.num_drafts or [0] * len(scheduled)
    yield (
        "scheduled drafts",
        dict(zip(scheduled, num_drafts, strict=True)),
        {request_id: len(drafts.get(request_id, ())) for request_id in scheduled},
    )


def _blocks(
    recorded: Step, ids: Sequence[str], output: "SchedulerOutput"
) -> Iterator[tuple[str, Any, Any]]:
    """Yield what the workers are told of each request, as it was and as it is."""
    cached = output.scheduled_cached_reqs
    yield (
        "new requests, with computed tokens and blocks",
        [(ids[number], *rest) for number, *rest in recorded.new],
        [
            (it.req_id, it.num_computed_tokens, [list(group) for group in it.block_ids])
            for it in output.scheduled_new_reqs
        ],
    )
    yield "resumed requests", _ids(recorded.resumed, ids), sorted(cached.resumed_req_ids)
    yield (
        "new blocks",
        recorded.new_block_ids,
        [it if it is None else [list(group) for group in it] for it in cached.new_block_ids],
    )
    yield (
        "checksum of computed and output tokens",
        recorded.checksum,
        zlib.crc32(_encode((cached.num_computed_tokens, cached.num_output_tokens))),
    )


def _ids(numbers: Sequence[int], ids: Sequence[str]) -> list[str]:
    return sorted(ids[number] for number in numbers)


def _shortened(value: object) -> str:
    text = str(value)
    return text if len(text) <= 400 else f"{text[:400]}... ({len(text)} characters)"
