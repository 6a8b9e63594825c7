"""A server is started once the GPUs have the memory of the one before; traces tell their idling."""

import subprocess

import pytest

from bench import header
from bench.serving import gpu_trace, gpus


def test_memory_that_is_in_use_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "POLL_S", 0.0)
    answers = iter(["120000, 143771\n5, 143771\n", "600, 143771\n90000, 143771\n", "600, 143771\n"])
    assert gpus.wait_until_free(lambda: next(answers))
    assert next(answers, "asked three times") == "asked three times"


def test_memory_of_others_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "POLL_S", 0.0)
    assert not gpus.wait_until_free(lambda: "120000, 143771\n", limit_s=0.0)


@pytest.mark.parametrize("text", ["", "[N/A], [N/A]\n", "No devices were found\n", "0, 0\n"])
def test_gpus_that_tell_nothing_are_free(text: str) -> None:
    assert gpus.wait_until_free(lambda: text)


def test_only_the_gpus_that_servers_may_use_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **_: object) -> object:
        asked.append(command)
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(header, "_gpu_of_driver", lambda: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert gpus.memory_of_gpus() == ""
    header.gpu_model()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    gpus.memory_of_gpus()
    header.gpu_model()
    assert ["--id=2,3" in command for command in asked] == [True, True, False, False]
    assert not any("--id" in part for command in asked[2:] for part in command)


def test_without_a_gpu_that_may_be_used_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """To CUDA an empty list means that none may be; without a list all may be."""
    monkeypatch.setattr(header, "ask_driver", lambda fields, form: "NVIDIA H200, 580.1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert header.gpu_model() is None
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert header.gpu_model() == "NVIDIA H200, driver 580.1"


def test_a_gpu_is_idle_where_neither_kernel_nor_copy_runs() -> None:
    """Steps of 900 us with a gap of 100 us after each; a copy beside the kernels hides nothing."""
    steps = [{"cat": "kernel", "ts": 1000.0 * n, "dur": 900.0} for n in range(100)]
    beside = [{"cat": "gpu_memcpy", "ts": 1000.0 * n + 850, "dur": 30.0} for n in range(100)]
    calls = [{"cat": "cuda_runtime", "ts": 0.0, "dur": 1e5}, {"name": "of no time", "ts": 0.0}]
    found = gpu_trace.idle_time([*calls, *beside, *steps])
    assert found["idle_percent"] == pytest.approx(10, abs=0.2)
    assert found["gap_ms"]["p50"] == pytest.approx(0.1)
    filled = [{"cat": "gpu_memset", "ts": 1000.0 * n + 900, "dur": 99.0} for n in range(100)]
    assert gpu_trace.idle_time([*steps, *filled])["idle_percent"] == pytest.approx(0.1, abs=0.01)
    assert "missing" in gpu_trace.idle_time(calls)
