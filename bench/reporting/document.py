"""A report's parts, and how they become Markdown and HTML."""

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72em; margin: 2em auto; padding: 0 1em;
       color: #1a1a1a; }
h1, h2, h3 { line-height: 1.2; margin-top: 1.8em; }
table { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #ddd; padding: .3em .8em; text-align: right; }
th { border-bottom: 2px solid #999; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
td.missing { color: #999; font-style: italic; }
.scroll { overflow-x: auto; }
img { max-width: 100%; height: auto; }
p.note { color: #555; font-size: 13px; }
"""


@dataclass(frozen=True)
class Paragraph:
    """Text."""

    text: str


@dataclass(frozen=True)
class Bullets:
    """A list."""

    items: Sequence[str]


@dataclass(frozen=True)
class Table:
    """Columns with a heading each; the first one names the row."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Image:
    """A picture as PNG."""

    name: str
    """What its file is called, without its ending."""
    png: bytes
    text: str
    """What it shows."""


Part = Paragraph | Bullets | Table | Image


@dataclass
class Section:
    """A heading and what is below it."""

    title: str
    parts: list[Part] = field(default_factory=list)
    level: int = 2


# ---- Markdown ----


def as_markdown(sections: Sequence[Section]) -> str:
    """Return Markdown; images are files beside it."""
    lines: list[str] = []
    for section in sections:
        lines += [f"{'#' * section.level} {section.title}", ""]
        for part in section.parts:
            lines += [*_markdown(part), ""]
    return "\n".join(lines)


def _markdown(part: Part) -> list[str]:
    match part:
        case Paragraph(text):
            return [text]
        case Bullets(items):
            return [f"- {item}" for item in items]
        case Image(name, _, text):
            return [f"![{text}]({name}.png)"]
        case Table(columns, rows):
            lines = [_line(columns), _line(["---"] * len(columns))]
            return lines + [_line(row) for row in rows]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


# ---- HTML ----


def as_html(title: str, sections: Sequence[Section]) -> str:
    """Return a page that needs no other file: images are in it."""
    lines = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body>",
    ]
    for section in sections:
        lines.append(f"<h{section.level}>{html.escape(section.title)}</h{section.level}>")
        lines += [_html(part) for part in section.parts]
    return "\n".join([*lines, "</body></html>", ""])


def _html(part: Part) -> str:
    match part:
        case Paragraph(text):
            return f"<p>{html.escape(text)}</p>"
        case Bullets(items):
            return "<ul>" + "".join(f"<li>{html.escape(item)}</li>" for item in items) + "</ul>"
        case Image(_, png, text):
            data = base64.b64encode(png).decode()
            return f'<img alt="{html.escape(text)}" src="data:image/png;base64,{data}">'
        case Table(columns, rows):
            head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
            body = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
            return (
                f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
                f"<tbody>{body}</tbody></table></div>"
            )


def _cell(text: str) -> str:
    is_missing = "missing" in text or "not available" in text
    kind = ' class="missing"' if is_missing else ""
    return f"<td{kind}>{html.escape(text)}</td>"


# ---- files ----


def write(directory: Path, title: str, sections: Sequence[Section]) -> list[Path]:
    """Write `report.md` with its images, and `report.html`; return what was written."""
    directory.mkdir(parents=True, exist_ok=True)
    written = [directory / "report.md", directory / "report.html"]
    written[0].write_text(as_markdown(sections))
    written[1].write_text(as_html(title, sections))
    for section in sections:
        for part in section.parts:
            if isinstance(part, Image):
                path = directory / f"{part.name}.png"
                path.write_bytes(part.png)
                written.append(path)
    return written
