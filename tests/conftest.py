"""What holds for every test: which run, in which order, how strings hash, on how many threads.

vLLM iterates over sets of request ids, so a seed means one trace only where strings hash alike in
every process. Workers of pytest and engines inherit what is set here. `make` sets the seed of
hashes for pytest itself.
"""

import gc
import os

import pytest
from scale import FULL

os.environ.setdefault("PYTHONHASHSEED", "0")
# Two servers at a time share two processors, and threads that wait for each other would spin. They
# don't survive a fork, either.
os.environ["OMP_NUM_THREADS"] = "1"
# Read when vLLM is imported, which preloaded servers don't do again.
os.environ["HF_HUB_OFFLINE"] = "1"

LONG = ("e2e", "transport")
"""Folders whose tests start processes, and take minutes: they come first."""


PATIENCE = int(os.environ.get("SPARKSCHED_TEST_PATIENCE") or "1")
"""How many times as long as usual a test may take: under emulation (`testkit/arm.sh`)."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked `full`, unless all sizes are asked for; put long files first."""
    if PATIENCE > 1:
        for item in items:
            limit = item.get_closest_marker("timeout")
            seconds = limit.args[0] if limit else float(config.getini("timeout"))
            item.add_marker(pytest.mark.timeout(PATIENCE * seconds), append=False)
    items.sort(key=lambda item: LONG.index(name) if (name := item.path.parent.name) in LONG else 9)
    if FULL:
        return
    full = [item for item in items if item.get_closest_marker("full")]
    if full:
        config.hook.pytest_deselected(items=full)
        items[:] = [item for item in items if item not in set(full)]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Do what the first test would have to wait for, outside of its time."""
    if any(item.path.parent.name in LONG for item in session.items):
        from testkit import preloaded

        preloaded.start()
    # Keep garbage collection from scanning vLLM's modules each time.
    gc.collect()
    gc.freeze()
