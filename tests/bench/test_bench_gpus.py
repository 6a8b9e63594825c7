"""A server is started once the GPUs have the memory of the one before."""

import subprocess

import pytest

from bench import header
from bench.serving import gpus


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
