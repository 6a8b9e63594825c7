"""`sparksched check`, on machines of all kinds."""

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from engine.harness import restored_vllm
from sparksched import _core, cli
from sparksched.commands.check import machine, serving
from sparksched.commands.check.finding import Level
from sparksched.compat import releases
from vllm.platforms.cpu import CpuPlatform

from testkit.executor import write_model_directory

pytestmark = pytest.mark.release

COLUMNS = 80
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model_directory(tmp_path_factory.mktemp("model")))


@pytest.fixture(autouse=True)
def _environment() -> Any:
    # To build a configuration loads vLLM's plugins, ours among them, and once only.
    with restored_vllm(), mock.patch("vllm.plugins.plugins_loaded", False):
        os.environ["VLLM_SCHEDULER"] = "sparksched"
        for name in [it for it in os.environ if it.startswith("SPARKSCHED_")]:
            del os.environ[name]
        os.environ.pop("VLLM_PLUGINS", None)
        # The command quietens a vLLM that it is the first to import; here others use it later.
        os.environ["VLLM_LOGGING_LEVEL"] = "INFO"
        yield


# What the core has too few bits for, and vLLM has not.
TOO_LONG_AN_INTERVAL = f"--prefix-cache-retention-interval={2**31}"
CONNECTOR = '--kv-transfer-config={"kv_connector":"OffloadingConnector","kv_role":"kv_both"}'


def check(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """Return the exit status, and the findings by topic: the worst of each."""
    status = cli.main(["check", "--json", *arguments])
    findings = json.loads(capsys.readouterr().out)
    order = list(Level)
    findings.sort(key=lambda finding: order.index(Level(finding["level"])))
    return status, {finding["topic"]: finding for finding in findings}


def test_a_model_that_is_scheduled(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = check(capsys, model, "--dtype=float32")
    assert status == 0
    assert found["scheduler"]["level"] == "ok"
    assert found["scheduler"]["text"].startswith("sparksched, in Rust")
    assert found["transport"]["text"].startswith("shared memory, 2 rings of 8 MiB")
    assert found["front end"]["text"].startswith("vLLM's, in Python")
    assert "CUDA graphs" in found
    for finding in found.values():
        assert bool(finding["advice"]) == (finding["level"] != "ok"), finding


def test_the_rust_front_end(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (model, "--dtype=float32")
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    status, found = check(capsys, *arguments)
    assert (status, found["front end"]["level"]) == (0, "ok")
    assert "it refuses n above 1" in found["front end"]["text"]
    assert "straight from the engine" in found["transport"]["text"]
    _, found = check(capsys, *arguments, "--api-server-count=2")
    assert "ignores --api-server-count" in found["front end"]["text"]


def test_without_a_model_the_machine_is_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = check(capsys)
    assert status == 0
    assert "processors" in found
    assert "scheduler" not in found


def test_an_unsupported_configuration(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [model, "--dtype=float32", TOO_LONG_AN_INTERVAL]
    status, found = check(capsys, *arguments)
    assert status == 1
    assert found["scheduler"]["level"] == "problem"
    assert "Scheduler: a limit of 2^31 or more is not supported" in found["scheduler"]["text"]
    with mock.patch.dict(os.environ, {"SPARKSCHED_STRICT": "1"}):
        _, found = check(capsys, *arguments)
    assert found["scheduler"]["text"].startswith("vLLM wouldn't start: ")


@pytest.mark.parametrize(
    ("arguments", "strict", "level", "text"),
    [
        ([], "0", "warning", "Scheduler checks each step"),
        ([CONNECTOR], "0", "warning", "would run without it: the KV connector OffloadingConnector"),
        ([CONNECTOR], "1", "problem", "wouldn't start: the KV connector OffloadingConnector"),
    ],
)
def test_verification(
    arguments: list[str],
    strict: str,
    level: str,
    text: str,
    model: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    variables = {"SPARKSCHED_VERIFY": "1", "SPARKSCHED_STRICT": strict}
    with mock.patch.dict(os.environ, variables):
        _, found = check(capsys, model, "--dtype=float32", *arguments)
    assert found["verification"]["level"] == level
    assert text in found["verification"]["text"]


def test_long_prompts(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    def said(variables: dict[str, str], *arguments: str) -> tuple[str, str]:
        with mock.patch.dict(os.environ, variables):
            _, found = check(capsys, model, "--dtype=float32", *arguments)
        return found["long prompts"]["level"], found["long prompts"]["text"]

    paced = {"SPARKSCHED_MAX_STALL_MS": "150"}
    short = "--max-model-len=128"
    long = ('--hf-overrides={"max_position_embeddings": 65536}', "--max-model-len=65536")
    assert said({}, short) == ("ok", "not paced; 128 tokens at most")
    level, text = said({}, *long)
    assert (level, text[:18]) == ("warning", "up to 65,536 token")
    threshold = "--long-prefill-token-threshold=512"
    assert said({}, *long, threshold)[0] == "ok"
    level, text = said(paced, short)
    assert (level, text[:5]) == ("ok", "paced")
    assert "150 ms" in text
    assert "2.5 times" in text
    level, text = said(paced, short, "--no-enable-chunked-prefill")
    assert level == "warning"
    assert "chunked-prefill" in text
    level, text = said(paced, short, TOO_LONG_AN_INTERVAL)
    assert (level, text[:35]) == ("warning", "not paced: a limit of 2^31 or more:")


def test_a_configuration_that_vllm_refuses(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = check(capsys, model, "--max-model-len=99999999")
    assert status == 1
    assert "max_model_len" in found["arguments"]["text"]
    assert "scheduler" not in found


def test_a_wrong_variable(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`tests/unit/test_plugin.py` has all of them."""
    for scheduler in ("sparksched", ""):
        variables = {"VLLM_SCHEDULER": scheduler, "SPARKSCHED_TRANSPORT": "tcp"}
        with mock.patch.dict(os.environ, variables):
            status, found = check(capsys, model)
        assert status == 1
        assert "SPARKSCHED_TRANSPORT='tcp'" in found["environment"]["text"]
        assert "scheduler" not in found


def test_what_a_limit_of_the_queue_answers(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM's own front ends pass on why a request has failed since 0.33.0."""
    _, found = check(capsys, model)
    assert found["queue"]["text"].startswith("a request waits as long as it takes")
    monkeypatch.setenv("SPARKSCHED_QUEUE_TIMEOUT_S", "30")
    _, found = check(capsys, model)
    assert found["queue"]["text"].endswith("not scheduled within 30 s ends with HTTP 503")
    monkeypatch.setenv("SPARKSCHED_FRONT_END", "vllm")
    _, found = check(capsys, model)
    level = "ok" if releases.is_since("0.33.0") else "warning"
    assert found["queue"]["level"] == level


def test_no_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.dict(os.environ):
        del os.environ["VLLM_SCHEDULER"]
        status, found = check(capsys)
    assert (status, found["environment"]["level"]) == (0, "warning")


def test_plugins_that_leave_it_out(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.dict(os.environ, {"VLLM_PLUGINS": "one,two"}):
        status, found = check(capsys)
    assert (status, found["plugin"]["level"]) == (1, "problem")


def test_no_shared_memory(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(_core, "EngineRings", side_effect=ConnectionError("no memory")):
        status, found = check(capsys, model)
        assert (status, found["transport"]["level"]) == (0, "warning")
        assert found["transport"]["text"] == "ZMQ: no memory"
        with mock.patch.dict(os.environ, {"SPARKSCHED_TRANSPORT": "shm"}):
            status, found = check(capsys, model)
        assert (status, found["transport"]["level"]) == (1, "problem")


@pytest.mark.parametrize(
    ("arguments", "said", "advice"),
    [
        ([], "asynchronous: a step is prepared", ""),
        (["--no-async-scheduling"], "synchronous: the GPU waits", "drop --no-async-scheduling"),
        (["--runner=pooling"], "synchronous: so vLLM serves pooling models", ""),
        (
            ['--speculative-config={"method":"ngram","num_speculative_tokens":2}'],
            "synchronous: the GPU waits",
            "vLLM chose that",
        ),
    ],
    ids=["default", "asked for", "pooling", "chosen by vLLM"],
)
def test_the_mode_on_a_gpu(
    arguments: list[str], said: str, advice: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    update = CpuPlatform.check_and_update_config

    def as_a_gpu(config: Any) -> None:
        mode = config.scheduler_config.async_scheduling
        update(config)
        config.scheduler_config.async_scheduling = mode

    with (
        mock.patch.object(CpuPlatform, "check_and_update_config", staticmethod(as_a_gpu)),
        mock.patch.object(serving, "_is_on_a_processor", return_value=False),
    ):
        found = check(capsys, model, *arguments)[1]["scheduling"]
    assert found["text"].startswith(said)
    assert found["advice"].startswith(advice)
    assert bool(found["advice"]) == bool(advice)


@pytest.mark.parametrize(
    ("quota", "text"),
    [
        ("150000 100000", "the container is allowed the time of 1.5"),
        ("max 100000", "8 may be used"),
        ("nonsense", "8 may be used"),
    ],
)
def test_a_container(quota: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    with mock.patch("os.sched_getaffinity", return_value=set(range(8))):
        found = machine.processors(tmp_path)
    assert found.text == text
    assert found.level is (Level.OK if "8" in text else Level.WARNING)


# ----------------------------------------------------------------------------------------
# What is printed
# ----------------------------------------------------------------------------------------


def run_command(stdout: int | None, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "sparksched.cli", "check", *arguments],
        stdout=subprocess.PIPE if stdout is None else stdout,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"COLUMNS": str(COLUMNS), "TERM": "xterm-256color"},
    )


@pytest.mark.full
@pytest.mark.command
def test_on_a_terminal(model: str) -> None:
    terminal, end = pty.openpty()
    with run_command(end, model, TOO_LONG_AN_INTERVAL) as process:
        os.close(end)
        printed = b""
        while chunk := _read(terminal):
            printed += chunk
    os.close(terminal)
    assert process.returncode == 1
    lines = printed.decode().splitlines()
    assert any(ESCAPES.search(line) for line in lines)
    assert all(len(ESCAPES.sub("", line)) <= COLUMNS for line in lines)
    assert "sparksched would not schedule." in ESCAPES.sub("", lines[-1])


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # nobody is at the other end any more
        return b""


SECRET = "marked-password"
WITH_PASSWORD = json.dumps({"kv_connector": "X", "password": SECRET})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([f"https://user:{SECRET}@host.invalid/model"], "Repo id must be"),
        (["{model}", f"--kv-transfer-config={WITH_PASSWORD}"], "Unexpected keyword argument"),
        (["{model}", f"--kv-transfer-config={WITH_PASSWORD[:-1]}"], "Invalid JSON"),
        (["{model}", "--api-kye", SECRET], "unrecognized arguments: --api-kye"),
        (["{model}", f"--hf-tokn={SECRET}"], "unrecognized arguments: --hf-tokn"),
        (["{model}", "--dtype=float32", f"--api-key={SECRET}"], "sparksched, in Rust"),
    ],
    ids=["url", "field", "json", "typo", "other-typo", "all-is-well"],
)
def test_nothing_secret_is_said(
    arguments: list[str], said: str, model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    cli.main(["check", *(argument.replace("{model}", model) for argument in arguments)])
    text = "".join(capfd.readouterr())
    assert said in text
    assert SECRET not in text
