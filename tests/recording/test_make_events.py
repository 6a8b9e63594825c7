"""What becomes of a step's outputs: which of them requests take, and which are dropped."""

from __future__ import annotations

from sparksched.trace.events import Event, Step, Stop, Update
from sparksched.trace.record.make_events import EventMaker

from .samples import BLOCK_SIZE, arrival

STOP = 7


class Story:
    """Calls of an engine, told to what makes events of them."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.maker = EventMaker(self.events.append, (BLOCK_SIZE,), has_keys=True, has_tokens=False)
        self._num_arrivals = 0
        self._num_steps = 0

    def arrive(self) -> str:
        number, self._num_arrivals = self._num_arrivals, self._num_arrivals + 1
        arriving = arrival(number, 5, True, stop_token_ids=[STOP])
        self.maker.arrive(arriving, [1] * 5, ("", ""))
        return arriving.request_id

    def step(self, *request_ids: str, preempted: tuple[str, ...] = ()) -> int:
        sequence, self._num_steps = self._num_steps, self._num_steps + 1
        step = Step(sequence, 0.0, 0.0, False, None, None, None, [], [], [], [], [], 0)
        self.maker.step(step, list(request_ids), [], ([], list(preempted), []))
        return sequence

    def take(self, sequence: int, tokens: list[int]) -> None:
        update = Update(sequence, 0.0, 0.0, None, None, None, None, None, [])
        self.maker.update(update, tokens, [])

    @property
    def stops(self) -> list[Stop]:
        return [event for event in self.events if isinstance(event, Stop)]


def test_outputs_behind_a_reset_are_dropped() -> None:
    """Also if the request is preempted once more before they have come."""
    story = Story()
    request_id = story.arrive()
    before = story.step(request_id)
    story.maker.reset(0.0, True, [request_id])
    # It runs again, and is preempted, in the place of which others run.
    again = story.step(request_id, preempted=(request_id,))
    story.step(preempted=(request_id,))
    story.take(before, [STOP])
    story.take(again, [STOP])
    assert story.stops == []


def test_outputs_of_preempted_requests_are_taken() -> None:
    story = Story()
    request_id = story.arrive()
    sequence = story.step(request_id)
    story.step(preempted=(request_id,))
    story.take(sequence, [STOP])
    assert story.stops == [Stop(0, 1)]


def test_an_output_that_never_comes_drops_no_others() -> None:
    """A step is lost; later, one request is reset, and then preempted for want of blocks."""
    story = Story()
    story.step(story.arrive())
    story.maker.finish(0.0, None, "FINISHED_ABORTED")
    request_id = story.arrive()
    before = story.step(request_id)
    story.maker.reset(0.0, True, [request_id])
    story.step(preempted=(request_id,))
    story.take(before, [STOP])
    assert story.stops == []
    sequence = story.step(request_id)
    story.step(preempted=(request_id,))
    story.take(sequence, [STOP])
    assert story.stops == [Stop(1, 1)]
