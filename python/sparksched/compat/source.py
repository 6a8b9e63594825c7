"""vLLM's source, read without importing it: where a name is defined, and what its code is.

A *target* is a module's name, or that, a colon and a path in it: `vllm.v1.request:Request`. In a
class its bases are looked at, too, and what its methods set on `self`. `.*` behind a class stands
for the fields that it declares, inherited ones first, without its methods.
"""

import ast
import functools
import hashlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Definition = _Function | ast.ClassDef

_IGNORED_FIELDS: Final = ("ctx", "kind", "type_comment")
"""Of nodes of the syntax tree: they follow from the rest, or say nothing to the interpreter."""


def module_of(target: str) -> str:
    """Return the module of a target."""
    return target.partition(":")[0]


def dotted(target: str) -> str:
    """Return a target's name as Python writes it."""
    return target.replace(":", ".")


MARK: Final = "__sparksched__"
"""An attribute of every function of vLLM's that has been replaced: the original."""


class MissingError(LookupError):
    """vLLM doesn't have what it was asked for; the message is its name."""


class Found(NamedTuple):
    """What is known of a target."""

    fingerprint: str
    """Stays the same as long as the code does, whatever Python reads it: docstrings, comments and
    the layout are no part of it."""
    definitions: tuple[str, ...]
    """Paths of the functions and classes in it, its own first: a process has these without an
    instance."""


class Sources:
    """One vLLM's source."""

    def __init__(self, folder: Path) -> None:
        """Take the folder of the package `vllm`."""
        self.folder = folder
        self._modules: dict[str, ast.Module] = {}
        self._found: dict[str, Found] = {}

    def has_module(self, name: str) -> bool:
        """Return whether a module is there."""
        return self._path(name) is not None

    def module(self, name: str) -> ast.Module:
        """Return a module's syntax tree; raise MissingError if there is none."""
        if name not in self._modules:
            path = self._path(name)
            if path is None:
                raise MissingError(name)
            self._modules[name] = ast.parse(path.read_bytes())
        return self._modules[name]

    def find(self, target: str) -> list[ast.AST]:
        """Return the syntax that makes a target; raise MissingError if there is none."""
        return self.place(target)[1]

    def place(self, target: str) -> tuple[str, list[ast.AST]]:
        """Return the module that has a target, and the syntax that makes it."""
        module, _, path = target.partition(":")
        if not path:
            return module, [*self.module(module).body]
        first, *rest = path.removesuffix(".*").split(".")
        module, found = self._global(module, first)
        for name in rest:
            owner = found[-1] if found else None
            module, found = (
                self._member(module, owner, name)
                if isinstance(owner, ast.ClassDef)
                else (module, [])
            )
        made: list[ast.AST] = [*found]
        if path.endswith(".*") and made:
            made = list(self._fields(module, found[-1]))
        if not made:
            raise MissingError(dotted(target))
        return module, made

    def look_up(self, target: str) -> Found:
        """Return what is known of a target; raise MissingError if it isn't there."""
        if target not in self._found:
            found = self.find(target)
            self._found[target] = Found(fingerprint(found), tuple(_definitions(target, found)))
        return self._found[target]

    def forget_trees(self) -> None:
        """Free the syntax trees, which take far more memory than their text."""
        self._modules.clear()

    def _fields(self, module: str, cls: ast.stmt) -> Iterator[ast.AST]:
        if isinstance(cls, ast.ClassDef):
            for base_module, base in reversed(list(self.bases(module, cls))):
                yield from self._fields(base_module, base)
            yield from (it for it in cls.body if isinstance(it, ast.AnnAssign))

    def bases(self, module: str, cls: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
        """Yield the classes of vLLM's that a class is made of, with their modules."""
        for base in cls.bases:
            name = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(name, ast.Name):
                place, found = self._global(module, name.id)
                if found and isinstance(found[-1], ast.ClassDef):
                    yield place, found[-1]

    def _global(self, module: str, name: str) -> tuple[str, list[ast.stmt]]:
        """Find what a module has under a name, and the module that it has it from."""
        body = self.module(module).body
        found = list(_defined(body, name))
        if found:
            return module, found
        for statement in with_conditional(body):
            if isinstance(statement, ast.ImportFrom):
                origin = self._origin(module, statement)
                for alias in statement.names:
                    if (alias.asname or alias.name) == name and self.has_module(origin):
                        return self._global(origin, alias.name)
        return module, []

    def _origin(self, module: str, statement: ast.ImportFrom) -> str:
        """Return the module that a statement in another imports from."""
        if statement.level == 0:
            return statement.module or ""
        path = self._path(module)
        parents = module.split(".")
        is_package = path is not None and path.stem == "__init__"
        parents = parents[: len(parents) - statement.level + is_package]
        return ".".join([*parents, *filter(None, [statement.module])])

    def _member(self, module: str, cls: ast.ClassDef, name: str) -> tuple[str, list[ast.stmt]]:
        """Find what a class has under a name, and the module that has it from."""
        found = list(_defined(cls.body, name)) or list(_set_on_self(cls, name))
        if found:
            return module, found
        for base_module, base in self.bases(module, cls):
            place, found = self._member(base_module, base, name)
            if found:
                return place, found
        return module, []

    def _path(self, name: str) -> Path | None:
        path = self.folder.parent.joinpath(*name.split("."))
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if candidate.is_file():
                return candidate
        return None


@functools.cache
def installed() -> Sources:
    """Return the source of the vLLM that this process has, or would import."""
    module = sys.modules.get("vllm")
    spec = importlib.util.find_spec("vllm") if module is None else module.__spec__
    locations = None if spec is None else spec.submodule_search_locations
    if not locations:
        raise MissingError("vllm")
    return Sources(Path(next(iter(locations))))


def _defined(body: list[ast.stmt], name: str) -> Iterator[ast.stmt]:
    """Yield the statements that give a name its value, also those under a condition."""
    for statement in with_conditional(body):
        if isinstance(statement, _Definition):
            if statement.name == name:
                yield statement
        elif any(isinstance(it, ast.Name) and it.id == name for it in _assigned_to(statement)):
            yield statement


def with_conditional(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module or class, also those under a condition."""
    for statement in body:
        if isinstance(statement, ast.If | ast.Try):
            yield from with_conditional([*statement.body, *statement.orelse])
        else:
            yield statement


def _definitions(target: str, found: Sequence[ast.AST]) -> Iterator[str]:
    path = target.partition(":")[2]
    if path.endswith(".*"):
        yield path.removesuffix(".*")
    elif not path:
        yield from _defined_in([it for it in found if isinstance(it, ast.stmt)], "")
    elif isinstance(found[-1], _Definition):
        yield path
        if isinstance(found[-1], ast.ClassDef):
            yield from _defined_in(found[-1].body, f"{path}.")


def _defined_in(body: list[ast.stmt], prefix: str) -> Iterator[str]:
    for node in body:
        if isinstance(node, _Definition):
            yield f"{prefix}{node.name}"
            if isinstance(node, ast.ClassDef):
                yield from _defined_in(node.body, f"{prefix}{node.name}.")


def _set_on_self(cls: ast.ClassDef, name: str) -> Iterator[ast.stmt]:
    for statement in ast.walk(cls):
        if isinstance(statement, ast.stmt):
            for target in _assigned_to(statement):
                if (
                    isinstance(target, ast.Attribute)
                    and target.attr == name
                    and isinstance(target.value, ast.Name)
                    and target.value.id == "self"
                ):
                    yield statement


def _assigned_to(statement: ast.stmt) -> list[ast.expr]:
    if isinstance(statement, ast.Assign):
        return statement.targets
    return [statement.target] if isinstance(statement, ast.AnnAssign) else []


def fingerprint(code: Sequence[ast.AST]) -> str:
    """Return what stays the same as long as the code does, whatever Python has read it."""
    words: list[str] = []
    _add_words([*code], words)
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]


def is_docstring(node: object) -> bool:
    """Return whether a statement is nothing but a text."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _add_words(node: object, words: list[str]) -> None:
    """Add what a syntax tree is made of. Python's own `dump` differs between its versions."""
    if isinstance(node, list):
        words.append("[")
        for it in node:
            if not is_docstring(it):
                _add_words(it, words)
        words.append("]")
    elif isinstance(node, ast.AST):
        words.append(type(node).__name__)
        for field in node._fields:
            value = getattr(node, field, None)
            if field not in _IGNORED_FIELDS and value is not None and value != []:
                words.append(field)
                _add_words(value, words)
    else:
        words.append(repr(node))
