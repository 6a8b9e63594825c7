"""Rows about a long prompt beside streams, and about an ordinary load, with and without pacing."""

import itertools
from collections.abc import Iterator, Mapping

from bench.report.pairs import Row, rows_of
from bench.report.values import count_text, dig, numbers, pair_text, range_text, text_of

Results = Mapping[str, Row]

MIXED_COLUMNS = (
    "model, streams: server",
    "tokens/s of a stream meanwhile",
    "between outputs p50, ms",
    "p99",
    "longest",
    "short one's first token p50, ms",
    "longest",
    "long one's first token, s",
    "all tokens/s",
    "long one's first token if nobody decodes, s",
)
MIXED_PATHS = (
    ("stream_tokens_per_s",),
    *(("gap_ms", at) for at in ("p50", "p99", "max")),
    *(("short_ttft_ms", at) for at in ("p50", "max")),
    ("long_ttft_s",),
    ("tokens_per_s",),
)
"""Of a round, as the columns have it; so are those below."""
ORDINARY_COLUMNS = (
    "model: server, load",
    "requests/s",
    "first token p50, ms",
    "p99",
    "longest silence, ms",
    "preempted",
)
ORDINARY_PATHS = (
    ("requests_per_s",),
    *(("ttft_ms", at) for at in ("p50", "p99")),
    ("silence_ms",),
)
TIMER_COLUMNS = (
    "server",
    "tokens/s of a stream meanwhile",
    "between tokens p99, ms",
    "short one's first token p50, ms",
    "longest",
    "long one's first token, s",
)


def mixed(results: Results) -> Iterator[list[str]]:
    """Yield each measured server: the least and the most of its rounds.

    Servers that did the same stand together, in the order in which they were measured first. After
    them comes what streams got before the long prompt, where that was measured.
    """
    cases: dict[tuple[str, str], list[Row]] = {}
    for row in (it for result in results.values() for it in rows_of(result, "mixed")):
        model = str(row.get("model")).partition(" ")[0]
        cases.setdefault((model, str(row.get("streams"))), []).append(row)
    for rows in cases.values():
        yield from map(_beside_a_long_prompt, rows)
        for model, of_model in itertools.groupby(rows, lambda it: it.get("model")):
            rounds = itertools.chain.from_iterable(rows_of(it, "rounds") for it in of_model)
            before = numbers(dig(it, "before_tokens_per_s") for it in rounds)
            if before:
                name = f"{model}, {rows[0].get('streams')}: before the long prompt"
                yield [name, range_text(before), *["-"] * len(MIXED_PATHS)]


def _beside_a_long_prompt(row: Row) -> list[str]:
    rounds = rows_of(row, "rounds")
    return [
        f"{row.get('model')}, {row.get('streams')}: {_server(row)}",
        *(range_text(dig(it, *path) for it in rounds) for path in MIXED_PATHS),
        text_of(dig(row, "alone_s")),
    ]


PACED = "A long prompt beside streams, paced"
STANDARD, PACING = "vllm", "paced"
"""Servers: vLLM, and paced prefill with any values."""
INTERVAL = "interval"
"""Of vLLM, where prompts are let in each so many steps."""


def parts_of(side: str) -> tuple[str, str, list[str]]:
    """Return what a server's name says: its kind, its interval or nothing, and other values."""
    kind, *values = side.split("-")
    return (kind, values[1], values[2:]) if values[:1] == [INTERVAL] else (kind, "", values)


def gain(results: Results) -> Iterator[list[str]]:
    """Yield what streams get while a long prompt is computed, if it is paced: one row.

    Of vLLM's rounds it is the best one, of the paced ones the worst.
    """
    cases: dict[tuple[str, int], dict[str, Row]] = {}
    for row in (it for result in results.values() for it in rows_of(result, "mixed")):
        kind = str(row.get("side")).partition("-")[0]
        side = kind if kind == PACING else str(row.get("side"))
        sides = cases.setdefault((str(row.get("model")), row.get("streams", 0)), {})
        sides.setdefault(side, row)
    measured = (it for it in cases.items() if {STANDARD, PACING} <= it[1].keys())
    for (model, streams), sides in itertools.islice(measured, 1):
        rates = (
            numbers(dig(it, "stream_tokens_per_s") for it in rows_of(sides[name], "rounds"))
            for name in (STANDARD, PACING)
        )
        best, worst = (
            choose(it, default=None) for choose, it in zip((max, min), rates, strict=True)
        )
        what = "tokens/s of each stream"
        yield [PACED, f"{model}, HTTP, {streams} streams", what, pair_text(best, worst)]


def ordinary(results: Results) -> Iterator[list[str]]:
    """Yield what requests that come at random wait, at a part of the highest rate: all rounds."""
    for result in results.values():
        for row in rows_of(result, "ordinary"):
            rounds = rows_of(row, "rounds")
            yield [
                f"{row.get('model')}: {_server(row)}, {100 * row['part']:.0f} %",
                *(range_text(dig(it, *path) for it in rounds) for path in ORDINARY_PATHS),
                range_text((dig(it, "preempted") for it in rounds), count_text),
            ]


def timer(results: Results) -> Iterator[list[str]]:
    """Yield the medians of each side's rounds, where the GPU is only a timer."""
    for result in results.values():
        for row in rows_of(result, "mixed_timer"):
            yield [
                str(row.get("side")),
                text_of(dig(row, "stream_tokens_per_s")),
                *(count_text(dig(row, f"{it}_ms")) for it in ("gap_p99", "short_p50", "short_max")),
                text_of(dig(row, "long_s")),
            ]


def _server(row: Row) -> str:
    kind, interval, values = parts_of(str(row.get("side")))
    if kind == PACING:
        return f"paced, {values[0]} ms, share {values[1]}"
    name = "vLLM" if kind == STANDARD else kind
    if interval:
        name += f", prompts each {interval} steps"
    return f"{name}, threshold {count_text(int(values[0]))}" if values else name
