"""How requests are split over engines and pipeline stages, of made-up steps."""

import pytest

from bench.serving.server import read_metrics
from bench.serving.splits import busiest, decoding_range, fingerprints, splits_text, turns

PROMPTS = [(8, 1024), (8, 1024), (9, 900)]


def test_the_engine_with_the_most_steps_stands_for_all() -> None:
    idle = {"name": "idle", "sizes": [(0, 0)] * 50}
    busy = {"name": "busy", "sizes": [(1, 128), *[(1, 1)] * 20]}
    assert busiest([idle, busy])["name"] == "busy"
    assert busiest([busy, idle])["name"] == "busy"


def test_steps_with_parts_of_prompts_are_no_decodes() -> None:
    sizes = [*PROMPTS, (4, 4), (4, 4), (0, 0)]
    assert list(decoding_range(sizes)) == [3, 4]
    assert not decoding_range(PROMPTS)
    assert not decoding_range([(0, 0)])


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [(32, 32, [32, 32]), (1, 63, [63, 1]), (64, 0, [64, 0])],
)
def test_batches_take_turns(first: int, second: int, expected: list[float]) -> None:
    sizes = [*PROMPTS, *[(first, first), (second, second)] * 20]
    assert turns(sizes, 2) == expected


def test_batches_that_end_one_after_the_other_change_nothing() -> None:
    sizes = [*PROMPTS, *[(33, 33), (31, 31)] * 20, (2, 2), (0, 0), (1, 1)]
    assert turns(sizes, 2) == [33, 31]


def test_without_decodes_there_is_no_split() -> None:
    found = turns(PROMPTS, 2)
    assert isinstance(found, dict)
    assert "missing" in found


def test_splits_in_words() -> None:
    rounds = [
        {"counters": {"requests_by_engine": {"0": 5.0, "1": 3.0}}, "turns": [[3, 2], [2, 1]]},
        {
            "counters": {"requests_by_engine": {"0": 4.0, "1": 4.0}},
            "turns": [{"missing": "too few steps"}],
        },
    ]
    assert splits_text(rounds) == (
        "requests by engine: 5/3, 4/4; requests in batches that take turns: 3/2, 2/1, too few steps"
    )
    assert splits_text([{"counters": {"requests_by_engine": {"0": 8.0}}}]) == ""


def test_counters_are_kept_by_engine() -> None:
    page = """
# HELP vllm:request_success_total Count of requests.
vllm:request_success_total{engine="0",finished_reason="length",model_name="a, b"} 3.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="a, b"} 1.0
vllm:request_success_total{engine="1",finished_reason="length",model_name="a, b"} 5.0
process_open_fds 7.0
"""
    assert read_metrics(page) == {
        "vllm:request_success_total": {"0": 4.0, "1": 5.0},
        "process_open_fds": {"": 7.0},
    }


def test_a_fingerprint_tells_the_sizes_of_batches_and_their_order() -> None:
    sizes = [[2, 9], [2, 2], [1, 1]]
    first, second = fingerprints([sizes, [[0, 0], *sizes, [0, 0]]])
    assert first == second
    others = [[[2, 9], [1, 1], [2, 2]], [[2, 9], [2, 2]], [[2, 8], [2, 3], [1, 1]], []]
    assert len({first, *fingerprints(others)}) == 1 + len(others)
