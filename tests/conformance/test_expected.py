"""That a change of what passes, or of who schedules it, is noticed."""

from pathlib import Path

import pytest

from .expected import FOLDER, changes, merged, missing, outcomes_of, read, write
from .report import Verdict

pytestmark = pytest.mark.release

KNOWN = {
    "test_a.py::test_1": "passed",
    "test_a.py::test_2": "fallback: LoRA",
    "test_b.py::test_3": "passed",
}
RUN = ["tests/v1/core/test_a.py::test_1", "tests/v1/core/test_a.py::test_2"]


def test_outcomes_are_those_of_tests_that_pass() -> None:
    verdicts = {
        RUN[0]: (Verdict.PASSED, ""),
        RUN[1]: (Verdict.FALLBACK, "LoRA"),
        "tests/v1/core/test_a.py::test_4": (Verdict.NOT_APPLICABLE, "why"),
        "tests/v1/core/test_a.py::test_5": (Verdict.FAILED, ""),
    }
    assert outcomes_of(verdicts) == {name: KNOWN[name] for name in list(KNOWN)[:2]}


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ({"test_a.py::test_1": "passed", "test_a.py::test_2": "fallback: LoRA"}, []),
        (
            {"test_a.py::test_1": "fallback: LoRA", "test_a.py::test_2": "fallback: LoRA"},
            ["test_a.py::test_1: passed -> fallback: LoRA"],
        ),
        (
            {"test_a.py::test_1": "passed", "test_a.py::test_2": "passed"},
            ["test_a.py::test_2: fallback: LoRA -> passed"],
        ),
        (
            {"test_a.py::test_2": "fallback: LoRA"},
            ["test_a.py::test_1: passed -> not among those that pass"],
        ),
    ],
)
def test_each_change_is_found(outcomes: dict[str, str], expected: list[str]) -> None:
    assert changes(KNOWN, outcomes, RUN) == expected


def test_what_passes_must_be_listed() -> None:
    name = "test_a.py::test_1"
    assert changes({}, {name: "passed"}, RUN) == [f"{name}: not among those that pass -> passed"]


def test_names_of_no_test_are_found_in_files_that_were_run() -> None:
    assert missing(KNOWN, RUN) == []
    assert missing(KNOWN, RUN[:1]) == ["test_a.py::test_2"]
    assert missing(KNOWN, []) == []


def test_files_that_were_not_run_stay_as_they_are() -> None:
    assert merged(KNOWN, {"test_a.py::test_1": "passed"}, RUN) == {
        "test_a.py::test_1": "passed",
        "test_b.py::test_3": "passed",
    }


def test_a_list_is_read_as_it_was_written(tmp_path: Path) -> None:
    write(tmp_path / "list.txt", KNOWN)
    assert read(tmp_path / "list.txt") == KNOWN


def test_lists_can_be_read() -> None:
    lists = [read(path) for path in FOLDER.iterdir()]
    assert lists
    for outcomes in lists:
        assert {outcome.partition(":")[0] for outcome in outcomes.values()} == {
            "passed",
            "fallback",
        }
