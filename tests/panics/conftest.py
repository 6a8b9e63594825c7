import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from transport.conftest import config, model_directory
from transport.engines import forkserver, nothing_stays_behind

from .extension import build

__all__ = ["config", "model_directory"]


@pytest.fixture(scope="session")
def extension() -> Path:
    """Build the extension with points at which it can be made to panic."""
    if shutil.which("cargo") is None:
        pytest.skip("cargo is needed to build an extension that can be made to panic")
    # What the parent of all processes opens with its first child is not counted as left behind.
    first = forkserver.Process(target=os.getpid)
    first.start()
    first.join()
    return build()


@pytest.fixture(autouse=True)
def _nothing_stays_behind(extension: Path, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with nothing_stays_behind():
        yield
        # The tracebacks in them would keep front ends alive.
        caplog.get_records("call").clear()
