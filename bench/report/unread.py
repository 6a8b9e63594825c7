"""What tables and pictures read of results: the rest needn't be stored."""

from typing import Any

from bench.report.pairs import Row
from bench.report.plots import pictures
from bench.report.tables import TABLES, Results

HEADS = ("run", "runs")
"""Parts that tell what a result is of: they stay whole."""


class Noted(dict[str, Any]):
    """A row that notes which of its parts are read."""

    def __init__(self, row: Row) -> None:
        """Note what is read of a row and of the rows in it."""
        super().__init__(
            {name: part if name in HEADS else _noted(part) for name, part in row.items()}
        )
        self.read: set[object] = set(HEADS)

    def __contains__(self, name: object) -> bool:
        """Note that a part is asked for."""
        self.read.add(name)
        return super().__contains__(name)

    def __getitem__(self, name: str) -> Any:
        """Note that a part is read."""
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Note that a part is read."""
        self.read.add(name)
        return super().get(name, default)

    def values(self) -> Any:
        """Note that all is read."""
        self.read.update(self)
        return super().values()


def _noted(part: Any) -> Any:
    if isinstance(part, dict):
        return Noted(part)
    return [_noted(it) for it in part] if isinstance(part, list) else part


def noted(results: Results) -> Results:
    """Return a copy of results that notes what is read of it."""
    return {name: Noted(result) for name, result in results.items()}


def read_parts(results: Results, copy: Results) -> Results:
    """Return what all tables and pictures read of results, given a copy of them from `noted()`."""
    for table in TABLES:
        list(table.rows(copy))
    pictures(copy)
    return {name: _read_part(result, copy[name]) for name, result in results.items()}


def _read_part(part: Any, copy: Any) -> Any:
    if isinstance(copy, Noted):
        kept = (name for name in part if name in copy.read)
        return {name: _read_part(part[name], dict.get(copy, name)) for name in kept}
    if isinstance(copy, list):
        return [_read_part(*both) for both in zip(part, copy, strict=True)]
    return part
