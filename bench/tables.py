"""Writes the tables of README.md and docs/results.md anew, from the stored results.

Run it after results were added to bench/results or its folder `again`, or replaced. Text around the
tables, and which rows README.md selects, is left as it is: read it again beside the new figures.

    python -m bench.tables
"""

import json
import sys
from collections.abc import Iterable, Sequence

from bench.header import ROOT
from bench.reporting.cells import OTHER_RUN
from bench.reporting.others import kind_of
from bench.reporting.page_hosts import HOST_TABLES
from bench.reporting.page_tables import (
    TABLES,
    PageTable,
    Results,
    measured_twice,
    without_a_table,
)

ALL_TABLES = (*TABLES, *HOST_TABLES)

OWN_MARK = "‡"
"""Set by hand in a selection, for what the text says of that row."""


class TableError(ValueError):
    """A page's table can't be written."""


def main() -> int:
    """Write the pages, or none of them; return the exit status."""
    try:
        results = read_stored()
        pages = {page: page_anew(page, results) for page in {it.page for it in ALL_TABLES}}
    except TableError as error:
        sys.exit(f"error: {error}")
    for page, text in pages.items():
        if text != (ROOT / page).read_text():
            (ROOT / page).write_text(text)
            print(f"{page} was written anew: read what it says of the figures again")
    return 0


def page_anew(page: str, results: dict[str, Results]) -> str:
    """Return the text of a page with all its tables anew.

    Raises:
        TableError: as `written_anew`.

    """
    path = ROOT / page
    text = path.read_text()
    try:
        for folder, found in results.items():
            tables = [it for it in ALL_TABLES if (it.page, it.folder) == (page, folder)]
            text = written_anew(text, tables, found)
    except TableError as error:
        raise TableError(f"{path.name}: {error}") from None
    return text


def read_stored() -> dict[str, Results]:
    """Return the stored results that the tables are made of, by folder and file.

    Raises:
        TableError: if there are none, one is none, something is in two of them, or in no table.

    """
    folders = dict.fromkeys(it.folder for it in ALL_TABLES)
    return {it: _read_folder(it) for it in folders}


def _read_folder(name: str) -> Results:
    folder = ROOT / "bench/results" / name
    results: Results = {}
    for path in sorted(folder.glob("*.json")):
        try:
            results[path.name] = json.loads(path.read_text())
        except ValueError as error:
            raise TableError(f"{path} is no JSON file: {error}") from None
        if kind_of(results[path.name]) is None:
            raise TableError(f"{path} holds results of something else")
    if not results:
        raise TableError(f"there are no results in {folder}")
    if twice := measured_twice(results):
        raise TableError(f"measured twice: {twice[0]}: move the older file to superseded/")
    if left := without_a_table(results, name):
        raise TableError(f"in no table: {', '.join(left)}")
    return results


def written_anew(text: str, tables: Iterable[PageTable], results: Results) -> str:
    """Return a page's text with these tables of it anew.

    Raises:
        TableError: if a table isn't there or would be empty, or a row has no result, or two.

    """
    lines = text.splitlines()
    for table in tables:
        start, end = _place(lines, table.heading)
        rows = _by_name(table, results)
        if table.is_selection:
            lines[start:end] = _selected(lines[start:end], rows)
        else:
            lines[start:end] = map(_line, rows.values())
    return "\n".join(lines) + "\n"


def _place(lines: list[str], heading: str) -> tuple[int, int]:
    """Return where a table's rows begin, and where they end."""
    if lines.count(heading) != 1:
        raise TableError(f"there is no table, or more than one: {heading}")
    start = lines.index(heading) + 2
    end = start
    while end < len(lines) and lines[end].startswith("|"):
        end += 1
    return start, end


def _by_name(table: PageTable, results: Results) -> dict[str, list[str]]:
    rows: dict[str, list[str]] = {}
    for row in table.rows(results):
        name = _without_marks(row[0])
        if name in rows:
            raise TableError(f"two results for a row: {name}")
        rows[name] = row
    if not rows:
        raise TableError(f"nothing was measured for the table: {table.heading}")
    return rows


def _selected(lines: Sequence[str], rows: dict[str, list[str]]) -> list[str]:
    """Return a selection's rows with the figures of today; headings between rows stay."""
    left = dict(rows)
    return [line if line.startswith("| **") else _line(_of(line, left)) for line in lines]


def _of(line: str, left: dict[str, list[str]]) -> list[str]:
    """Take out the cells for a line."""
    name = line.strip("|").partition(" | ")[0].strip()
    cells = left.pop(_without_marks(name), None)
    if cells is None:
        raise TableError(f"no result for a row, or the row is there twice: {name}")
    if OWN_MARK not in name:
        return cells
    mark = OWN_MARK if cells[0].endswith(OTHER_RUN) else f" {OWN_MARK}"
    return [cells[0] + mark, *cells[1:]]


def _without_marks(name: str) -> str:
    return name.rstrip(f"{OTHER_RUN}{OWN_MARK} ")


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
