"""`SPARKSCHED_VERIFY` on seeded scenarios finds mistakes in steps, outputs and messages.

That there is no false alarm, `test_differential.py` shows.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from unittest import mock

import pytest
from sparksched import compat

from testkit.worlds.candidates import verifying_scheduler_class

from .runner import SchedulersDiffer, run_scenario
from .test_harness_catches import NUM_STEPS, Ends, Outputs, State, Steps


@pytest.mark.parametrize("encoded", [False, True], ids=["objects", "messages"])
@pytest.mark.parametrize(
    ("mistake", "name", "seed"),
    [
        (Steps, "sync-full", 0),
        (State, "sync-full", 0),
        (Ends, "sync-full", 3),
        (Outputs, "async-full", 6),
    ],
)
def test_a_mistake_is_found(
    mistake: type,
    name: str,
    seed: int,
    encoded: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is in vLLM's scheduler here, which is the same to a comparison."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    stock = compat.stock_scheduler_cls
    with (
        mock.patch.object(
            compat,
            "stock_scheduler_cls",
            lambda config: type(mistake.__name__, (mistake, stock(config)), {}),
        ),
        pytest.raises(SchedulersDiffer, match="VerificationError"),
    ):
        run_scenario(name, seed, NUM_STEPS, verifying_scheduler_class, encoded=encoded)
