"""The fixtures that vLLM's scheduler tests take from its `conftest.py`."""

import logging
from collections.abc import Iterator
from unittest import mock

import pytest


@pytest.fixture
def caplog_vllm(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Capture what vLLM logs: its logger keeps messages from pytest's."""
    propagates = mock.patch.object(logging.getLogger("vllm"), "propagate", True)
    with propagates, caplog.at_level(logging.INFO):
        yield caplog


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Shorten a test's 20,000 steps: they take minutes, on vLLM's scheduler as well."""
    for item in items:
        if item.path.name == "test_priority_scheduler_random.py":
            item.module.range = lambda stop: range(min(stop, 300))
