"""Writes the tables and pictures of the pages anew, from the stored results.

A page says where a table is to be: after a line `<!-- table: NAME -->`, or, for the rows whose name
has a pattern, `<!-- table: NAME (PATTERN) -->`. What stands there is replaced, up to the first line
that is no part of a table. `<!-- table, if measured: NAME -->` is the place of one that may still
have nothing in it. What no table reads of the results goes.
"""

import json
import re
from pathlib import Path

from bench.header import ROOT
from bench.report.marks import tables_anew
from bench.report.pairs import VLLM_BENCH, Row, gpu_of, rows_of
from bench.report.plots import pictures
from bench.report.tables import AGAIN, FRONT_ENDS, TABLES, Results, as_markdown, table_lines
from bench.report.unread import noted, read_parts
from bench.serving.store import dumps

STORED = ROOT / "bench/results"
PICTURES = ROOT / "docs/plots"
PAGES = (
    "README.md",
    "bench/results/README.md",
    *sorted(f"docs/{it.name}" for it in (ROOT / "docs").glob("*.md")),
)
MARK = re.compile(r"<!-- table(, if measured)?: (\w+)(?: \((.+)\))? -->")
NUMBER = re.compile(r"-?\d+\.\d+")
SAME_PLACE = 0.001
"""Of a point in a picture: processors differ in the last digit of a logarithm."""
RELEASE = "0.32.0"
"""Of vLLM, where nothing else is told."""
OF_MODELS = ("cells", "streams", "mixed", "ordinary")
"""Parts of a result whose rows have a model."""
KEYS = (
    "model",
    "scheduler",
    "mode",
    "cores",
    "concurrency",
    "driver",
    "output_tokens",
    "command",
    "lengths",
    "client",
    "rate_percent",
)
"""What tells cells apart."""


class PageError(ValueError):
    """A page can't be written."""


def written_anew() -> dict[Path, str]:
    """Return the text of each page, picture and stored result.

    Raises:
        PageError: if a page asks for a table that there is not, or that has nothing in it; if a
            stored result is none, or would lose what a table shows, or if something is in two of
            them, which would make one figure.

    """
    results = read_stored()
    found = {ROOT / page: page_anew((ROOT / page).read_text(), results) for page in PAGES}
    drawn = {PICTURES / f"{name}.svg": svg for name, svg in pictures(results).items()}
    found |= {path: _as_stored(path, svg) for path, svg in drawn.items()}
    return found | {STORED / name: dumps(it) for name, it in _what_is_read().items()}


def _what_is_read() -> Results:
    """Return the stored results without what no table or picture reads."""
    results = {
        str(path.relative_to(STORED)): json.loads(path.read_text())
        for path in sorted(STORED.rglob("*.json"))
    }
    copy = noted(results)
    for result in copy.values():
        _name_release(result)
    kept = read_parts(results, copy)
    if as_markdown(kept) != as_markdown(results):
        raise PageError("what a table shows would be lost: it was read without being noted")
    return kept


def _as_stored(path: Path, svg: str) -> str:
    """Return the stored picture in the place of one that looks the same."""
    stored = path.read_text() if path.exists() else ""
    if NUMBER.sub("", stored) != NUMBER.sub("", svg):
        return svg
    pairs = zip(NUMBER.findall(stored), NUMBER.findall(svg), strict=True)
    return stored if all(abs(float(a) - float(b)) < SAME_PLACE for a, b in pairs) else svg


def page_anew(text: str, results: Results) -> str:
    """Return a page's text with all its tables anew; raise PageError as `written_anew`."""
    by_name = {table.name: table for table in TABLES}

    def lines_of(mark: re.Match[str]) -> list[str]:
        may_be_empty, name, pattern = mark.groups()
        table = by_name.get(name)
        lines = [] if table is None else table_lines(table, results, pattern or "")
        if not lines and (table is None or not may_be_empty):
            raise PageError(f"there is no table, or nothing in it: {mark[0]}")
        return lines

    return tables_anew(text, MARK, lines_of)


def read_results(paths: list[Path], folder: Path) -> Results:
    """Return what files hold, by their path in a folder, or their name.

    Raises:
        PageError: if one holds no results.

    """
    results: Results = {}
    for path in paths:
        try:
            result = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise PageError(f"{path}: {error}") from None
        if not isinstance(result, dict) or not isinstance(result.get("run"), dict):
            raise PageError(f"{path} holds no results of a benchmark")
        name = path.relative_to(folder) if path.is_relative_to(folder) else path.name
        _name_release(result)
        results[str(name)] = result
    return results


def _name_release(result: Row) -> None:
    """Have models of another release of vLLM than the usual one say it."""
    release = str(result["run"].get("vllm", RELEASE)).partition("+")[0]
    if release != RELEASE:
        for row in (it for name in OF_MODELS for it in rows_of(result, name)):
            row["model"] = f"{row.get('model')} (vLLM {release})"


def read_stored() -> Results:
    """Return the stored results.

    Raises:
        PageError: if one is none, or if something is in two of them, which would make one figure.

    """
    results = read_results(sorted(STORED.rglob("*.json")), STORED)
    seen: dict[str, str] = {}
    for name, result in results.items():
        if name.startswith(AGAIN):
            continue
        for cell in rows_of(result, "cells"):
            # Runs that compare front ends have tables of their own, and with `vllm bench` each kind
            # of GPU has a row of its own.
            key = ", ".join(str(cell.get(it)) for it in KEYS)
            key = f"{name.startswith(FRONT_ENDS)}, {key}"
            key += f", {cell.get('front_end', 'python')}"
            if result.get("kind") == VLLM_BENCH:
                key += f", {gpu_of(result)}"
            if "error" not in cell and seen.setdefault(key, name) != name:
                raise PageError(f"measured twice, in {seen[key]} and {name}: {key}")
    return results
