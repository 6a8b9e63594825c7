"""What has changed between two vLLMs, of all that sparksched replaces, relies on or knows.

Each is read as source, not imported: an unpacked release will do.

    python -m sparksched.compat.drift installed vllm-0.34.0.tar.gz
"""

import argparse
import ast
import difflib
import json
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from sparksched.compat import fingerprints, known_shapes, releases, seams, source
from sparksched.compat.seams import Group
from sparksched.compat.settings import KNOWN_SETTINGS
from sparksched.compat.source import MissingError, Sources, dotted, with_conditional

_PACKAGE: Final = Path(__file__).resolve().parents[1]
_RECORDED: Final = Path(__file__).with_name("fingerprints.json")
_CONFIG: Final = "vllm.config:VllmConfig"

Members = dict[str, str]
"""Names in their order, and the text that stands behind each: a default, a value."""


def main(arguments: list[str] | None = None) -> int:
    """Print what has changed; return 1 if anything has, 2 if a vLLM can't be read."""
    parser = argparse.ArgumentParser(
        prog="python -m sparksched.compat.drift",
        description="List what has changed between two releases of vLLM, of all that sparksched "
        "replaces, relies on or knows.",
    )
    where = "`installed`, a folder, a wheel or a source distribution"
    parser.add_argument("old", help=f"{where}: a release that is supported")
    parser.add_argument("new", help=f"{where}: the one to compare with it")
    parser.add_argument("--diff", action="store_true", help="show how code has changed")
    parser.add_argument(
        "--record", metavar="RELEASE", help="store the new one's fingerprints under this release"
    )
    asked = parser.parse_args(arguments)
    with ExitStack() as stack:
        try:
            old, new = (_open(name, stack) for name in (asked.old, asked.new))
        except (OSError, MissingError, tarfile.TarError, zipfile.BadZipFile) as error:
            print(f"drift: {error}", file=sys.stderr)
            return 2
        found = list(changes(old, new, with_diff=asked.diff))
        print("\n".join(found or ["Nothing has changed."]))
        if asked.record:
            _record(new, asked.record)
    return int(bool(found))


def changes(old: Sources, new: Sources, with_diff: bool = False) -> Iterator[str]:
    """Yield lines on what has changed."""
    groups = {
        "Functions that are replaced": _changed_code(old, new, _replaced, with_diff),
        "Values that are set": _changed_code(old, new, _set, with_diff),
        "Code that is relied on": _changed_code(old, new, _relied_on, with_diff),
        "Shapes": _changed_shapes(old, new),
        "Settings": _changed_settings(old, new),
        "Names that sparksched imports and the new one lacks": _lost_imports(old, new),
    }
    for title, lines in groups.items():
        for number, line in enumerate(lines):
            if number == 0:
                yield f"{title}:"
            yield f"  {line}"


# ----------------------------------------------------------------------------------------
# Code
# ----------------------------------------------------------------------------------------


def _replaced(group: Group) -> tuple[str, ...]:
    return tuple(seam.target for seam in group.functions)


def _set(group: Group) -> tuple[str, ...]:
    return tuple(seam.target for seam in group.values)


def _relied_on(group: Group) -> tuple[str, ...]:
    return group.relied_on


def _changed_code(
    old: Sources,
    new: Sources,
    targets_of: Callable[[Group], tuple[str, ...]],
    with_diff: bool,
) -> Iterator[str]:
    seen: set[str] = set()
    for group in seams.GROUPS:
        for target in targets_of(group):
            if target in seen or not target.startswith("vllm"):
                continue
            seen.add(target)
            before, after = _fingerprint(old, target), _fingerprint(new, target)
            if before == after:
                continue
            yield f"{dotted(target)} ({group.name}): {_what_changed(old, new, target)}"
            if with_diff and before and after:
                lines = difflib.unified_diff(old.code(target), new.code(target), lineterm="")
                yield from (f"    {line}" for line in lines)


def _fingerprint(sources: Sources, target: str) -> str | None:
    try:
        return sources.look_up(target).fingerprint
    except MissingError:
        return None


def _what_changed(old: Sources, new: Sources, target: str) -> str:
    if _fingerprint(old, target) is None:
        return "new"
    if _fingerprint(new, target) is None:
        return "gone"
    parts = [_definitions(sources, target) for sources in (old, new)]
    before, after = parts
    changed = [name for name in before if name in after and before[name] != after[name]]
    words = [
        f"{word} {', '.join(names)}"
        for word, names in (
            ("changed:", changed),
            ("new:", [name for name in after if name not in before]),
            ("gone:", [name for name in before if name not in after]),
        )
        if names
    ]
    return "; ".join(words) or "changed"


def _definitions(sources: Sources, target: str) -> dict[str, str]:
    """Return the fingerprints of the functions in a class or module, by their names in it."""
    found = sources.find(target)
    if ":" in target:
        owner = found[-1]
        return _functions(owner.body) if isinstance(owner, ast.ClassDef) else {}
    return _functions([it for it in found if isinstance(it, ast.stmt)])


def _functions(body: list[ast.stmt]) -> dict[str, str]:
    functions: dict[str, str] = {}
    for node in with_conditional(body):
        if isinstance(node, ast.ClassDef):
            inner = _functions(node.body)
            functions |= {f"{node.name}.{name}": code for name, code in inner.items()}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions[node.name] = source.fingerprint([node])
    return functions


# ----------------------------------------------------------------------------------------
# Shapes
# ----------------------------------------------------------------------------------------


def _changed_shapes(old: Sources, new: Sources) -> Iterator[str]:
    tables = (
        (known_shapes.STRUCTURES, _fields),
        (known_shapes.ENUMS, _values),
        (known_shapes.FUNCTIONS, _parameters),
        (known_shapes.CONSTRUCTORS, _constructor_parameters),
        (known_shapes.ABSTRACT_METHODS, _abstract_methods),
        (known_shapes.FRONT_END, _attributes),
    )
    for table, members_of in tables:
        for name in table:
            target = ":".join(name.rsplit(".", 1))
            try:
                before = members_of(old, target)
            except MissingError:
                yield f"{name}: the old one lacks it"
                continue
            try:
                after = members_of(new, target)
            except MissingError:
                yield f"{name}: gone"
                continue
            for difference in _differences(before, after):
                yield f"{name}: {difference}"


def _differences(before: Members, after: Members) -> Iterator[str]:
    for name, value in after.items():
        if name not in before:
            yield f"new: {name}{value and f' = {value}'}"
        elif before[name] != value:
            yield f"{name} is {value or 'required'}, was {before[name] or 'required'}"
    for name in before:
        if name not in after:
            yield f"gone: {name}"
    common = [name for name in before if name in after]
    if common != [name for name in after if name in before]:
        yield "the order has changed"


def _class(sources: Sources, target: str) -> tuple[str, ast.ClassDef]:
    module, found = sources.place(target)
    if not isinstance(found[-1], ast.ClassDef):
        raise MissingError(dotted(target))
    return module, found[-1]


def _fields(sources: Sources, target: str) -> Members:
    """Return the fields of a dataclass or a structure of msgspec's, inherited ones first."""
    return _fields_of(sources, *_class(sources, target))


def _fields_of(sources: Sources, module: str, cls: ast.ClassDef) -> Members:
    members: Members = {}
    for base_module, base in reversed(list(sources.bases(module, cls))):
        members |= _fields_of(sources, base_module, base)
    for statement in cls.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if not ast.unparse(statement.annotation).startswith(("ClassVar", "InitVar")):
            default = statement.value
            members[statement.target.id] = "" if default is None else ast.unparse(default)
    return members


def _values(sources: Sources, target: str) -> Members:
    _, cls = _class(sources, target)
    return {
        name.id: ast.unparse(statement.value)
        for statement in cls.body
        if isinstance(statement, ast.Assign)
        for name in statement.targets
        if isinstance(name, ast.Name)
    }


def _parameters(sources: Sources, target: str) -> Members:
    function = sources.find(target)[-1]
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        raise MissingError(dotted(target))
    arguments = function.args
    names = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return {it.arg: "" for it in names if it.arg != "self"}


def _constructor_parameters(sources: Sources, target: str) -> Members:
    return _parameters(sources, f"{target}.__init__")


def _abstract_methods(sources: Sources, target: str) -> Members:
    _, cls = _class(sources, target)
    return {
        it.name: ""
        for it in cls.body
        if isinstance(it, ast.FunctionDef | ast.AsyncFunctionDef)
        and any("abstractmethod" in ast.unparse(decorator) for decorator in it.decorator_list)
    }


def _attributes(sources: Sources, target: str) -> Members:
    """Return fields, and what the constructor takes and sets."""
    members = dict.fromkeys(_fields(sources, target), "")
    try:
        (constructor,) = sources.find(f"{target}.__init__")
    except MissingError:
        return members
    members |= _constructor_parameters(sources, target)
    for node in ast.walk(constructor):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            members[node.attr] = ""
    return members


# ----------------------------------------------------------------------------------------
# Settings, and what is imported
# ----------------------------------------------------------------------------------------


def _changed_settings(old: Sources, new: Sources) -> Iterator[str]:
    for section in KNOWN_SETTINGS:
        before, after = (_settings(sources, section) for sources in (old, new))
        for difference in _differences(before, after):
            yield f"{section or 'VllmConfig'}: {difference}"
        for name in after:
            if name not in KNOWN_SETTINGS[section]:
                yield f"{section or 'VllmConfig'}: {name} is not in the allow-list"


def _settings(sources: Sources, section: str) -> Members:
    """Return a section's settings; none if there is no such section."""
    module, config = _class(sources, _CONFIG)
    if not section:
        return _fields_of(sources, module, config)
    for statement in config.body:
        if isinstance(statement, ast.AnnAssign) and ast.unparse(statement.target) == section:
            for name in ast.walk(statement.annotation):
                if isinstance(name, ast.Name):
                    try:
                        return _fields(sources, f"{module}:{name.id}")
                    except MissingError:
                        continue
    return {}


def _lost_imports(old: Sources, new: Sources) -> Iterator[str]:
    """Yield what our modules import from vLLM, where the old one has it and the new one doesn't."""
    lost = {
        target
        for path in _PACKAGE.rglob("*.py")
        for target in _imported(ast.parse(path.read_bytes()))
        if _has(old, target) and not _has(new, target)
    }
    yield from (dotted(target) for target in sorted(lost))


def _imported(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("vllm"):
            yield from (f"{node.module}:{alias.name}" for alias in node.names)


def _has(sources: Sources, target: str) -> bool:
    try:
        sources.find(target)
    except MissingError:
        return sources.has_module(dotted(target))
    return True


# ----------------------------------------------------------------------------------------
# Where a vLLM is
# ----------------------------------------------------------------------------------------


def _open(name: str, stack: ExitStack) -> Sources:
    """Return the source of what is named; raise OSError or MissingError if there is none."""
    if name == "installed":
        return Sources(source.installed().folder)
    path = Path(name)
    if path.is_file():
        path = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        _unpack(Path(name), path)
    for folder in (path, path / "vllm", *path.glob("*/vllm")):
        if folder.name == "vllm" and (folder / "__init__.py").is_file():
            return Sources(folder)
    raise MissingError(f"there is no vLLM in {name}")


def _unpack(archive: Path, folder: Path) -> None:
    """Unpack the Python sources of a wheel or a source distribution."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(folder, [it for it in wheel.namelist() if it.endswith(".py")])
        return
    with tarfile.open(archive) as distribution:
        members = [it for it in distribution if it.isfile() and it.name.endswith(".py")]
        distribution.extractall(folder, members, filter="data")


def _record(sources: Sources, release: str) -> None:
    """Store fingerprints; those of releases that are supported no longer go."""
    code = sorted({it for group in seams.GROUPS for it in group.code if not group.any_release})
    found = {target: _fingerprint(sources, target) for target in code}
    known = {**fingerprints.KNOWN, release: {it: found[it] for it in code if found[it]}}
    kept = {it: known[it] for it in sorted(known) if it in (*releases.SUPPORTED, release)}
    _RECORDED.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
