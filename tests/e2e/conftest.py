"""Models of real engines compute with one thread each, on any processor.

vLLM would bind each to a processor of its own, as if it were alone: here two files run at a time.
"""

import os
from collections.abc import Iterator
from unittest import mock

import pytest

UNBOUND = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session", autouse=True)
def _unbound() -> Iterator[None]:
    with mock.patch.dict(os.environ, UNBOUND):
        yield
