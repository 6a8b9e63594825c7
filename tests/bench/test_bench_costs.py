"""What is stored of the costs that the docs state: verification, metrics, recordings; and where."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import header
from bench.micro import recording, steps

HEAD = {"date", "commit", "cpu", "cores", "gpu", "python", "vllm", "torch", "sparksched"}
FEWEST = {2: steps.STEPS_IN_A_ROW}
"""Steps by running requests."""


def stored(main: Any, arguments: list[str], path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "argv", ["bench", *arguments, "--json", str(path)])
    main()
    return json.loads(path.read_text())


@pytest.mark.e2e
@pytest.mark.full
def test_verification_and_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for table in ("DECODE_STEPS", "FEATURE_STEPS", "VERIFIED_STEPS"):
        monkeypatch.setattr(steps, table, FEWEST)
    monkeypatch.setattr(steps, "PROMPTS", (64,))
    arguments = ["--quick", "--verify", "--metrics"]
    result = stored(steps.main, arguments, tmp_path / "x.json", monkeypatch)
    assert result["run"].keys() == HEAD
    for table, sides in (
        ("verified", steps.VERIFIED_SIDES),
        ("counted", steps.COUNTED_SIDES),
    ):
        (row,) = result[table]
        assert row["requests"] == 2
        for side in sides:
            assert row[side]["step_us"]["median"] > 0


@pytest.mark.e2e
@pytest.mark.full
def test_recordings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--requests", "2", "--steps", "50"]
    result = stored(recording.main, arguments, tmp_path / "x.json", monkeypatch)
    assert result["run"].keys() == HEAD
    rows = result["recording"]
    cases = [(row["side"], row["requests"], row["kind"]) for row in rows]
    assert cases == [(side, 2, kind) for side in steps.SIDES for kind in recording.KINDS]
    for row in rows:
        assert row["schedule_us"]["median"] > 0
        assert row["processor_us"] > 0


@pytest.mark.parametrize(
    ("named", "expected"), [("abc", "abc-unchecked"), ("", "unknown"), (None, "unknown")]
)
def test_a_commit_that_git_does_not_confirm(
    named: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_checkout(*arguments: str) -> str:
        raise subprocess.CalledProcessError(128, "git")

    monkeypatch.setattr(header, "_git", no_checkout)
    monkeypatch.delenv("SPARKSCHED_COMMIT", raising=False)
    if named is not None:
        monkeypatch.setenv("SPARKSCHED_COMMIT", named)
    assert header.describe_run()["commit"] == expected


def test_a_machine_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header, "gpu_model", lambda: None)
    assert header.describe_run()["gpu"] == "none"
