"""Pages whose tables stand below marks: each ends at the first line that is no part of it."""

import re
from collections.abc import Callable, Sequence


def tables_anew(
    text: str, mark: re.Pattern[str], lines_of: Callable[[re.Match[str]], Sequence[str]]
) -> str:
    """Return a page's text with the table below each mark anew."""
    written: list[str] = []
    is_replaced = False
    for line in text.splitlines():
        if is_replaced and line.startswith("|"):
            continue
        is_replaced = False
        written.append(line)
        if found := mark.fullmatch(line):
            written += lines_of(found)
            is_replaced = True
    return "\n".join(written) + "\n"
