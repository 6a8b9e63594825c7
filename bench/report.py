"""Turns results of the benchmarks into one report, as Markdown and as a page of HTML.

There is a table for each question, vLLM beside sparksched; plots; and findings, which are computed
from the figures. What was not measured, or has failed, is shown as missing, and a file that can't
be read is named. Results of several runs of `bench.decode` are put together.

    python -m bench.report FILE... [--out DIR]
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.reporting import others, plots
from bench.reporting.decode import sections as decode_sections
from bench.reporting.document import Bullets, Part, Section, Table, write

TITLE = "vLLM and sparksched, measured"

Row = dict[str, Any]


def main() -> int:
    """Write the report; return the exit status: 1 if nothing could be read."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="JSON of benchmarks")
    parser.add_argument("--out", type=Path, default=Path("report"), metavar="DIR", help="report/")
    options = parser.parse_args()
    results, unread = read_all(options.files)
    for path, reason in unread:
        print(f"{path}: {reason}", file=sys.stderr)
    for path in write(options.out, TITLE, build(results, unread)):
        print(path)
    return 0 if results else 1


def read_all(paths: Sequence[Path]) -> tuple[list[tuple[Path, Row]], list[tuple[Path, str]]]:
    """Return the results that can be read, and the others with the reason."""
    results: list[tuple[Path, Row]] = []
    unread: list[tuple[Path, str]] = []
    for path in paths:
        try:
            result = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            unread.append((path, f"can't be read: {error}"))
            continue
        if others.kind_of(result) is None:
            unread.append((path, "is no result of a benchmark that is known here"))
        else:
            results.append((path, result))
    return results, unread


def build(results: Sequence[tuple[Path, Row]], unread: Sequence[tuple[Path, str]]) -> list[Section]:
    """Return the report's sections."""
    report = [Section(TITLE, [], level=1), *_runs(results)]
    if unread:
        lines = [f"{path.name} {reason}" for path, reason in unread]
        report.append(Section("Files that are missing", [Bullets(lines)]))
    decode = [result for _, result in results if others.kind_of(result) == others.DECODE]
    if decode:
        report += _with_images(decode)
    for kind, reader in others.READERS.items():
        for _, result in results:
            if others.kind_of(result) == kind:
                report += reader(result)
                if kind == others.STEP_COST:
                    report[-1].parts.extend(plots.step_cost_image(result))
    return report


def _with_images(decode: Sequence[Row]) -> list[Section]:
    """Return the sections about `bench.decode`, with the plots after the tables they belong to."""
    sections = decode_sections(decode)
    places = {"itl": "latency", "host": "host's time", "timeline": "host's time"}
    for image in plots.decode_images(decode):
        words = places[image.name.partition("-")[0]]
        section = next((it for it in sections if words in it.title), sections[0])
        section.parts.append(image)
    return sections


def _runs(results: Sequence[tuple[Path, Row]]) -> list[Section]:
    """Return the heads of all runs: versions, machines, commits."""
    heads = [
        (path.name, head)
        for path, result in results
        for head in (result.get("runs") or [result.get("run")])
        if isinstance(head, dict)
    ]
    names = list(dict.fromkeys(name for _, head in heads for name in head))
    rows = [[file, *(str(head.get(name, "missing")) for name in names)] for file, head in heads]
    parts: list[Part] = [Table(("file", *names), rows)] if rows else []
    return [Section("Runs", parts)]


if __name__ == "__main__":
    sys.exit(main())
