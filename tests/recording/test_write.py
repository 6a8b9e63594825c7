"""The thread that fills a file: disks that hang, and files that get their name at the end."""

from __future__ import annotations

import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sparksched.trace.events import Begin, End, Event, Pause
from sparksched.trace.file import TraceFile
from sparksched.trace.record.write import BackgroundWriter

from .samples import settings
from .scenarios import events

PAUSE = Pause(0.5, 1)


@pytest.fixture(name="disk")
def _disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Have the writer's thread wait for the disk until the event."""
    goes_on = threading.Event()
    write = os.write

    def write_late(descriptor: int, content: bytes) -> int:
        if threading.current_thread() is not threading.main_thread():
            goes_on.wait()
        return write(descriptor, content)

    monkeypatch.setattr(os, "write", write_late)
    yield goes_on
    goes_on.set()


def background_writer(path: Path, *, is_named: bool) -> BackgroundWriter:
    file = TraceFile(path, 1 << 20, is_named=is_named)
    background = BackgroundWriter(file, lambda: 1.0, lambda: None)
    background.note(file.append, Begin(settings()))
    background.note(file.append, PAUSE)
    return background


def found_in(path: Path) -> list[Event]:
    return events(path)


def test_the_end_of_an_engine_waits_once(
    disk: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not written by then is said, not waited for again."""
    monkeypatch.setattr("sparksched.trace.record.write._CLOSE_S", 0.01)
    background = background_writer(tmp_path / "trace", is_named=True)
    background.end("over")
    assert not background.join()
    assert background.problem == "the disk has not taken all of it within 0.01 s"
    monkeypatch.setattr("sparksched.trace.record.write._CLOSE_S", 1e6)
    assert not background.join()
    disk.set()
    background._thread.join()
    assert found_in(tmp_path / "trace") == [PAUSE, End(1.0, "over")]


def without_nameless_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY | os.O_RDWR)


def without_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object, **_settings: object) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", refuse)


def as_it_is(_: pytest.MonkeyPatch) -> None:
    """Change nothing of the filesystem."""


@pytest.mark.parametrize("filesystem", [as_it_is, without_nameless_files, without_links])
def test_a_name_at_the_end(
    filesystem: Callable[[pytest.MonkeyPatch], None],
    disk: threading.Event,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    filesystem(monkeypatch)
    path = tmp_path / "trace"
    background = background_writer(path, is_named=False)
    told: list[str | None] = []
    assert background.keep("they differ", told.append)
    # Nobody has waited, and nobody sees a part of it.
    assert (list(tmp_path.iterdir()), told) == ([], [])
    disk.set()
    assert background.join()
    assert told == [None]
    assert found_in(path) == [PAUSE, End(1.0, "they differ")]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_nlink == 1


@pytest.mark.parametrize("filesystem", [as_it_is, without_nameless_files])
def test_a_name_that_is_taken(
    filesystem: Callable[[pytest.MonkeyPatch], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    filesystem(monkeypatch)
    path = tmp_path / "trace"
    background = background_writer(path, is_named=False)
    path.write_text("mine")
    told: list[str | None] = []
    background.keep("they differ", told.append)
    background.join()
    assert path.read_text() == "mine"
    (problem,) = told
    assert problem is not None
    assert "File exists" in problem


def test_a_copy_that_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No part of it is left."""
    without_links(monkeypatch)

    def fail(*_files: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", fail)
    background = background_writer(tmp_path / "trace", is_named=False)
    told: list[str | None] = []
    background.keep("they differ", told.append)
    background.join()
    assert told == ["No space left on device"]
    assert list(tmp_path.iterdir()) == []


def test_what_has_ended_is_not_kept(tmp_path: Path) -> None:
    background = background_writer(tmp_path / "trace", is_named=False)
    background.end("over")
    assert not background.keep("they differ", pytest.fail)
    assert background.join()
    assert list(tmp_path.iterdir()) == []
