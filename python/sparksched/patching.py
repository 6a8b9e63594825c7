"""How functions of vLLM are replaced: once each, and recognisably."""

from collections.abc import Callable
from typing import Any, Final

MARK: Final = "__sparksched__"
"""An attribute of every function of vLLM's that has been replaced."""

Function = Callable[..., Any]


def replace(owner: object, name: str, make: Callable[[Any], Function]) -> None:
    """Put `make(original)` in the place of a function of vLLM's, unless that was done before."""
    original = getattr(owner, name)
    if hasattr(original, MARK):
        return
    replacement = make(original)
    setattr(replacement, MARK, True)
    setattr(owner, name, replacement)
