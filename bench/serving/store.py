"""The result file: written anew after each cell, and read again by a run that goes on with it."""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from bench.serving.evaluate import missing
from bench.serving.plan import ServerKey

Row = dict[str, Any]

DECODE = "decode"
SERVER_KEYS = ("model", "scheduler", "mode", "front_end")
STREAMS = "streams"


class Key(Protocol):
    """What tells a cell apart."""

    def as_row(self) -> Row:
        """Return it flat, as it stands in the result."""


class StoreError(ValueError):
    """The file is there, but is no result of this benchmark."""


class Store:
    """Cells, servers and streams that were measured, each with the run that did it."""

    def __init__(self, path: Path | None, run: Row, kind: str = DECODE) -> None:
        """Go on with a file of this kind, or begin one; None: keep it in memory.

        Raises:
            StoreError: if the file is something else.

        """
        self._path = path
        self.result: Row = {"kind": kind, "run": run, "runs": []}
        self.result |= {"servers": [], "cells": [], "streams": []}
        if path is not None and path.exists():
            self.result = _read(path, kind)
        self.result["runs"].append(run)
        self.result["run"] = run
        self._run = len(self.result["runs"]) - 1

    def has_cell(self, key: Key) -> bool:
        """Whether this cell has been measured, and not failed."""
        return _is_measured(self._find("cells", key.as_row()))

    def has(self, table: str, key: ServerKey, **more: Any) -> bool:
        """Whether a server or streams are there, and have not failed."""
        return _is_measured(self._find(table, _server_row(key) | more))

    def known_s(self, key: Key) -> float:
        """Return how long such a cell has taken at most, of whatever server; 0: not known."""
        alike = {name: value for name, value in key.as_row().items() if name not in SERVER_KEYS}
        return self._longest("cells", alike, "seconds")

    def known_start_s(self) -> float:
        """Return how long a server has taken to start at most; 0: not known."""
        return self._longest("servers", {}, "start_s")

    def last_start_s(self, model: str) -> float:
        """Return how long a model's last server took to start and to warm up; 0: not known."""
        found = list(self._all("servers", {"model": model}))
        return sum(found[-1].get(it, 0.0) for it in ("start_s", "warm_up_s")) if found else 0.0

    def kv_cache_gib(self, model: str) -> float | None:
        """Return the memory that a model's servers have for the KV cache; None: not known."""
        found = (row.get("kv_cache_gib") for row in self._all("servers", {"model": model}))
        return next((it for it in found if it is not None), None)

    def _longest(self, table: str, alike: Row, what: str) -> float:
        return max((row.get(what, 0.0) for row in self._all(table, alike)), default=0.0)

    def put_cell(self, key: Key, found: Row) -> None:
        """Keep a cell, in the place of a failed one if there is any."""
        self._put("cells", key.as_row(), found)

    def put(self, table: str, key: ServerKey, found: Row, **more: Any) -> None:
        """Keep what is known of a server or streams."""
        self._put(table, _server_row(key) | more, found)

    def put_failure(self, key: Key, about: Row, reason: str) -> None:
        """Note why there is no figure, and of what; a later run tries again."""
        self._put("cells", key.as_row(), about | {"error": reason})

    def _find(self, table: str, key: Row) -> Row | None:
        return next(self._all(table, key), None)

    def _all(self, table: str, key: Row) -> Iterator[Row]:
        """Yield the rows that have these values."""
        for row in self.result.get(table, ()):
            if all(row.get(name) == value for name, value in key.items()):
                yield row

    def _put(self, table: str, key: Row, found: Row) -> None:
        rows = self.result.setdefault(table, [])
        former = self._find(table, key)
        if former is not None:
            rows.remove(former)
        rows.append(key | {"run": self._run} | found)
        self.save()

    def save(self) -> None:
        """Write the file in one go: a killed run leaves the former or the new one."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self._path.with_name(f"{self._path.name}.new")
        scratch.write_text(dumps(self.result))
        os.replace(scratch, self._path)


def _server_row(key: ServerKey) -> Row:
    return {name: getattr(key, name) for name in SERVER_KEYS}


def _is_measured(row: Row | None) -> bool:
    return row is not None and "error" not in row


def _read(path: Path, kind: str) -> Row:
    try:
        result = json.loads(path.read_text())
    except ValueError as error:
        raise StoreError(f"{path} is no JSON file: {error}") from None
    if not isinstance(result, dict) or result.get("kind") != kind:
        raise StoreError(f"{path} holds results of something else")
    return result


def dumps(result: Row) -> str:
    """Return JSON with a line for each row of a table, so that files can be compared."""
    parts = []
    for name, value in result.items():
        if isinstance(value, list) and value:
            rows = ",\n".join("  " + _dumps(row) for row in value)
            parts.append(f'"{name}": [\n{rows}\n]')
        else:
            parts.append(f'"{name}": {_dumps(value)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _dumps(value: Any) -> str:
    return json.dumps(_rounded(value), allow_nan=False)


def _rounded(value: Any) -> Any:
    """Return the same with six significant digits, and no figure that isn't one."""
    if isinstance(value, dict):
        return {name: _rounded(it) for name, it in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(it) for it in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            return missing("not a number")
        return float(f"{value:.6g}")
    return value
