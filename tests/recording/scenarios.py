"""Traces of the differential scenarios: recorded on either scheduler, replayed on both."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

from differential.runner import run_scenario
from sparksched.record.events import Event
from sparksched.record.load import Load, Trace
from sparksched.record.recorder import Recorder
from sparksched.record.replay import Outcome, replay

from testkit.worlds import candidates, world


def record_scenario(
    path: Path,
    name: str,
    seed: int,
    num_steps: int,
    *,
    candidate: str = "sparksched",
    with_knobs: bool = False,
    **settings: Any,
) -> None:
    """Run a scenario and record one of its schedulers."""
    build = world.World.build_scheduler
    recorders: list[Recorder] = []
    num_built = 0

    def build_recorded(self: world.World, scheduler_class: Any, manager: Any) -> Any:
        nonlocal num_built
        scheduler = build(self, scheduler_class, manager)
        num_built += 1
        if num_built == 2:  # the first is the reference
            recorders.append(Recorder(scheduler, path, **settings))
        return scheduler

    with mock.patch.object(world.World, "build_scheduler", build_recorded):
        try:
            chosen = candidates.CANDIDATES[candidate]
            run_scenario(name, seed, num_steps, chosen, with_knobs=with_knobs)
        finally:
            for recorder in recorders:
                recorder.close()
    problem = recorders[0].writer.problem
    assert problem is None or "reached its size" in problem


def replayed(path: Path, scheduler: str, *, lacks_end: bool = False) -> Outcome:
    """Replay a trace on one scheduler, up to its end or the first difference."""
    load = Load(str(path))
    assert (load.trace.missing is not None) == lacks_end
    (outcome,) = replay(load, [scheduler])
    return outcome


def events(path: Path) -> list[Event]:
    return list(Trace(path).events())
