"""Panics in the extension, as tests want them.

PyO3 gives Python a panic as a `PanicException`, and when Rust code meets one in an object that it
was given, it goes on as a panic. So such an object lets any function of the extension panic.
"""

import contextlib
import functools
from typing import Any

from sparksched import _core

TEXT = "a test wants a panic"


class Panicking:
    """Panics in whatever Rust code looks at it."""

    def __getattr__(self, _name: str) -> Any:
        raise _panic_exception()(TEXT)

    def __bool__(self) -> bool:
        raise _panic_exception()(TEXT)

    def __index__(self) -> int:
        raise _panic_exception()(TEXT)

    def __iter__(self) -> Any:
        raise _panic_exception()(TEXT)


@functools.cache
def _panic_exception() -> type[BaseException]:
    """Return the exception that is our extension's: each one that uses PyO3 has its own."""
    for kind in BaseException.__subclasses__():
        if kind.__name__ == "PanicException":
            try:
                _core.read_prompt(_Raising(kind), extra_keys=None)
            except RuntimeError:
                return kind
            except kind:
                continue
    raise AssertionError("the extension has no PanicException")


class _Raising:
    def __init__(self, kind: type[BaseException]) -> None:
        self._kind = kind

    @property
    def request_id(self) -> str:
        raise self._kind(TEXT)


# The first error that PyO3 meets makes the class.
with contextlib.suppress(AttributeError):
    _core.read_prompt(object(), extra_keys=None)
