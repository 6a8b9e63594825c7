"""Compares the shapes of vLLM's structures with those that sparksched knows."""

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from sparksched.compat import releases
from sparksched.compat.known_shapes import (
    ABSTRACT_METHODS,
    ADDED,
    ANY,
    CONSTRUCTORS,
    ENUMS,
    FRONT_END,
    FUNCTIONS,
    REQUIRED,
    STRUCTURES,
    Added,
    Shape,
)
from sparksched.compat.rule import Unsupported

if TYPE_CHECKING:
    import msgspec

_ShapeReader = Callable[[type[Any]], Shape]


def known_shape(qualified_name: str, shape: Shape) -> Shape:
    """Return a shape of the tables as it is in the installed release."""
    for release, additions in ADDED.items():
        if releases.is_since(release):
            for added in additions.get(qualified_name, ()):
                shape = _with_added(shape, added)
    return shape


def known_names(qualified_name: str) -> tuple[str, ...]:
    """Return the names in the shape of a structure that the front end relies on."""
    known = {**STRUCTURES, **FRONT_END}[qualified_name]
    return tuple(known_shape(qualified_name, known))


def _with_added(shape: Shape, added: Added) -> Shape:
    extended: dict[str, object] = {}
    for name, value in shape.items():
        extended[name] = value
        if name == added.behind:
            extended |= added.shape
    return extended


def unsupported_shapes() -> Unsupported | None:
    """Compare the structures that sparksched reads or builds with those that it knows."""
    for noun, known_shapes, shape_of in SHAPE_TABLES:
        for qualified_name, shape in known_shapes.items():
            known = known_shape(qualified_name, shape)
            difference = _shape_difference(qualified_name, known, noun, shape_of)
            if difference is not None:
                return Unsupported(f"vLLM's {qualified_name.rpartition('.')[2]}", difference)
    return None


def _shape_difference(
    qualified_name: str, known: Shape, noun: str, shape_of: _ShapeReader
) -> str | None:
    try:
        cls = resolve(qualified_name)
    except (ImportError, AttributeError):
        return f"is not found where sparksched looks for it ({qualified_name})"
    return _difference(shape_of(cls), known, noun)


def _difference(found: Shape, known: Shape, noun: str) -> str | None:
    """Return in words how a shape departs from the known one, None if it doesn't."""
    for name in found:
        if name not in known:
            return f"has a {noun} {name!r} that sparksched does not know"
    for name in known:
        if name not in found:
            return f"lacks the {noun} {name!r} that sparksched relies on"
    if list(found) != list(known):
        return f"has each {noun} that sparksched knows, but in another order"
    for name, value in known.items():
        if value is not ANY and (type(found[name]), found[name]) != (type(value), value):
            return (
                f"has {found[name]!r} as the value of its {noun} {name!r}, "
                f"where sparksched knows {value!r}"
            )
    return None


def _structure_shape(cls: type[Any]) -> Shape:
    if dataclasses.is_dataclass(cls):
        fields = dataclasses.fields(cls)
        return {field.name: _default(field, dataclasses.MISSING) for field in fields}
    import msgspec

    return {field.name: _default(field, msgspec.NODEFAULT) for field in msgspec.structs.fields(cls)}


def _default(field: "dataclasses.Field[Any] | msgspec.structs.FieldInfo", unset: object) -> object:
    """Return a field's default, or what makes it; `unset` stands for none of the two."""
    for default in (field.default, field.default_factory):
        if default is not unset:
            return default
    return REQUIRED


def _enum_shape(cls: type[Any]) -> Shape:
    return {name: member.value for name, member in cls.__members__.items()}


def _signature_shape(function: Callable[..., Any]) -> Shape:
    return dict.fromkeys(inspect.signature(function).parameters, ANY)


def _abstract_methods_shape(cls: type[Any]) -> Shape:
    return dict.fromkeys(sorted(cls.__abstractmethods__), ANY)


SHAPE_TABLES: Final[tuple[tuple[str, Mapping[str, Shape], _ShapeReader], ...]] = (
    ("field", STRUCTURES, _structure_shape),
    ("member", ENUMS, _enum_shape),
    ("parameter", FUNCTIONS, _signature_shape),
    ("constructor parameter", CONSTRUCTORS, _signature_shape),
    ("required method", ABSTRACT_METHODS, _abstract_methods_shape),
)


def resolve(qualified_name: str) -> type[Any]:
    """Import what has this name: its module's, a dot and its own."""
    module_name, _, name = qualified_name.rpartition(".")
    cls: type[Any] = getattr(importlib.import_module(module_name), name)
    return cls
