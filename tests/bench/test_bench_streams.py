"""What is made of the times at which tokens came."""

import numpy as np
import pytest
from synthetic import stream_logs

from bench.serving.evaluate import NothingMeasuredError, evaluate, summary, tokens_between
from bench.serving.streams import FIRST_END, RUNNING, Recorder, StreamLog


def log(times: list[float], num_tokens: list[int], sent_at: float = 0.0) -> StreamLog:
    return StreamLog(sent_at, np.array(times), np.array(num_tokens, dtype=np.int64))


def test_rate_and_gaps_of_steady_streams() -> None:
    found = evaluate(stream_logs(8, 101, itl_ms=5.0))
    assert found["output_gap_ms"]["p50"] == pytest.approx(5.0)
    assert found["tokens_per_s"] == pytest.approx(8 / 0.005, rel=0.02)
    assert found["merged_share"] == 0


def test_only_the_time_in_which_all_streams_decode_counts() -> None:
    early = log([0.0, 1.0, 2.0, 3.0], [1, 1, 1, 1])
    late = log([1.5, 2.5, 3.5, 4.5], [1, 1, 1, 1])
    found = evaluate([early, late])
    assert (found["start_s"], found["end_s"]) == (1.5, 3.0)
    assert found["tokens"] == 3
    assert found["output_gap_ms"]["count"] == 2


def test_tokens_that_come_together_are_one_output() -> None:
    found = evaluate([log([0.0, 1.0, 2.0], [1, 3, 1])])
    assert found["tokens"] == 4
    assert found["merged_share"] == pytest.approx(0.5)
    assert found["output_gap_ms"]["p10"] == found["output_gap_ms"]["max"] == 1000.0


@pytest.mark.parametrize(
    "logs",
    [
        [],
        [log([], [])],
        [log([0.0, 1.0], [1, 1]), log([], [])],
        [log([0.0, 1.0], [1, 1]), log([2.0, 3.0], [1, 1])],
        [log([1.0], [1])],
    ],
    ids=["no stream", "no token", "one without", "never together", "one token"],
)
def test_a_round_without_a_figure_is_an_error_and_no_zero(logs: list[StreamLog]) -> None:
    with pytest.raises(NothingMeasuredError):
        evaluate(logs)


def test_streams_that_were_never_side_by_side_are_told_what_helps() -> None:
    with pytest.raises(NothingMeasuredError, match="more tokens"):
        evaluate([log([0.0, 1.0], [1, 1]), log([2.0, 3.0], [1, 1])])


def test_no_values_are_missing_and_not_zero() -> None:
    assert list(summary([])) == ["missing"]


def test_tokens_between_two_moments() -> None:
    logs = [log([0.0, 1.0, 2.0], [1, 2, 4]), log([1.5], [8])]
    assert tokens_between(logs, 0.0, 1.5) == 2 + 8


def test_the_recorder_tells_when_all_run_and_when_one_ends() -> None:
    events: list[str] = []
    recorder = Recorder(2, events.append)
    recorder.send(0)
    recorder.note(0, 1.0, 1)
    recorder.note(0, 2.0, 1)
    assert events == []
    recorder.note(1, 2.0, 2)
    assert events == [RUNNING]
    recorder.end(0)
    recorder.end(1)
    assert events == [RUNNING, FIRST_END]
    first, second = recorder.logs()
    assert first.times.tolist() == [1.0, 2.0]
    assert second.num_tokens.tolist() == [2]
    assert first.sent_at > 0
