"""What is kept of a failure that a log or a traceback tells of: the reason, which comes last."""

import re
from collections.abc import Iterator

TRACEBACK = "Traceback (most recent call last):"
LAST_LINES = 40
GAP = "..."

_PREFIX = re.compile(
    r"(?:\((?P<process>[^()]+ pid=\d+)\))?"
    r"(?: ?(?P<level>[A-Z]+) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]+\])?"
)
"""What vLLM puts before each line of what a process logs, also if that has many lines."""
_HARMLESS = ("DEBUG", "INFO", "WARNING")
_MARKS = re.compile(r"\s*[~^]+\s*")
"""Under a line of a traceback: which part of it."""


def log_excerpt(log: str) -> str:
    """Return the part of a server's log that most likely tells what went wrong.

    It is the first traceback, as one process's failure makes others fail. Several processes may log
    at once: lines of others that are among its own are left out.
    """
    lines = log.splitlines()
    begin = next((index for index, line in enumerate(lines) if _tells_of_failure(line)), None)
    if begin is None:
        return "\n".join(["its last lines:", *lines[-LAST_LINES:]])
    # They take most of the characters, and are the same on each line.
    bare = (line for line in _same_record(lines[begin:]) if not _MARKS.fullmatch(line))
    return "\n".join([lines[begin], *bare])


def shortened(text: str, limit: int) -> str:
    """Return a text's first line, and as many of its last ones as fit.

    Args:
        text: May be within the limit.
        limit: In characters. No line gets more than a third.

    """
    if len(text) <= limit:
        return text
    first, *others = (_cut(line, limit // 3) for line in text.splitlines())
    room = limit - len(first) - len("\n" + GAP)
    begin = len(others)
    while begin > 0 and room > len(others[begin - 1]):
        begin -= 1
        room -= len("\n" + others[begin])
    return "\n".join([first, *([GAP] if begin else []), *others[begin:]])


def _tells_of_failure(line: str) -> bool:
    return line.endswith(TRACEBACK) and _prefix(line)["level"] not in _HARMLESS


def _same_record(lines: list[str]) -> Iterator[str]:
    """Return what follows the first line of what a process logged at once, without prefixes."""
    own = _prefix(lines[0])
    for line in lines[1:]:
        prefix = _prefix(line)
        if prefix[0] == own[0]:
            yield line[prefix.end() :].removeprefix(" " if own[0] else "")
        elif not own[0] or prefix["process"] == own["process"]:
            return


def _prefix(line: str) -> re.Match[str]:
    """Return what stands before a line, which may be nothing."""
    found = _PREFIX.match(line)
    assert found is not None  # every part is optional
    return found


def _cut(line: str, limit: int) -> str:
    return line if len(line) <= limit else line[: limit - len(GAP)] + GAP
