import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import vllm.logger  # noqa: F401 - sets vLLM's handlers, and with that removes all others

from testkit.executor import write_model_directory


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture
def warnings_of_sparksched() -> Iterator[list[str]]:
    """Collect what reaches vLLM's own handler at WARNING: its logger does not propagate."""
    messages: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.name == "vllm.sparksched":
                messages.append(record.getMessage())

    handler = Collector(logging.WARNING)
    logger = logging.getLogger("vllm")
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)
