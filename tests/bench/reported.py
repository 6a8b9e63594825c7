"""What a report has: its sections, their tables and texts."""

from collections.abc import Iterable

from bench.reporting.document import Paragraph, Part, Section, Table


def section_of(found: Iterable[Section], title: str) -> Section:
    """Return the only section with this title."""
    (section,) = (it for it in found if it.title == title)
    return section


def parts_in(found: Iterable[Section | Part]) -> list[Part]:
    """Return parts, with those of sections in place of the sections."""
    return [part for it in found for part in (it.parts if isinstance(it, Section) else [it])]


def tables_in(found: Iterable[Section | Part]) -> list[Table]:
    """Return all tables, each of them whole."""
    tables = [part for part in parts_in(found) if isinstance(part, Table)]
    assert all(len(row) == len(table.columns) for table in tables for row in table.rows)
    return tables


def table_with(found: Iterable[Section | Part], *columns: str) -> Table:
    """Return the only table that has all these columns."""
    (table,) = (it for it in tables_in(found) if set(columns) <= set(it.columns))
    return table


def rows_in(found: Iterable[Section | Part]) -> list[list[str]]:
    """Return the rows of all tables."""
    return [list(row) for table in tables_in(found) for row in table.rows]


def texts_in(found: Iterable[Section | Part]) -> list[str]:
    """Return all paragraphs."""
    return [part.text for part in parts_in(found) if isinstance(part, Paragraph)]
