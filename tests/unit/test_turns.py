"""How many turns are left to others, on a clock that goes by turns."""

import itertools
from collections.abc import Iterator
from unittest import mock

import pytest
from sparksched.api_server import turns
from sparksched.api_server.turns import LATE_S, MOST_S, OUTPUTS_PER_TURN, OthersTurns

NUM_OWN = 2


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    with mock.patch.object(turns, "time", clock):
        yield clock


def num_left(others: OthersTurns, clock: Clock, seconds_a_turn: float) -> int:
    """Return how many turns pass until outputs are taken again."""
    for number in itertools.count():
        clock.now += seconds_a_turn
        if not others.take_next():
            return number
    raise AssertionError


def took(others: OthersTurns, clock: Clock, num_outputs: int, age_s: float) -> None:
    others.owe(num_outputs, clock.now - age_s)
    others.begin()


def test_none_while_the_loop_keeps_up(clock: Clock) -> None:
    others = OthersTurns()
    took(others, clock, 1024, LATE_S)
    assert num_left(others, clock, 0.0) == 0


def test_as_many_as_outputs_have_come_late(clock: Clock) -> None:
    others = OthersTurns()
    took(others, clock, 10 * OUTPUTS_PER_TURN, 1.0)
    assert [others.take_next() for _ in range(NUM_OWN)] == [True] * NUM_OWN
    clock.now += 0.02  # for which the outputs were processed
    assert num_left(others, clock, 1e-5) == 10
    assert num_left(others, clock, 1e-5) == 0


def test_not_for_longer_than_the_outputs_took(clock: Clock) -> None:
    others = OthersTurns()
    took(others, clock, 1000 * OUTPUTS_PER_TURN, 1.0)
    # Each turn takes 5 ms, of which three have passed before the first of the others' ends.
    assert num_left(others, clock, 0.005) <= NUM_OWN + 4
    assert num_left(others, clock, 0.005) == 0  # and nothing is owed


def test_never_for_long(clock: Clock) -> None:
    others = OthersTurns()
    took(others, clock, 1000 * OUTPUTS_PER_TURN, 1.0)
    clock.now += 60  # a turn in which something else blocked the loop
    before = clock.now
    num_left(others, clock, 0.001)
    assert clock.now - before <= MOST_S + (NUM_OWN + 2) * 0.001


def test_what_waits_for_these_turns_is_not_late(clock: Clock) -> None:
    """Else one late message would make all that follow it late."""
    others = OthersTurns()
    took(others, clock, 1000 * OUTPUTS_PER_TURN, 1.0)
    assert [others.take_next() for _ in range(NUM_OWN)] == [True] * NUM_OWN
    clock.now += 0.02
    assert others.take_next()
    made_at = clock.now
    num_left(others, clock, 0.001)
    assert clock.now - made_at > LATE_S
    others.owe(1024, made_at)
    others.begin()
    assert num_left(others, clock, 0.001) == 0
