"""Exact comparison of what two schedulers decide, field by field.

Values are equal only if their types are: a decision that arrives as a tuple where vLLM gives a
list, or as None where vLLM gives an empty set, is a difference.
"""

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import msgspec
import numpy as np
import torch

_Sequence = list[Any] | tuple[Any, ...]
_PLAIN: Final = frozenset((int, str, bytes, bool, float, type(None)))


@dataclass(frozen=True)
class Difference:
    """The first place at which two values differ."""

    path: str
    reference: Any
    candidate: Any
    field: str = ""
    """The innermost field on the path."""
    names: tuple[str, ...] = ()
    """What the path passes that has a name, the innermost first: requests, among others."""


def first_difference(
    reference: Any,
    candidate: Any,
    path: str,
    ignored_fields: Collection[str] = (),
) -> Difference | None:
    """Compare two values field by field, in order; return None if they are equal."""
    if reference is candidate:
        return None
    if type(reference) is not type(candidate):
        return Difference(f"type of {path}", reference, candidate)
    fields = _field_names(reference)
    if fields is not None:
        return _difference_of_fields(fields, reference, candidate, path, ignored_fields)
    if isinstance(reference, list | tuple):
        return _difference_of_sequences(reference, candidate, path, ignored_fields)
    if isinstance(reference, Mapping):
        return _difference_of_mappings(reference, candidate, path, ignored_fields)
    return None if _equal_leaves(reference, candidate) else Difference(path, reference, candidate)


def _difference_of_sequences(
    reference: _Sequence, candidate: _Sequence, path: str, ignored_fields: Collection[str]
) -> Difference | None:
    if len(reference) != len(candidate):
        return Difference(f"length of {path}", reference, candidate)
    if _are_equal_tokens(reference, candidate):
        return None
    for index, (theirs, ours) in enumerate(zip(reference, candidate, strict=True)):
        if _are_equal_plain(theirs, ours):
            continue
        difference = first_difference(theirs, ours, f"{path}[{index}]", ignored_fields)
        if difference is not None:
            name = getattr(theirs, "req_id", None) or getattr(theirs, "request_id", None)
            return _below(difference, name=name)
    return None


def _are_equal_plain(reference: Any, candidate: Any) -> bool:
    """Whether these are most of what there is to compare, and equal: before a path is written."""
    kind = type(reference)
    return kind is type(candidate) and kind in _PLAIN and bool(reference == candidate)


def _are_equal_tokens(reference: _Sequence, candidate: _Sequence) -> bool:
    """Compare the longest and commonest lists, those of token and block ids, in one go."""
    return {*map(type, reference), *map(type, candidate)} <= {int} and reference == candidate


def _difference_of_mappings(
    reference: Mapping[Any, Any],
    candidate: Mapping[Any, Any],
    path: str,
    ignored_fields: Collection[str],
) -> Difference | None:
    # The order of keys is the order in which requests were scheduled: part of the decision.
    if list(reference) != list(candidate):
        return Difference(f"keys of {path}", list(reference), list(candidate))
    for key, theirs in reference.items():
        ours = candidate[key]
        if _are_equal_plain(theirs, ours):
            continue
        difference = first_difference(theirs, ours, f"{path}[{key!r}]", ignored_fields)
        if difference is not None:
            return _below(difference, name=key if isinstance(key, str) else None)
    return None


def _difference_of_fields(
    fields: tuple[str, ...],
    reference: Any,
    candidate: Any,
    path: str,
    ignored_fields: Collection[str],
) -> Difference | None:
    if _is_plain_object(reference) and vars(reference).keys() != vars(candidate).keys():
        return Difference(f"attributes of {path}", sorted(vars(reference)), sorted(vars(candidate)))
    for name in fields:
        if name in ignored_fields:
            continue
        theirs, ours = getattr(reference, name), getattr(candidate, name)
        if _are_equal_plain(theirs, ours):
            continue
        difference = first_difference(theirs, ours, f"{path}.{name}", ignored_fields)
        if difference is not None:
            return _below(difference, field=name, name=_row_name(reference, theirs, ours))
    return None


def _row_name(owner: Any, reference: Any, candidate: Any) -> str | None:
    """Name the first row that differs of a list that has one for each of its owner's `req_ids`."""
    ids = getattr(owner, "req_ids", None)
    if ids is None or not isinstance(reference, list) or not isinstance(candidate, list):
        return None
    rows = zip(ids, reference, candidate, strict=False)
    return next((request_id for request_id, ours, theirs in rows if ours != theirs), None)


def _below(difference: Difference, field: str = "", name: str | None = None) -> Difference:
    """Return a difference as it looks from one level higher."""
    return dataclasses.replace(
        difference,
        field=difference.field or field,
        names=difference.names if name is None else (*difference.names, name),
    )


def _field_names(value: Any) -> tuple[str, ...] | None:
    # mypy takes classes for unhashable.
    fields = _declared_fields(type(value))  # type: ignore[arg-type]
    return tuple(vars(value)) if fields is None and _is_plain_object(value) else fields


@functools.cache
def _declared_fields(kind: type) -> tuple[str, ...] | None:
    if issubclass(kind, msgspec.Struct):
        return kind.__struct_fields__
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    # A named tuple's, or nothing.
    fields: tuple[str, ...] | None = getattr(kind, "_fields", None)
    return fields


def _is_plain_object(value: Any) -> bool:
    """Return whether `==` would only tell whether two values are the same object."""
    equality: Any = type(value).__eq__
    return (
        equality is object.__eq__
        and hasattr(value, "__dict__")
        and not isinstance(value, Enum)
        and not callable(value)
    )


def _equal_leaves(reference: Any, candidate: Any) -> bool:
    if isinstance(reference, float):
        return reference == candidate or (math.isnan(reference) and math.isnan(candidate))
    if isinstance(reference, np.ndarray):
        return reference.dtype == candidate.dtype and np.array_equal(reference, candidate)
    if isinstance(reference, torch.Tensor):
        return bool(reference.dtype == candidate.dtype and torch.equal(reference, candidate))
    return bool(reference == candidate)
