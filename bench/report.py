"""Tables and pictures of results: of the pages, from `bench/results`, or of a folder.

`bench/tables.toml` says what is in a table. A page has it after a line `<!-- table: NAME -->`, up
to the first line that is no part of a table; `<!-- table, if measured: NAME -->` may be empty.

A cell has the median over the rounds in which no kernel was compiled, and in brackets the least and
the most where the table asks for it. What has fewer than two such rounds is left out. A table has
one kind of GPU, one release of vLLM and one filler of random weights, and says which; of a mixture
of experts it also says how many of a layer a step reads.

    python -m bench.report [FOLDER [--out FILE]]
"""

import argparse
import itertools
import re
import sys
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.results import COLUMNS, FOLDER, ROOT
from testkit.pages import with_tables

TABLES = ROOT / "bench" / "tables.toml"
PICTURES = ROOT / "docs" / "plots"
PAGES = ("README.md", *sorted(f"docs/{it.name}" for it in (ROOT / "docs").glob("*.md")))
GAIN = "gain"
MARK = re.compile(r"<!-- table(, if measured)?: (\w+) -->")
ALIKE = ("gpu", "vllm", "filler")
"""What must be the same in all of a table."""
OF_ROUND = ["case", "model", "vllm", "gpu", "filler", "point", "side", "round", "metric"]
EXPERTS_KEY = ["model", "filler", "vllm", "point"]
"""What decides how many experts a step reads."""
FEWEST_ROUNDS = 2
"""Of a row on a page, if it has rounds."""
LEAST_CHANGE = 0.02
"""Below that nobody gains or loses."""
COUNTED = (16, 64)
"""Streams whose experts the case `experts` counts."""
MANY_STREAMS = re.compile(r"([\d,]+) streams")
LARGE = re.compile(r"(?<![\d.,])\d{4,}")
MISSING = "-"
NO_FILLER = "none"
COLOURS = {"vllm": "#D55E00", "sparksched": "#0072B2", "other": "#009E73"}
"""Okabe and Ito's: they remain different for the colour-blind."""
NUMBER = re.compile(r"-?\d+\.\d+")
SAME_PLACE = 0.001
"""Of a point in a picture: processors differ in the last digit of a logarithm."""


class ReportError(ValueError):
    """Results can't be shown as a table asks."""


@dataclass(frozen=True)
class Table:
    """What `bench/tables.toml` says of a table."""

    name: str
    case: list[str]
    """The first one that was measured counts."""
    columns: dict[str, str]
    """Metrics, by what heads their columns."""
    sides: list[str] = field(default_factory=lambda: ["vllm", "sparksched"])
    layout: str = "pairs"
    """`pairs`: a row a point, its cells say "A → B" of two sides; `sides`: a row a side of a point;
    `joined`: a row a side, its cells say "A / B" of all points."""
    head: str = ""
    points: list[str] = field(default_factory=list)
    """The only ones, in this order; none: all."""
    models: list[str] = field(default_factory=list)
    where: dict[str, str] = field(default_factory=dict)
    ranges: list[str] = field(default_factory=lambda: ["tokens/s"])
    """Columns that have the least and the most of the rounds."""
    compares: list[str] = field(default_factory=list)
    """What of `ALIKE` the rows differ in on purpose."""
    names: dict[str, str] = field(default_factory=dict)
    """What sides are called."""
    fewest_rounds: int = FEWEST_ROUNDS
    strip: str = ""
    """What points begin with that is not shown."""

    def name_of(self, side: str) -> str:
        """Return what a side is called."""
        return {"vllm": "vLLM", **self.names}.get(side, side)


def read(folder: Path) -> pd.DataFrame:
    """Return the rows of all CSV files below a folder, of undisturbed rounds.

    Raises:
        ReportError: if a file lacks a column, or if two files have the same round of something.

    """
    frames = []
    for path in sorted(folder.rglob("*.csv")):
        frame = pd.read_csv(path, dtype=str, keep_default_na=False)
        if not set(COLUMNS) <= set(frame.columns):
            raise ReportError(f"{path} lacks columns of {', '.join(COLUMNS)}")
        frame = frame[frame["case"] != "case"]  # files that were put together have several heads
        frames.append(frame.assign(file=str(path.relative_to(folder))))
    if not frames:
        return pd.DataFrame(columns=[*COLUMNS, "file"])
    rows = as_frame(pd.concat(frames, ignore_index=True))
    twice = rows[rows.duplicated(OF_ROUND, keep=False)]
    if len(twice):
        first = twice.iloc[0]
        files = ", ".join(sorted(set(twice[twice["point"] == first["point"]]["file"])))
        raise ReportError(f"measured twice: {first['case']}, {first['point']}, in {files}")
    return undisturbed(rows)


def as_frame(rows: Any) -> pd.DataFrame:
    """Return rows as a table whose values are numbers."""
    frame = pd.DataFrame(rows, columns=None if isinstance(rows, pd.DataFrame) else [*COLUMNS])
    return frame.fillna("").assign(value=pd.to_numeric(frame["value"]))


def tables() -> dict[str, Table]:
    """Return the definitions of all tables of figures, by name."""
    found = tomllib.loads(TABLES.read_text())
    for name, it in found["tables"].items():
        it["columns"] = found["columns"][it.get("columns", name)]
        if isinstance(it.get("names"), str):
            it["names"] = found["names"][it["names"]]
        it["case"] = [it["case"]] if isinstance(it["case"], str) else it["case"]
    return {name: Table(name, **it) for name, it in found["tables"].items()}


def lines_of(table: Table, rows: pd.DataFrame) -> list[str]:
    """Return a table's lines; none if nothing of it was measured.

    Raises:
        ReportError: if it would mix what doesn't compare.

    """
    chosen = rows[rows["side"].isin(table.sides) & rows["metric"].isin(table.columns.values())]
    for name, value in table.where.items():
        chosen = chosen[chosen[name] == value]
    for name, only in (("point", table.points), ("model", table.models)):
        if only:
            chosen = chosen[chosen[name].isin(only)]
    rounds = chosen.groupby([*OF_ROUND[:-2], "metric"])["round"].transform("nunique")
    chosen = chosen[(chosen["round"] == "") | (rounds >= table.fewest_rounds)]
    chosen = first_case(chosen, table.case)
    if chosen.empty:
        return []
    refuse_mixture(table, chosen)
    known = set(chosen["metric"])
    columns = {name: metric for name, metric in table.columns.items() if metric in known}
    table = replace(table, columns=columns)
    of_mixtures = counted(table, chosen, rows)
    alike = chosen.iloc[0]
    where = [alike["gpu"] if alike["gpu"] != "none" else ""]
    if "vllm" not in table.compares:
        where.append(f"vLLM {alike['vllm']}")
    head = [f"{', '.join(filter(None, where))}: {table.head}", *table.columns]
    if of_mixtures:
        head.append("experts a layer and step")
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join(['---'] * len(head))} |"]
    return lines + [f"| {' | '.join(it)} |" for it in _rows(table, chosen, of_mixtures)]


def undisturbed(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of rounds in which no kernel was compiled; experts are counted in any."""
    disturbed = (rows["metric"] == "compiled") & (rows["value"] > 0) & (rows["case"] != "experts")
    rounds = pd.MultiIndex.from_frame(rows[OF_ROUND[:-1]])
    return rows[~rounds.isin(rounds[disturbed])]


def first_case(rows: pd.DataFrame, cases: str | list[str]) -> pd.DataFrame:
    """Return the rows of the first one of some cases that has any."""
    of_cases = (rows[rows["case"] == it] for it in ([cases] if isinstance(cases, str) else cases))
    return next((it for it in of_cases if len(it)), rows[:0])


def refuse_mixture(table: Table, chosen: pd.DataFrame) -> None:
    """Raise ReportError if rows of a table don't compare."""
    for name in ALIKE:
        values = set(chosen[name]) - {NO_FILLER}
        if name not in table.compares and len(values) > 1:
            raise ReportError(f"table {table.name}: {name} is {' and '.join(sorted(values))}")


def counted(table: Table, chosen: pd.DataFrame, rows: pd.DataFrame) -> dict[tuple[str, ...], float]:
    """Return how many experts were counted, by model, filler, vLLM and point.

    Raises:
        ReportError: if nobody has counted them for several streams of a mixture of experts.

    """
    found = rows[(rows["case"] == "experts") & (rows["metric"] == "experts")]
    known: dict[Any, float] = found.groupby(EXPERTS_KEY)["value"].median().to_dict()
    wanted = {}
    mixtures = set(found["model"]) | {it for it in chosen["model"] if it.startswith("gpt-oss")}
    for key in chosen[chosen["model"].isin(mixtures)].groupby(EXPERTS_KEY).groups:
        streams = MANY_STREAMS.fullmatch(key[-1])
        if key in known:
            wanted[key] = known[key]
        elif streams and int(streams[1].replace(",", "")) in COUNTED and table.name != "experts":
            raise ReportError(f"table {table.name}: nobody has counted the experts of {key}")
    return {} if table.name == "experts" else wanted


def _rows(
    table: Table, chosen: pd.DataFrame, experts: dict[tuple[str, ...], float]
) -> Iterable[list[str]]:
    """Yield the cells of each row: what it is of, its metrics, and the experts if there are any."""
    models = table.models or list(dict.fromkeys(chosen["model"]))
    releases = sorted(set(chosen["vllm"]))
    points = table.points or list(dict.fromkeys(chosen["point"]))
    if table.layout == "joined":
        yield from _joined(table, chosen, points)
        return
    pairs = table.layout == "pairs"
    has_one_point = chosen["point"].nunique() == chosen["model"].nunique() == len(releases) == 1
    for model, release, point in itertools.product(models, releases, points):
        mine = (chosen["model"] == model) & (chosen["vllm"] == release) & (chosen["point"] == point)
        name = LARGE.sub(lambda it: f"{int(it[0]):,}", point.removeprefix(table.strip))
        label = f"{model}, {name}" if chosen["model"].nunique() > 1 else name
        label += f", vLLM {release}" if len(releases) > 1 else ""
        for sides in [table.sides] if pairs else [[it] for it in table.sides]:
            found = chosen[mine & chosen["side"].isin(sides)]
            if found["side"].nunique() < len(sides):
                continue
            cells = [
                _cell(found, metric, sides, has_range=name in table.ranges)
                for name, metric in table.columns.items()
            ]
            side = table.name_of(sides[0])
            head = label if pairs else side if has_one_point else f"{label}: {side}"
            keys = {tuple(key) for key in found[EXPERTS_KEY].to_numpy()}
            counts = [f"{experts[key]:.3g}" for key in sorted(keys & experts.keys(), reverse=True)]
            yield [head, *cells, *([" → ".join(counts) or MISSING] if experts else [])]


def _joined(table: Table, chosen: pd.DataFrame, points: list[str]) -> Iterable[list[str]]:
    for side in table.sides:
        of_side = chosen[chosen["side"] == side]
        if of_side.empty:
            continue
        of_points = [of_side[of_side["point"] == it] for it in points]
        cells = [
            " / ".join(_cell(it, metric, [side], has_range=False) for it in of_points)
            for metric in table.columns.values()
        ]
        yield [table.name_of(side), *cells]


def _cell(rows: pd.DataFrame, metric: str, sides: Sequence[str], *, has_range: bool) -> str:
    shown = []
    for side in sides:
        values = rows[(rows["side"] == side) & (rows["metric"] == metric)]["value"]
        shown.append(summary(values, has_range=has_range))
    return " → ".join(dict.fromkeys(shown) if set(shown) == {MISSING} else shown)


def summary(values: pd.Series, *, has_range: bool) -> str:
    """Return the median of values, and the least and the most of them."""
    if values.empty:
        return MISSING
    low, high = figure(values.min()), figure(values.max())
    between = f" ({low} to {high})" if has_range and low != high else ""
    return figure(values.median()) + between


def figure(value: float) -> str:
    """Return a number with three significant digits, or all of those before the point."""
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    text = f"{value:.3g}"
    return f"{float(text):,.0f}" if "e" in text else text


# ---- gains ----


def gains(rows: pd.DataFrame) -> list[str]:
    """Return the table of who gains: a verdict for each situation that was measured."""
    head = ["your situation", "measured", "vLLM", "sparksched", "verdict"]
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join(['---'] * len(head))} |"]
    told: set[str] = set()
    for it in tomllib.loads(TABLES.read_text())[GAIN]["rows"]:
        of_case = rows[(rows["case"] == it["case"]) & (rows["point"] == it["point"])]
        for name, value in it.get("where", {}).items():
            of_case = of_case[of_case[name] == value]
        both = [
            of_case[(of_case["side"] == side) & (of_case["metric"] == it["metric"])]["value"]
            for side in it["sides"]
        ]
        if it["situation"] in told or any(len(values) < FEWEST_ROUNDS for values in both):
            continue
        told.add(it["situation"])
        before, after = (summary(values, has_range=True) for values in both)
        said = it.get("verdict") or verdict(*both, it["better"])
        lines.append(f"| {' | '.join((it['situation'], it['what'], before, after, said))} |")
    return lines if len(lines) > 2 else []


def verdict(before: pd.Series, after: pd.Series, better: str) -> str:
    """Return whether it is a gain: not if ranges overlap, or medians are nearly the same."""
    change = after.median() / before.median() - 1
    overlap = after.min() <= before.max() and before.min() <= after.max()
    if overlap or abs(change) < LEAST_CHANGE:
        return "no difference"
    more = change > 0
    return "gain" if more == (better == "more") else "loss"


# ---- pages ----


def written_anew(rows: pd.DataFrame) -> dict[Path, str]:
    """Return the text of each page and picture.

    Raises:
        ReportError: if a page asks for a table that there is not, or that has nothing in it.

    """
    found = {ROOT / page: page_anew((ROOT / page).read_text(), rows) for page in PAGES}
    for name, svg in pictures(rows).items():
        path = PICTURES / f"{name}.svg"
        found[path] = _unless_alike(path.read_text() if path.exists() else "", svg)
    return found


def page_anew(text: str, rows: pd.DataFrame) -> str:
    """Return a page's text with the table below each mark anew."""
    known = tables()

    def rows_below(line: str) -> list[str] | None:
        mark = MARK.fullmatch(line)
        if mark is None:
            return None
        if mark[2] not in known and mark[2] != GAIN:
            raise ReportError(f"there is no table {mark[2]}")
        lines = gains(rows) if mark[2] == GAIN else lines_of(known[mark[2]], rows)
        if not lines and not mark[1]:
            raise ReportError(f"nothing of table {mark[2]} was measured")
        return lines

    return with_tables(text, rows_below)


def whole_report(rows: pd.DataFrame) -> str:
    """Return all that rows have: a table a case, a line for each metric of a point."""
    parts = []
    for case, of_case in rows.groupby("case", sort=False):
        sides = list(dict.fromkeys(of_case["side"]))
        head = ["model, point, metric", *sides]
        lines = [f"| {' | '.join(head)} |", f"| {' | '.join(['---'] * len(head))} |"]
        for key, found in of_case.groupby(["model", "point", "metric"], sort=False):
            by_side = [found[found["side"] == side]["value"] for side in sides]
            cells = [summary(values, has_range=True) for values in by_side]
            lines.append(f"| {', '.join(filter(None, key))} | {' | '.join(cells)} |")
        first = of_case.iloc[0]
        where = f"vLLM {first['vllm']}, commit {first['commit']}, {first['cores']} x {first['cpu']}"
        gpu = "" if first["gpu"] == "none" else f", {first['gpu']}"
        parts.append("\n".join([f"# {case}", "", f"{where}{gpu}", "", *lines]))
    return "\n\n".join(parts) + "\n"


# ---- pictures ----


def pictures(rows: pd.DataFrame) -> dict[str, str]:
    """Return the pictures that can be drawn, as SVG, by name."""
    mpl.use("Agg")
    mpl.rcParams.update(
        {
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.color": "#E5E5E5",
            "legend.frameon": False,
            # The same results make the same file.
            "svg.hashsalt": "sparksched",
            "svg.fonttype": "none",
        }
    )
    drawn = {}
    for name, panels in tomllib.loads(TABLES.read_text())["pictures"].items():
        figure = Figure(figsize=(5 * len(panels), 3.8), layout="constrained")
        axes = figure.subplots(1, len(panels), squeeze=False).flat
        draw = [_draw_bars if "metrics" in it else _draw for it in panels]
        if all(it(*its, rows) for it, *its in zip(draw, axes, panels, strict=True)):
            target = StringIO()
            figure.savefig(target, format="svg", bbox_inches="tight", metadata={"Date": None})
            # Matplotlib leaves spaces at the ends of lines.
            lines = (line.rstrip() for line in target.getvalue().splitlines())
            drawn[name] = "\n".join(lines) + "\n"
    return drawn


def _draw(panel: Axes, what: dict[str, Any], rows: pd.DataFrame) -> bool:
    """Draw a metric against the number that points begin with; return whether there is one.

    Of several cases it is the first one that was measured.
    """
    chosen = rows[rows["metric"] == what["metric"]]
    for name, value in what.get("where", {}).items():
        chosen = chosen[chosen[name] == value]
    chosen = chosen[chosen["point"].str.fullmatch(what["points"])]
    chosen = first_case(chosen, what["case"])
    is_drawn = False
    for side, label in what["sides"].items():
        values = chosen[chosen["side"] == side]
        numbers = values["point"].str.extract(r"^([\d,]+)")[0].str.replace(",", "").astype(float)
        grouped = values["value"].groupby(numbers)
        middle = grouped.median()
        if middle.empty:
            continue
        is_drawn = True
        base = side.removesuffix("-rust")
        panel.errorbar(
            middle.index,
            middle,
            yerr=[middle - grouped.min(), grouped.max() - middle],
            color=COLOURS.get(base, COLOURS["other"]),
            linestyle=":" if side.endswith("-rust") else "-",
            marker="o" if base == "vllm" else "s",
            markersize=4,
            capsize=3,
            label=label,
        )
    if not is_drawn:
        return False
    panel.set_xscale("log", base=4)
    panel.set_yscale("log")
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    panel.set_title(what["title"], loc="left", fontsize=10)
    panel.set_xlabel(what["x"])
    panel.legend(fontsize=8.5)
    return True


def _draw_bars(panel: Axes, what: dict[str, Any], rows: pd.DataFrame) -> bool:
    """Draw metrics of one point, a bar for each side; return whether there are any."""
    chosen = rows[(rows["case"] == what["case"]) & (rows["point"] == what["points"])]
    height = 0.8 / len(what["metrics"])
    for number, (metric, label) in enumerate(what["metrics"].items()):
        grouped = chosen[chosen["metric"] == metric].groupby("side")["value"]
        found = grouped.agg(["median", "min", "max"]).reindex(list(what["sides"])) / 1000
        middle = found["median"]
        error = [middle - found["min"], found["max"] - middle]
        places = [height * number + it for it in range(len(middle))]
        colour = list(COLOURS.values())[number % len(COLOURS)]
        panel.barh(places, middle, height, xerr=error, color=colour, capsize=3, label=label)
    panel.set_yticks([it + 0.4 - height / 2 for it in range(len(what["sides"]))])
    panel.set_yticklabels(what["sides"].values())
    panel.invert_yaxis()
    panel.set_title(what["title"], loc="left", fontsize=10)
    panel.set_xlabel(what["x"])
    panel.legend(fontsize=8.5)
    return not chosen.empty


def _unless_alike(stored: str, drawn: str) -> str:
    """Return the stored picture in the place of one that looks the same."""
    if NUMBER.sub("", stored) != NUMBER.sub("", drawn):
        return drawn
    pairs = zip(NUMBER.findall(stored), NUMBER.findall(drawn), strict=True)
    return stored if all(abs(float(a) - float(b)) < SAME_PLACE for a, b in pairs) else drawn


def main() -> int:
    """Write the pages and pictures anew, or a report of a folder's results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, help="of CSV files; none: the pages' own")
    parser.add_argument("--out", type=Path, metavar="FILE", help="of a folder's report")
    options = parser.parse_args()
    try:
        rows = read(options.folder or FOLDER)
        if options.folder is None:
            for path, text in written_anew(rows).items():
                path.parent.mkdir(exist_ok=True)
                path.write_text(text)
            return 0
    except ReportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    report = whole_report(rows)
    if options.out is None:
        print(report)
    else:
        options.out.write_text(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
