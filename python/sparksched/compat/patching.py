"""How functions of vLLM are replaced: once each, and recognisably.

A module that the process hasn't imported yet may never be needed in it, and vLLM's are heavy:
`after_import` waits until it is imported.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
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


def after_import(name: str, change: Callable[[ModuleType], None]) -> None:
    """Change a module: now if it is imported, else as soon as it is. Once for each change."""
    module = sys.modules.get(name)
    if module is not None:
        change(module)
        return
    # One finder for each module: it doesn't ask the others.
    for finder in sys.meta_path:
        if isinstance(finder, _ChangingFinder) and finder.name == name:
            finder.add(change)
            return
    sys.meta_path.insert(0, _ChangingFinder(name, change))


class _ChangingFinder(importlib.abc.MetaPathFinder):
    """Finds one module as usual, and has it changed once it is loaded."""

    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self.name = name
        self._changes = [change]

    def add(self, change: Callable[[ModuleType], None]) -> None:
        """Make another change, after the others."""
        if change not in self._changes:
            self._changes.append(change)

    def _change(self, module: ModuleType) -> None:
        for change in self._changes:
            change(module)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            _call_after_loading(spec.loader, self._change)
        return spec


def _call_after_loading(
    loader: importlib.abc.Loader, callback: Callable[[ModuleType], None]
) -> None:
    load = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        load(module)
        callback(module)

    loader.exec_module = exec_module  # type: ignore[method-assign]
