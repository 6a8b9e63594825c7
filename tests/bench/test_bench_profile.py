"""The split of an engine's samples, by the functions that py-spy names."""

from pathlib import Path

import pytest

from bench.report.tables import TABLES
from bench.serving.profile import ProfileError, split

STACKS = Path(__file__).with_name("engine_stacks.txt").read_text()
SHARES = {"waiting": 10, "runner": 60, "queues": 10, "scheduler": 10, "rest": 10}


def test_samples_are_split_by_the_innermost_known_function() -> None:
    assert split(STACKS) == SHARES | {"samples": 100}


def test_samples_without_the_loop_are_refused() -> None:
    with pytest.raises(ProfileError, match="the engine's loop is in no sample"):
        split("thread (8): output;Socket.send (zmq/sugar/socket.py:713) 3\n")


def test_a_row_has_both_schedulers() -> None:
    (table,) = [it for it in TABLES if it.name == "profile"]
    row = {"model": "Qwen2-1.5B", "front_end": "rust", "concurrency": 256}
    ours = SHARES | {"scheduler": 5, "rest": 15}
    profiles = [
        row | {"scheduler": "stock", "split": SHARES},
        row | {"scheduler": "sparksched", "split": ours},
    ]
    (cells,) = table.rows({"x.json": {"kind": "profile", "profiles": profiles}})
    assert cells == [
        "Qwen2-1.5B, Rust front end, 256 streams",
        "60.0 → 60.0",
        "10.0 → 5.00",
        "10.0 → 10.0",
        "10.0 → 10.0",
        "10.0 → 15.0",
    ]
    assert len(cells) == len(table.columns)
