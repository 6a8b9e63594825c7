"""Values as a log may show them: prompts, outputs, salts and keys stay out of it."""

from collections.abc import Mapping
from enum import Enum
from typing import Any, Final

MAX_ITEMS: Final = 16

_SECRET_PARTS: Final = (
    *("token_ids", "spec_decode_tokens", "stop_reason", "logprobs", "pooling_output"),
    *("salt", "extra_keys", "hash", "headers", "prompt", "params", "mm_features", "message"),
)
"""What is in the name of fields that tell what somebody has asked or was answered."""

_BRACKETS: Final = {list: "[]", tuple: "()"}


def shown(value: Any, field: str = "") -> str:
    """Return a value in short: numbers and ids as they are, of what is secret how much it is."""
    if any(part in field for part in _SECRET_PARTS):
        return f"{_size(value)} (hidden)"
    if value is None or isinstance(value, bool | int | float | str | Enum):
        return repr(value)
    if isinstance(value, Mapping):
        return _shown_items(value, "{}", field)
    if isinstance(value, list | tuple | set | frozenset):
        return _shown_items(value, _BRACKETS.get(type(value), "{}"), field)
    return _shown_object(value)


def _shown_items(values: Any, brackets: str, field: str) -> str:
    items = [
        f"{item!r}: {shown(values[item], field)}"
        if isinstance(values, Mapping)
        else shown(item, field)
        for item in list(values)[:MAX_ITEMS]
    ]
    if len(values) > MAX_ITEMS:
        items.append(f"... {len(values)} in all")
    return f"{brackets[0]}{', '.join(items)}{brackets[1]}"


def _shown_object(value: Any) -> str:
    name = getattr(value, "req_id", None) or getattr(value, "request_id", None)
    return f"{type(value).__name__}{f' of {name!r}' if name else ''}"


def _size(value: Any) -> str:
    name = type(value).__name__
    return f"{name} of {len(value)}" if hasattr(value, "__len__") else name
