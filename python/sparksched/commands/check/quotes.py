"""vLLM's messages without what they quote of the arguments, among which passwords may be.

What a check says is often shown to others.
"""

import re
from typing import Final

HIDDEN: Final = "(hidden)"

_CREDENTIALS: Final = re.compile(r"(?<=://)[^/\s@]+(?=@)")
"""Of a URL: `user:password`."""

_INPUT: Final = re.compile(r"(?<=input_value=).*?(?=, input_type=)", re.DOTALL)
"""What pydantic has found to be wrong, or a part of it."""

_UNKNOWN: Final = re.compile(r"(?<=unrecognized arguments: ).*", re.DOTALL)
"""Arguments that argparse doesn't know: the name of one may have a typing error."""


def without_quotes(message: str) -> str:
    """Return a message with `HIDDEN` in the place of credentials and values."""
    message = _CREDENTIALS.sub(HIDDEN, message)
    message = _INPUT.sub(HIDDEN, message)
    return _UNKNOWN.sub(_names_only, message)


def _names_only(arguments: re.Match[str]) -> str:
    words = arguments[0].split()
    names = [word.partition("=")[0] for word in words if word.startswith("-")]
    return f"{' '.join(names or [HIDDEN])}\n"
