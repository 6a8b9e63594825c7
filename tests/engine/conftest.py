import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from .executor import write_model_directory


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture
def warnings_of_sparksched() -> Iterator[list[str]]:
    """Collect what sparksched logs at WARNING and above.

    At its own logger: vLLM gives the one above new handlers when the process's first engine is built.
    """
    messages: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Collector(logging.WARNING)
    logger = logging.getLogger("vllm.sparksched")
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)
