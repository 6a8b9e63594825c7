import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import vllm.logger  # noqa: F401 - sets vLLM's handlers, and with that removes all others
from logs import collected

from testkit.executor import write_model_directory


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture
def warnings_of_sparksched() -> Iterator[list[str]]:
    with collected("vllm.sparksched", level=logging.WARNING) as lines:
        yield lines
