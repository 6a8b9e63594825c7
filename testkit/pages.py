"""Tables in Markdown that are written anew, below marks in a page."""

from collections.abc import Callable


def with_tables(text: str, rows_below: Callable[[str], list[str] | None]) -> str:
    """Return a page's text with its tables anew.

    Args:
        text: The page's.
        rows_below: Is asked for the rows below each line; None if the line is no mark.

    """
    written: list[str] = []
    is_replaced = False
    for line in text.splitlines():
        if is_replaced and line.startswith("|"):
            continue
        written.append(line)
        rows = rows_below(line)
        written += rows or ()
        is_replaced = rows is not None
    return "\n".join(written) + "\n"
