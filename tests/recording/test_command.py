"""`sparksched replay`: what it prints, on a terminal and to programs, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
from sparksched import cli
from sparksched.record.events import VERSION, Begin, End, Event, Step
from sparksched.record.load import Trace

from .samples import settings, write
from .scenarios import events, record_scenario


@pytest.fixture(name="path", scope="module")
def _path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "trace"
    # Many requests in a pool for a few.
    record_scenario(path, "sync-preempting", 3, 300)
    return path


def ask(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Return the exit status, and what was printed to both streams."""
    capsys.readouterr()
    status = cli.main(["replay", *map(str, arguments)])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def data(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    status, printed, _ = ask(capsys, "--json", *arguments)
    assert status == 0
    answer: dict[str, Any] = json.loads(printed)
    return answer


def copy_of(path: Path, copy: Path, found: list[Event]) -> Path:
    return write(copy, [Begin(VERSION, Trace(path).settings), *found], 40)


def test_both_schedulers(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = data(capsys, path)
    num_steps = answer["trace"]["steps"]
    assert num_steps > 100
    assert answer["trace"]["recorded_scheduler"] == "SparkScheduler"
    assert [it["scheduler"] for it in answer["replays"]] == ["sparksched", "vllm"]
    for it in answer["replays"]:
        assert it["equal_steps"] == num_steps
        assert it["mismatch"] is None
        assert 0 < it["schedule_us"]["median"] <= it["schedule_us"]["p99"]
    (replay,) = data(capsys, path, "--scheduler=vllm")["replays"]
    assert replay["scheduler"] == "vllm"


def test_another_decision(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = events(path)
    step = next(it for it in found if isinstance(it, Step) and it.sequence == 20)
    step.preempted = ["nobody"]
    file = copy_of(path, tmp_path / "changed", found)
    status, printed, _ = ask(capsys, file)
    assert status == 1
    for scheduler in ("sparksched", "vllm"):
        assert f"{scheduler} decides something else in step 20: preempted" in printed
    status, printed, _ = ask(capsys, file, "--json")
    assert status == 1
    for replay in json.loads(printed)["replays"]:
        assert replay["mismatch"]["step"] == replay["equal_steps"] == 20


@pytest.mark.parametrize("is_within_a_piece", [True, False])
def test_a_trace_without_its_end(
    is_within_a_piece: bool, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is whole is replayed, and what is missing is said."""
    file = copy_of(path, tmp_path / "cut", events(path)[:-1])
    missing = "has no end"
    if is_within_a_piece:
        file.write_bytes(file.read_bytes()[:-50])
        missing = "is cut off behind line "
    status, printed, warned = ask(capsys, file, "--json")
    assert status == 0
    assert warned.startswith(f"sparksched replay: {file} {missing}")
    answer = json.loads(printed)
    assert answer["trace"]["missing"] in warned
    num_steps = answer["trace"]["steps"]
    assert num_steps > 0
    assert [it["equal_steps"] for it in answer["replays"]] == [num_steps, num_steps]


# ----------------------------------------------------------------------------------------
# What is refused
# ----------------------------------------------------------------------------------------


def test_files_that_can_not_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_text("nothing of the kind")
    begin = Begin(VERSION, settings({"prefix_caching_hash_algo": "by the moon"}))
    for file, problem in (
        (foreign, f"{foreign} is not a trace"),
        (tmp_path / "missing", "No such file or directory"),
        (tmp_path, "Is a directory"),
        (write(tmp_path / "moon", [begin, End(1.0, "")]), "can be built of these settings: "),
    ):
        status, printed, error = ask(capsys, file)
        assert (status, printed) == (2, "")
        assert error.startswith("sparksched replay: ")
        assert problem in error


@pytest.mark.parametrize(
    "argument",
    ["--max-num-seqs=0", "--num-gpu-blocks=many", "--scheduling-policy=random", "--scheduler=mine"],
)
def test_wrong_arguments(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        ask(capsys, "file", argument)
    assert caught.value.code == 2
    assert argument.split("=", maxsplit=1)[0] in capsys.readouterr().err


# ----------------------------------------------------------------------------------------
# What if
# ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduler", ["sparksched", "vllm"])
def test_one_request_at_a_time(
    scheduler: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = data(capsys, path, "--max-num-seqs=12", f"--scheduler={scheduler}")
    assert answer["as_recorded"]["stuck requests"] == 0
    # The recorded value: nothing changes.
    assert answer["changed"] == answer["as_recorded"]
    answer = data(capsys, path, "--max-num-seqs=1", f"--scheduler={scheduler}")
    before, after = answer["as_recorded"], answer["changed"]
    assert before["most running"] > after["most running"] == 1
    # How long that takes, and how many wait, is a matter of how long the recorded steps took.
    assert after["steps"] > before["steps"]
    # A client that had been given nothing may lose patience, or not.
    assert after["finished requests"] == pytest.approx(before["finished requests"], rel=0.1)


def test_a_pool_that_is_too_small(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With which vLLM would not start: the simulation ends and says so."""
    status, printed, _ = ask(capsys, path, "--num-gpu-blocks=2")
    assert status == 0
    assert "requests would never have run: they don't fit." in printed
