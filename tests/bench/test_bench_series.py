"""A series of benchmarks: which are run, how long, and what becomes of those that fail."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.serving import decode, series
from bench.serving.series import ALL, LEFT, ONE_GPU, measure

FAKE = """
import json, os, signal, sys, time
status, log = sys.argv[1], sys.argv[2]
options = sys.argv[3:]
path = options[options.index("--json") + 1]
with open(log, "a") as file:
    file.write(json.dumps(options) + "\\n")
if status == "sleep":
    def leave(number, frame):
        time.sleep(1)
        open(path, "w").write("ended in time")
        sys.exit(3)
    signal.signal(signal.SIGTERM, leave)
    open(path + ".begun", "w").close()
    time.sleep(60)
sys.exit(int(status.split(",")[sum(1 for _ in open(log)) - 1]))
"""
"""Ends with the status whose turn it is; or sleeps until it is told to end."""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def fake(monkeypatch: pytest.MonkeyPatch, log: Path, statuses: str) -> None:
    monkeypatch.setattr(series, "BENCHMARK", ("-c", FAKE, statuses, str(log)))


def calls(log: Path) -> list[list[str]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.mark.parametrize("name", ALL)
def test_the_benchmark_takes_all_options(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["decode", *ALL[name].split()])
    options = decode._options()
    plan = decode._plan(options, tuple(decode._subjects(options)), "a GPU")
    assert list(plan.servers())


def test_each_has_a_file_and_the_time_that_is_left(
    tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(monkeypatch, log, "0,0")
    names = ["qwen2_1_5b", "gpt_oss_20b"]
    assert measure(names, tmp_path, 120.0) == dict.fromkeys(names, 0)
    for name, call in zip(names, calls(log), strict=True):
        *arguments, json_option, path, minutes_option, minutes = call
        assert arguments == ALL[name].split()
        assert (json_option, path) == ("--json", str(tmp_path / f"decode_{name}.json"))
        assert minutes_option == "--minutes"
        assert 0 < float(minutes) <= 2


def test_what_fails_or_has_no_time_holds_up_nothing(
    tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(monkeypatch, log, "1,3,0")
    names = ["qwen2_1_5b", "gpt_oss_20b", "gpt_oss_120b"]
    assert measure(names, tmp_path, 120.0) == dict(zip(names, (1, 3, 0), strict=True))


def test_nothing_begins_when_the_time_is_over(
    tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(monkeypatch, log, "0")
    assert measure(["qwen2_1_5b"], tmp_path, 0.0) == {"qwen2_1_5b": LEFT}
    assert not log.exists()


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize(
    ("statuses", "expected"), [("0,0", 0), ("0,3", 3), ("3,1", 1), ("1,0", 1), ("2,3", 1)]
)
def test_the_exit_status(
    statuses: str, expected: int, tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(monkeypatch, log, statuses)
    arguments = ["series", "qwen2_1_5b", "gpt_oss_20b", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    assert series.main() == expected


def refusal(monkeypatch: pytest.MonkeyPatch, out: Path, *names: str) -> str:
    """Return why nothing is measured on a machine with one GPU."""
    monkeypatch.setattr(sys, "argv", ["series", *names, "--out", str(out)])
    with pytest.raises(SystemExit) as refused:
        series.main()
    return str(refused.value)


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series, "BENCHMARK", ("-c", "raise SystemExit('begun')"))
    monkeypatch.setattr(series, "gpu_model", lambda: "a GPU")
    monkeypatch.setattr(series, "_num_gpus", lambda: 1)
    monkeypatch.setattr(series, "describe_run", lambda: {"commit": "b" * 12})


def test_a_machine_without_a_gpu_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(series, "gpu_model", lambda: None)
    assert "there is no GPU" in refusal(monkeypatch, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("one_gpu")
def test_too_few_gpus_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = refusal(monkeypatch, tmp_path, "gpt_oss_20b*")
    assert said.endswith("there is one GPU, and two are needed for gpt_oss_20b_dp2")


@pytest.mark.usefixtures("one_gpu")
def test_a_folder_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    assert "file can't be made: File exists" in refusal(monkeypatch, tmp_path / "file")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "nothing may be written to" in refusal(monkeypatch, tmp_path)


@pytest.mark.usefixtures("one_gpu")
def test_a_file_of_another_commit_is_not_gone_on_with(
    tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of two commits in one file could not be told apart."""
    path = tmp_path / "decode_qwen2_1_5b.json"
    path.write_text(json.dumps({"runs": [{"commit": "a" * 12}, {"commit": "b" * 12}]}))
    said = refusal(monkeypatch, tmp_path, "qwen2_1_5b")
    assert said.endswith(f"{path} is of {'a' * 12}, and this is {'b' * 12}")
    for content in ("{", "[]", '{"runs": [1]}', "{}"):
        path.write_text(content)
        said = refusal(monkeypatch, tmp_path, "qwen2_1_5b")
        assert said.endswith(f"{path} is no result of `bench.serving.decode`")
    path.write_text(json.dumps({"runs": [{"commit": "b" * 12}]}))
    fake(monkeypatch, log, "0")
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    assert series.main() == 0
    assert len(calls(log)) == 1


def names_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[str]:
    monkeypatch.setattr(sys, "argv", ["series", *arguments])
    names: list[str] = series._options().names
    return names


def test_names_and_patterns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert names_of(monkeypatch) == list(ONE_GPU)
    chosen = names_of(monkeypatch, "qwen2_1_5b", "gpt_oss_20b_d*", "qwen2*_sync", "qwen2_1_5b")
    assert chosen == ["qwen2_1_5b", "gpt_oss_20b_dp2", "qwen2_1_5b_sync"]
    with pytest.raises(SystemExit):
        names_of(monkeypatch, "llama*")
    assert "llama* is none of gpt_oss_120b_http, " in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_benchmark_and_leaves_the_rest(
    number: int, tmp_path: Path, log: Path
) -> None:
    """The series ends when the benchmark has: nothing else may use the GPU before."""
    begin = (
        "import signal, sys; from bench.serving import series;"
        # Whoever runs the tests may ignore them, as `nohup` and shells in the background do.
        "signal.signal(signal.SIGINT, signal.default_int_handler);"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL);"
        "series._why_not = lambda names, out: None;"
        f"series.BENCHMARK = ('-c', {FAKE!r}, 'sleep', {str(log)!r});"
        f"sys.argv = ['series', 'qwen2_1_5b', 'gpt_oss_20b', '--out', {str(tmp_path)!r}];"
        "sys.exit(series.main())"
    )
    path = tmp_path / "decode_qwen2_1_5b.json"
    errors = tmp_path / "errors"
    with (
        errors.open("w") as file,
        subprocess.Popen([sys.executable, "-c", begin], stderr=file) as process,
    ):
        until = time.monotonic() + 60
        while not Path(f"{path}.begun").exists():
            assert time.monotonic() < until
            time.sleep(0.05)
        os.kill(process.pid, number)
        assert process.wait(60) == LEFT
        assert path.read_text() == "ended in time"
    assert len(calls(log)) == 1
    assert errors.read_text().count("to be gone on with") == 2
