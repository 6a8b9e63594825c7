"""Which scenario shows each planted error: `finding_seeds.json`, made anew by `make finding-seeds`.

A test runs that one scenario alone. Where it doesn't show the error, because the generator of
traces or a release has changed, `find` looks through the others.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from scale import FULL

PATH = Path(__file__).with_name("finding_seeds.json")
FOUND = "SPARKSCHED_FINDING_SEEDS"
"""Names a file to which `find` adds what it finds, instead of believing the stored one."""


def find(error: str, name: str, num_seeds: int, shows: Callable[[int], bool]) -> None:
    """Run scenarios of a configuration until one shows the error; fail if none does.

    With all sizes, the search is made as if nothing were stored.
    """
    key = f"{error} in {name}"
    collected = os.environ.get(FOUND)
    stored = None if FULL or collected else json.loads(PATH.read_text()).get(key)
    if stored is not None and shows(stored):
        return
    for seed in range(num_seeds):
        if seed != stored and shows(seed):
            if collected:
                with open(collected, "a") as file:
                    print(json.dumps({key: seed}), file=file)
            elif not FULL:
                warnings.warn(f"{key}: seed {seed} shows it: make finding-seeds", stacklevel=2)
            return
    pytest.fail(f"{num_seeds} scenarios of {name} did not show {error}")


def merge(lines: list[str]) -> None:
    """Write the stored file from what a run has found."""
    seeds: dict[str, int] = {}
    for line in lines:
        seeds |= json.loads(line)
    PATH.write_text(json.dumps(dict(sorted(seeds.items())), indent=1) + "\n")


if __name__ == "__main__":
    import sys

    merge(sys.stdin.read().splitlines())
