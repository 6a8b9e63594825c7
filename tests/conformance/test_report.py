"""What is counted as what, and that neither the table nor a fallback can hide a failure."""

import tomllib
from pathlib import Path

import pytest
from sparksched.compat import releases

from .not_applicable import FILE, Table, read
from .report import NAMES_ANOTHER, NO_SCHEDULER, Report, Verdict, judge


class Built:
    """What a test has built."""

    def __init__(self, num_native: int = 0, num_stock: int = 0, *refused: str) -> None:
        self.num_native = num_native
        self.num_stock = num_stock
        self.refused = list(refused)


NATIVE = Built(1)
FALLBACK = Built(0, 1, "LoRA")
BOTH = Built(1, 1, "LoRA")
NOTHING = Built()


@pytest.mark.parametrize(
    ("outcome", "built", "listed", "expected"),
    [
        ("passed", NATIVE, None, (Verdict.PASSED, "")),
        ("passed", FALLBACK, None, (Verdict.FALLBACK, "LoRA")),
        ("passed", BOTH, None, (Verdict.FALLBACK, "LoRA")),
        ("passed", Built(0, 1), None, (Verdict.FALLBACK, NAMES_ANOTHER)),
        ("passed", NOTHING, None, (Verdict.NOT_APPLICABLE, NO_SCHEDULER)),
        ("passed", NATIVE, "why", (Verdict.LISTED_BUT_PASSES, "why")),
        ("passed", FALLBACK, "why", (Verdict.LISTED_BUT_PASSES, "why")),
        ("failed", NATIVE, None, (Verdict.FAILED, "")),
        ("failed", FALLBACK, None, (Verdict.FAILED, "")),
        ("failed", NOTHING, None, (Verdict.FAILED, "")),
        ("failed", NATIVE, "why", (Verdict.NOT_APPLICABLE, "why")),
        ("skipped", NATIVE, None, (Verdict.NOT_APPLICABLE, "")),
    ],
)
def test_judge(
    outcome: str, built: Built, listed: str | None, expected: tuple[Verdict, str]
) -> None:
    assert judge(outcome, built, listed) == expected


def test_a_name_in_the_table_stands_for_all_its_parameters() -> None:
    table = Table({"test_a.py": {"test_all": "all", "test_one[1-x]": "one"}})
    prefix = "tests/v1/core/test_a.py::"
    assert table.reason(f"{prefix}test_all") == "all"
    assert table.reason(f"{prefix}test_all[2]") == "all"
    assert table.reason(f"{prefix}test_one[1-x]") == "one"
    assert table.reason(f"{prefix}test_one[2-x]") is None
    assert table.reason("tests/v1/core/test_b.py::test_all") is None


def test_names_of_no_test_are_found() -> None:
    table = Table({"test_a.py": {"test_old": "", "test_new": "", "test_one[1]": ""}})
    nodeids = ["tests/v1/core/test_a.py::test_new[1]", "tests/v1/core/test_a.py::test_one[2]"]
    assert table.unknown_names(nodeids) == ["test_a.py::test_old", "test_a.py::test_one[1]"]
    assert table.unknown_names([]) == [
        "test_a.py::test_old",
        "test_a.py::test_new",
        "test_a.py::test_one[1]",
    ]


def test_entries_of_one_release_are_in_its_table_only(tmp_path: Path) -> None:
    path = tmp_path / "table.toml"
    path.write_text(
        """
        ["test_a.py"]
        test_both = "both"
        [only."1.0"."test_a.py"]
        test_old = "old"
        [only."2.0"."test_b.py"]
        test_new = "new"
        """
    )
    assert read("1.0", path).reasons == {"test_a.py": {"test_both": "both", "test_old": "old"}}
    assert read("2.0", path).reasons == {
        "test_a.py": {"test_both": "both"},
        "test_b.py": {"test_new": "new"},
    }


@pytest.mark.parametrize("release", releases.SUPPORTED)
def test_each_entry_of_the_table_has_a_reason(release: str) -> None:
    for of_file in read(release).reasons.values():
        assert all(reason.strip() for reason in of_file.values())


def test_only_supported_releases_have_entries_of_their_own() -> None:
    assert set(tomllib.loads(FILE.read_text())["only"]) <= set(releases.SUPPORTED)


def test_the_report_names_what_is_to_be_done() -> None:
    report = Report()
    report.enter("tests/v1/core/test_a.py::test_1", Verdict.PASSED, "")
    report.enter("tests/v1/core/test_a.py::test_2", Verdict.FALLBACK, "LoRA")
    report.enter("tests/v1/core/test_a.py::test_3", Verdict.LISTED_BUT_PASSES, "why")
    report.enter("tests/v1/core/test_b.py::test_4", Verdict.NOT_APPLICABLE, "internals")
    report.unknown_names = ["test_a.py::test_old"]
    text = report.text()
    assert "listed but passes: tests/v1/core/test_a.py::test_3" in text
    assert "listed but unknown: test_a.py::test_old" in text
    assert "1  LoRA" in text
    assert "1  internals\n          test_b.py::test_4" in text
    assert [line.split() for line in text.splitlines()[-3:]] == [
        ["test_a.py", "1", "0", "1", "0", "1"],
        ["test_b.py", "0", "0", "0", "1", "0"],
        ["total", "1", "0", "1", "1", "1"],
    ]
