"""What is logged meanwhile: vLLM's loggers don't propagate, so pytest sees nothing of it."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def with_level(record: logging.LogRecord) -> str:
    return f"{record.levelname} {record.getMessage()}"


@contextmanager
def collected(
    of: str = "",
    *,
    level: int = logging.INFO,
    logger: str = "vllm",
    text: Callable[[logging.LogRecord], str] = logging.LogRecord.getMessage,
) -> Iterator[list[str]]:
    """Yield the lines that a logger gets from now on; `of` is the name of one below it."""
    lines: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if of in ("", record.name):
                lines.append(text(record))

    handler, its_logger = Collector(level), logging.getLogger(logger)
    its_logger.addHandler(handler)
    try:
        yield lines
    finally:
        its_logger.removeHandler(handler)
