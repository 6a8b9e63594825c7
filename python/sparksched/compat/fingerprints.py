"""Whether the code that sparksched replaces or relies on is that of a release that it knows.

A local build of a known release has its version, whatever was changed in it. So code is compared,
by fingerprints of its source: `fingerprints.json` has those of each supported release.
"""

import json
import sys
from collections.abc import Mapping
from importlib import resources
from typing import Any, Final

from sparksched.compat import releases, source
from sparksched.compat.rule import Unsupported
from sparksched.compat.seams import NATIVE_ENGINE, Group
from sparksched.compat.source import MissingError, dotted, module_of

KNOWN: Final[Mapping[str, Mapping[str, str]]] = json.loads(
    (resources.files(__package__) / "fingerprints.json").read_text()
)
"""Fingerprints by release and target; without those that a release doesn't have."""


def difference(group: Group) -> str | None:
    """Return in words what a group needs of vLLM and doesn't find, or finds changed; else None."""
    try:
        return _missing(group) or (None if group.any_release else _changed(group))
    finally:
        source.installed().forget_trees()


def unsupported_code() -> Unsupported | None:
    """Compare the code whose decisions the native scheduler makes as well, or calls."""
    problem = difference(NATIVE_ENGINE)
    return None if problem is None else Unsupported("this build of vLLM", problem)


def _missing(group: Group) -> str | None:
    for seam in group.functions:
        if not _is_there(seam.target):
            return f"{dotted(seam.target)} is missing"
    return None


def _changed(group: Group) -> str | None:
    release = releases.installed()
    known = KNOWN.get(release, {})
    try:
        for target in group.code:
            if target in known:
                found = source.installed().look_up(target)
                if found.is_definition and not _is_there(target):
                    raise MissingError(dotted(target))
                if found.fingerprint != known[target]:
                    return f"{dotted(target)} is not that of vLLM {release}"
        for seam in group.values:
            source.installed().look_up(seam.target)
    except MissingError as error:
        return f"{error} is missing"
    except (OSError, SyntaxError, ValueError) as error:
        return f"vLLM's source can't be read: {error}"
    return None


def _is_there(target: str) -> bool:
    """Return whether a module has something, if the process has imported the module."""
    owner: Any = sys.modules.get(module_of(target))
    path = target.partition(":")[2]
    if owner is None or _is_being_imported(owner) or not path:
        return True
    for name in path.split("."):
        # Each class has some names from `object`.
        places = owner.__mro__[:-1] if isinstance(owner, type) else (owner,)
        if not any(name in vars(place) for place in places):
            return False
        owner = getattr(owner, name)
    return True


def _is_being_imported(module: Any) -> bool:
    # It imports another one of its group first. It is looked at again when it is through.
    return getattr(getattr(module, "__spec__", None), "_initializing", False)
