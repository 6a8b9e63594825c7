"""How functions of vLLM are replaced: once each, recognisably, and a group of them or none.

A module that the process hasn't imported yet may never be needed in it, and vLLM's are heavy:
`after_import` waits until it is imported.
"""

import functools
import importlib
import importlib.abc
import importlib.machinery
import operator
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from sparksched import compat
from sparksched.compat import fingerprints, source
from sparksched.compat.seams import Group, Seam
from sparksched.compat.source import MARK, module_of

Function = Callable[..., Any]

_reported: set[str] = set()
"""Names of the groups that were left out, and whose reason was logged."""


def replace(owner: object, name: str, make: Callable[[Any], Function]) -> None:
    """Put `make(original)` in the place of a function of vLLM's, unless that was done before."""
    original = getattr(owner, name)
    if hasattr(original, MARK):
        return
    replacement = make(original)
    setattr(replacement, MARK, original)
    setattr(owner, name, replacement)


def install(group: Group) -> None:
    """Have a group's functions replaced as soon as their modules are imported.

    If one is missing, or not as it is known, all stay vLLM's, with a warning.

    Raises:
        RuntimeError: instead of the warning, with `SPARKSCHED_STRICT=1`; later from an import.

    """
    for module in group.modules:
        if module not in sys.modules and not source.installed().has_module(module):
            _leave(group, f"{module} is missing")
            return
    for module in group.modules:
        after_import(module, functools.partial(_replace_in, group))


def apply(group: Group) -> None:
    """Replace a group's functions in those of its modules that are imported."""
    for name in group.modules:
        module = sys.modules.get(name)
        if module is not None:
            _replace_in(group, module)


def _replace_in(group: Group, module: ModuleType) -> None:
    """Replace what a group has to replace now that a module is imported; or leave all of it."""
    due = [it for it in group.functions if _is_due(it, group, module.__name__)]
    if all(original_of(seam.target) is not None for seam in due):
        return
    problem = fingerprints.difference(group)
    try:
        if problem is None:
            if group.prepare and module.__name__ == group.modules[0]:
                _ours(group, group.prepare)()
            for seam in due:
                owner, name = owner_of(seam.target)
                replace(owner, name, _ours(group, seam.by))
    except Exception as error:  # so different that our functions can't even be made
        problem = repr(error)
    if problem is not None:
        _leave(group, problem)


def _is_due(seam: Seam, group: Group, imported: str) -> bool:
    module = module_of(seam.target)
    return module == imported or (module not in group.modules and imported == group.modules[0])


def _leave(group: Group, problem: str) -> None:
    """Leave a group to vLLM, or give it back, and say so once."""
    for seam in group.functions:
        original = original_of(seam.target)
        if original is not None:
            owner, name = owner_of(seam.target)
            setattr(owner, name, original)
    if group.name not in _reported:
        _reported.add(group.name)
        compat.warn_or_raise(
            warning=f"sparksched: {group.instead}: {problem}",
            error=f"sparksched: {group.instead}, because {problem}",
        )


def original_of(target: str) -> Function | None:
    """Return vLLM's own function if it is replaced in this process, else None."""
    if module_of(target) not in sys.modules:
        return None
    try:
        owner, name = owner_of(target)
        original: Function | None = getattr(getattr(owner, name), MARK, None)
    except AttributeError:
        return None
    return original


def owner_of(target: str) -> tuple[Any, str]:
    """Return the module or class that has a target, and its name there."""
    module, _, path = target.partition(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(module)
    return functools.reduce(getattr, owners, owner), name


def _ours(group: Group, name: str) -> Function:
    """Import a function of ours."""
    module, _, path = name.partition(":")
    imported = importlib.import_module(f"{group.package}.{module}")
    function: Function = operator.attrgetter(path)(imported)
    return function


def after_import(name: str, change: Callable[[ModuleType], None]) -> None:
    """Change a module: now if it is imported, else as soon as it is."""
    module = sys.modules.get(name)
    if module is not None:
        change(module)
        return
    finder = next((it for it in sys.meta_path if isinstance(it, _ChangingFinder)), None)
    if finder is None:
        finder = _ChangingFinder()
        sys.meta_path.insert(0, finder)
    finder.changes[name].append(change)


class _ChangingFinder(importlib.abc.MetaPathFinder):
    """Finds some modules as usual, and has them changed once they are loaded."""

    def __init__(self) -> None:
        self.changes = defaultdict[str, list[Callable[[ModuleType], None]]](list)
        """By name of the module."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.changes:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                for change in self.changes[fullname]:
                    change(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
