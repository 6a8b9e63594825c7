import contextlib
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
    files = left_in_shm()
    with nothing_stays_behind():
        yield
        # The tracebacks in them would keep front ends alive.
        caplog.get_records("call").clear()
    assert left_in_shm() <= files


def left_in_shm() -> set[str]:
    """Return the files of shared memory that no process has mapped: engines may run beside this."""
    files = set(os.listdir("/dev/shm"))
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # the process may have ended
            text = maps.read_text()
            files = {name for name in files if f"/dev/shm/{name}" not in text}
    return files
