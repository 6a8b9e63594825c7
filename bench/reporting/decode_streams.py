"""The table about `bench.decode` that says whether both schedulers bring the same tokens."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from bench.reporting.cells import (
    OURS,
    SOURCE,
    STOCK,
    Row,
    are_of_separate_runs,
    has_texts,
    marked,
    with_sources,
)
from bench.reporting.document import Paragraph, Part, Table
from bench.reporting.values import MISSING, NONE, as_number, dig, text_of

GREEDY, SAMPLED = "greedy", "sampled"
UNSCALED = "§"
"""Marks random weights that could not be made lively."""
COLUMNS = (
    "model, mode",
    "tokens",
    "vLLM and sparksched",
    "vLLM twice",
    "sparksched twice",
    "vLLM's starts",
    "sparksched's starts",
    "the same batches",
    "different tokens a stream",
)


class Case(NamedTuple):
    """What two servers' streams have in common; only such compare."""

    model: str
    mode: str
    kind: str
    num_scaled: int
    """How many tensors of weights were scaled meanwhile."""

    @property
    def server(self) -> str:
        """The row's name, but for its tokens."""
        return f"{self.model}, {self.mode}"


def streams(results: Sequence[Row]) -> list[Part]:
    """Return how many streams are equal, of greedy and of sampled tokens."""
    cases, failed = _cases(results)
    if not cases and not failed:
        return []
    rows = [_row(case, sides) for case, sides in sorted(cases.items(), key=lambda it: it[0])]
    rows += [[server, *[MISSING] * (len(COLUMNS) - 1)] for server in failed]
    return [Paragraph(_introduction(cases)), Table(COLUMNS, rows), *_unscaled(cases)]


Sides = dict[str, list[Row]]
"""What each scheduler's servers have brought, one after the other."""
Cases = dict[Case, Sides]


def _cases(results: Sequence[Row]) -> tuple[Cases, list[str]]:
    """Return the streams by what they have in common and by scheduler; servers without any."""
    cases: Cases = {}
    servers: dict[str, None] = {}
    for source, row in with_sources(results, "streams"):
        if not has_texts(row, "model", "mode", "scheduler"):
            continue
        servers |= {f"{row['model']}, {row['mode']}": None}
        for kind, found in _kinds(row):
            scaled = row.get("scaled")
            case = Case(row["model"], row["mode"], kind, int(as_number(scaled) or 0))
            kept = found | {"scaled": scaled, SOURCE: source, "visit": row.get("visit")}
            cases.setdefault(case, {}).setdefault(row["scheduler"], []).append(kept)
    known = {case.server for case in cases}
    return cases, [server for server in servers if server not in known]


def _kinds(row: Row) -> Iterator[tuple[str, Row]]:
    """Yield what was kept of sampled and of greedy tokens; older results have greedy ones alone."""
    if "digests" in row:
        yield SAMPLED if row.get("is_sampled") is True else GREEDY, row
    greedy = row.get("greedy")
    if isinstance(greedy, dict):
        yield GREEDY, greedy


def _row(case: Case, sides: Sides) -> list[str]:
    servers = [sides.get(it, []) for it in (STOCK, OURS)]
    pairs = _pairs(sides)
    tokens = case.kind + (", weights scaled" if case.num_scaled else "")
    is_unscaled = any(_reason(it) is not None for it in itertools.chain(*servers))
    return [
        marked(case.server, any(map(are_of_separate_runs, pairs))),
        f"{tokens} {UNSCALED}" if is_unscaled else tokens,
        _each(_equal(_digests(it[STOCK])[0], _digests(it[OURS])[0]) for it in pairs),
        *(_each(_equal(*_digests(it)) for it in started) for started in servers),
        *(_starts(started) for started in servers),
        _each(_same_batches(it[STOCK], it[OURS]) for it in pairs),
        text_of(dig(next(itertools.chain(*servers), None), "distinct_tokens_median")),
    ]


def _pairs(sides: Sides) -> list[dict[str, Row]]:
    """Return a server of each scheduler's from each visit that has both; else the first ones."""
    stock, ours = ({_visit_of(it): it for it in sides.get(name, [])} for name in (STOCK, OURS))
    visits = [it for it in stock if it in ours]
    if visits:
        return [{STOCK: stock[it], OURS: ours[it]} for it in visits]
    first = {name: servers[0] for name, servers in sides.items()}
    return [first] if {STOCK, OURS} <= first.keys() else []


def _visit_of(row: Row) -> tuple[Any, float | None]:
    return row[SOURCE], as_number(row.get("visit"))


def _each(counts: Iterable[str]) -> str:
    """Return what was counted, once if it is always the same."""
    found = list(counts)
    return ", ".join(found if len(set(found)) > 1 else found[:1]) or MISSING


def _starts(servers: Sequence[Row]) -> str:
    """Return how many streams are equal of any two servers of one scheduler."""
    if len(servers) < 2:
        return NONE
    first_times = [_digests(it)[0] for it in servers]
    return _each(itertools.starmap(_equal, itertools.combinations(first_times, 2)))


def _same_batches(stock: Row, ours: Row) -> str:
    """Return whether two servers' steps had the same sizes the first time."""
    first, second = (dig(it, "batches") for it in (stock, ours))
    if not (isinstance(first, list) and isinstance(second, list) and first and second):
        return MISSING
    return "yes" if first[0] == second[0] else "no"


def _introduction(cases: Cases) -> str:
    which = "Greedy streams that are equal token for token."
    if any(case.kind == SAMPLED for case in cases):
        which = (
            "Streams that are equal token for token: greedy ones, and those whose tokens are "
            "sampled at temperature 1, each with a seed of its own."
        )
    if any(case.num_scaled for case in cases):
        which += (
            " Weights scaled: random ones, for as long as tokens were compared, to the size of a "
            "trained network's; they compare only with each other."
        )
    return (
        f"{which} What a server brings twice shows what differs by itself, and so do several of "
        "its starts; few different tokens a stream show little, as with random weights. The same "
        "batches: whether all steps had as many requests and tokens with both schedulers; where "
        "they hadn't, sums are rounded in other ways."
    )


def _unscaled(cases: Cases) -> list[Part]:
    reasons = {
        f"{case.server}, {scheduler}: {reason}": None
        for case, sides in cases.items()
        for scheduler, rows in sides.items()
        for row in rows
        if (reason := _reason(row)) is not None
    }
    if not reasons:
        return []
    return [Paragraph(f"{UNSCALED} random weights could not be scaled. {'; '.join(reasons)}.")]


def _reason(row: Row) -> str | None:
    """Return why weights were not scaled that should have been."""
    reason = dig(row, "scaled", "missing")
    return reason if isinstance(reason, str) else None


def _digests(row: Row | None) -> list[list[Any]]:
    """Return the digests of a server's streams, first and second time; empty if there are none."""
    found = dig(row, "digests")
    if not isinstance(found, list) or not all(isinstance(it, list) for it in found):
        return [[], []]
    return [*found, [], []][:2]


def _equal(first: list[Any], second: list[Any]) -> str:
    if not first or len(first) != len(second):
        return MISSING
    count = sum(a == b for a, b in zip(first, second, strict=True))
    return f"{count} of {len(first)}"
