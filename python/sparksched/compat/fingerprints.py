"""Whether the code that sparksched replaces or relies on is that of a release that it knows.

A local build of a known release has its version, whatever was changed in it. So code is compared,
by fingerprints of its source: `fingerprints.json` has those of each supported release. They don't
show what another plugin has replaced in this process, so classes must be vLLM's own.
"""

import inspect
import json
import sys
from collections.abc import Mapping
from importlib import resources
from typing import Any, Final

from sparksched.compat import releases, source
from sparksched.compat.rule import Unsupported
from sparksched.compat.seams import NATIVE_ENGINE, Group
from sparksched.compat.source import MARK, Found, MissingError, dotted, module_of

KNOWN: Final[Mapping[str, Mapping[str, str]]] = json.loads(
    (resources.files(__package__) / "fingerprints.json").read_text()
)
"""Fingerprints by release and target; without those that a release doesn't have."""


def difference(group: Group) -> str | None:
    """Return in words what a group needs of vLLM and doesn't find, or finds changed; else None."""
    try:
        return None if group.any_release else _changed(group)
    finally:
        source.installed().forget_trees()


def unsupported_code() -> Unsupported | None:
    """Compare the code whose decisions the native scheduler makes as well, or calls."""
    problem = difference(NATIVE_ENGINE)
    return None if problem is None else Unsupported("this build of vLLM", problem)


def _changed(group: Group) -> str | None:
    release = releases.installed()
    known = KNOWN.get(release, {})
    try:
        for target in group.code:
            if target in known:
                found = source.installed().look_up(target)
                problem = _changed_in_this_process(group, target, found)
                if problem is not None:
                    return problem
                if found.fingerprint != known[target]:
                    return f"{dotted(target)} is not that of vLLM {release}"
        for target in group.values:
            source.installed().look_up(target)
    except MissingError as error:
        return f"{error} is missing"
    except (OSError, SyntaxError, ValueError) as error:
        return f"vLLM's source can't be read: {error}"
    return None


def _changed_in_this_process(group: Group, target: str, found: Found) -> str | None:
    """Return in words what another plugin has removed or replaced: the source doesn't show it."""
    module = sys.modules.get(module_of(target))
    if module is None or _is_being_imported(module):
        return None
    for path in found.definitions:
        try:
            value = _value(module, path)
        except LookupError:
            return f"{module.__name__}.{path} is missing"
        if (isinstance(value, type) or group.bypasses) and not _is_vllms(value):
            return f"{module.__name__}.{path} is not vLLM's own"
    return None


def _value(owner: Any, path: str) -> Any:
    """Return what is at a path, as a class keeps it; raise LookupError if nothing is."""
    value = owner
    for name in path.split("."):
        # Each class has some names from `object`.
        places = value.__mro__[:-1] if isinstance(value, type) else (value,)
        place = next((it for it in places if name in vars(it)), None)
        if place is None:
            raise LookupError(path)
        value = vars(place)[name]
    return value


def _is_vllms(value: Any) -> bool:
    if isinstance(value, type):
        return value.__module__.startswith("vllm.")
    if isinstance(value, property):
        value = value.fget
    function = getattr(value, "__func__", getattr(value, "func", value))
    function = getattr(function, MARK, function)
    if not hasattr(function, "__code__"):  # cached, for one
        function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    # Some are made by the decorator of a class.
    return code is not None and code.co_filename.startswith((str(source.installed().folder), "<"))


def _is_being_imported(module: Any) -> bool:
    # It imports another one of its group first. It is looked at again when it is through.
    return getattr(getattr(module, "__spec__", None), "_initializing", False)
