"""Each function of the extension that Python can call: a panic in it is an ordinary exception."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sparksched import _core
from transport.engines import environment_with, forkserver, start_process

from . import extension as points
from . import test_beginnings_and_ends, test_engines, test_front_ends
from .extension import entry_points

pytestmark = pytest.mark.timeout(600)


def report_of(extension: Path, tmp_path: Path, module: str, function: str, *args: Any) -> Any:
    """Run a function in a process that has the extension with points; return its report."""
    ours, theirs = forkserver.Pipe()
    log_path = tmp_path / "log"
    process = start_process(
        points.call, log_path, environment_with(), extension, module, function, *args, theirs
    )
    theirs.close()
    try:
        assert ours.poll(200), log_path.read_text()
        return ours.recv()
    except EOFError:
        raise AssertionError(log_path.read_text()) from None
    finally:
        process.join(20)
        process.kill()
        process.join()


def test_each_panic_is_an_ordinary_exception(extension: Path, tmp_path: Path) -> None:
    called = report_of(extension, tmp_path, "panics.face", "call_all")
    assert called == sorted(entry_points()), "a new entry point belongs into tests/panics/face.py"


def test_the_sources_tell_all_entry_points() -> None:
    """What else the classes have are fields that PyO3 reads and writes by itself."""
    found = set()
    for name, value in vars(_core).items():
        if isinstance(value, type):
            found |= {f"{name}.{method}" for method in methods_of(value)}
        elif isinstance(value, Callable):  # type: ignore[arg-type]
            found.add(name)
    unknown = found - set(entry_points())
    assert not unknown
    assert len(found) > 50


def methods_of(value: type) -> set[str]:
    return {
        name
        for name, member in vars(value).items()
        if callable(member) and (not name.startswith("__") or name == "__call__")
    }


NOT_CALLED = {
    "CachedBlocks.__new__": "by vLLM 0.33.0 with routed experts, which no model here has",
    "CachedBlocks.get_cached_block": "within calls of SchedulerCore, which pass its errors on",
    "QueueWatch.look": "in a thread that logs the error and ends: the engine goes on without it",
    "SchedulerCore.snapshot": "for tests and support: no process of vLLM's asks for it",
    "SchedulerCore.check_invariants": "for tests",
    "SchedulerCore.set_pacing_time": "by a what-if of `replay` alone, in virtual time",
    "SchedulerCore.pacing": "for support: no process of vLLM's asks for it",
    "SchedulerCore.knobs": "by verification alone, beside `schedule`",
    "SchedulerCore.are_knobs_chosen": "by recordings alone, beside `schedule`",
    "SchedulerCore.waiting_requests": "for tests: recordings ask for running requests only",
    "SchedulerCore.has_finished_requests": "vLLM's loop asks `has_requests`, which covers it",
    "StepOutputs.scheduler_stats=": "vLLM sets what is missing, and it is there if it is wanted",
    "ClientRings.engine_pid": "for tests",
}
"""Entry points that no engine and no front end calls, and why."""


def test_each_panics_in_a_process_of_vllms_that_calls_it() -> None:
    panicking = test_engines.ENTRIES | test_beginnings_and_ends.ENTRIES | test_front_ends.ENTRIES
    assert not panicking & NOT_CALLED.keys()
    missing = set(entry_points()) - panicking - NOT_CALLED.keys()
    assert not missing, "a new entry point is to panic in an engine or a front end that calls it"
    assert panicking | NOT_CALLED.keys() == set(entry_points())


@pytest.mark.parametrize("name", ["arm_panic", "disarm_panic"])
def test_an_ordinary_extension_has_no_points(name: str) -> None:
    assert not hasattr(_core, name)
    assert b"a test wants a panic" not in Path(_core.__file__).read_bytes()
