"""Tables about `bench.decode`: rates, latencies, workloads, processors, and equal tokens."""

from collections.abc import Sequence
from typing import Any

from bench.reporting.cells import (
    ALL,
    CASE,
    DECODE,
    OURS,
    STOCK,
    Pair,
    Row,
    Side,
    by_processors,
    servers_of,
)
from bench.reporting.document import Paragraph, Part, Table
from bench.reporting.values import (
    MISSING,
    as_number,
    dig,
    joined,
    numbers,
    pair_text,
    ratio_text,
    rounded,
    spread_text,
    text_of,
)

LEAST_MERGED_SHARE = 0.01

# ---- tokens a second and latency ----


def latency(pairs: Sequence[Pair]) -> list[Part]:
    """Return tokens a second and latencies."""
    if not pairs:
        return []
    rates = [
        [
            pair.key.label,
            spread_text(pair.stock.each("tokens_per_s")),
            spread_text(pair.ours.each("tokens_per_s")),
            ratio_text(*pair.figures("tokens_per_s")),
            pair_text(*pair.figures("merged_share"), unit=" %", scale=100),
            _load(pair),
        ]
        for pair in pairs
    ]
    latencies = [
        [
            pair.key.label,
            *(pair_text(*pair.figures("itl_ms", it)) for it in ("p50", "p90", "p99", "max")),
            *(pair_text(*pair.figures("ttft_ms", it)) for it in ("p50", "p99")),
        ]
        for pair in pairs
    ]
    shares = ("ITL p50, ms", "p90", "p99", "max", "TTFT p50, ms", "p99")
    return [
        Paragraph(
            "Tokens a second at the client while all streams decode: median over rounds, and the "
            "least and most. Merged: tokens that came with another one in the same output, because "
            "their reader was late. Load: CPU of the busiest process that drives over HTTP."
        ),
        Table((CASE, "vLLM", "sparksched", "ratio", "merged", "load"), rates),
        Paragraph(
            "Latencies, vLLM → sparksched, each the median over rounds. TTFT is that of requests "
            "which are all sent at once."
        ),
        Table((CASE, *shares), latencies),
        *_merged(pairs),
    ]


def _merged(pairs: Sequence[Pair]) -> list[Part]:
    rows = []
    for pair in pairs:
        shares = numbers(pair.figures("merged_share"))
        if max(shares, default=0.0) < LEAST_MERGED_SHARE:
            continue
        rows.append(
            [
                pair.key.label,
                joined(*(_tokens_per_output(it) for it in pair.figures("merged_share"))),
                *(pair_text(*pair.figures("output_gap_ms", it)) for it in ("p50", "p99", "max")),
            ]
        )
    if not rows:
        return []
    return [
        Paragraph(
            "Where streams got several tokens at once, ITL counts all but one of them as 0 ms. "
            "How smooth such a stream is, the gaps between its outputs say:"
        ),
        Table((CASE, "tokens an output", "gap p50, ms", "p99", "max"), rows),
    ]


def _tokens_per_output(merged_share: Any) -> str:
    share = as_number(merged_share)
    return MISSING if share is None else rounded(1 / (1 - share))


def _load(pair: Pair) -> str:
    found = pair.figures("load", "busiest_percent")
    if pair.key.driver != "http":
        return "none"
    return pair_text(*found, unit=" %")


# ---- modes, workloads, processors ----


def modes(pairs: Sequence[Pair]) -> list[Part]:
    """Return what asynchronous scheduling changes, where both modes were measured."""
    by_case: dict[tuple[str, str, int], dict[str, Pair]] = {}
    for pair in pairs:
        key = pair.key
        by_case.setdefault((key.model, key.driver, key.concurrency), {})[key.mode] = pair
    rows = []
    for (model, driver, concurrency), modes in by_case.items():
        if len(modes) < 2:
            continue
        cells = [f"{model}, {driver}, {concurrency:,}"]
        for scheduler in (STOCK, OURS):
            sides = [
                modes[mode].stock if scheduler == STOCK else modes[mode].ours
                for mode in ("sync", "async")
            ]
            cells.append(pair_text(*(it.figure("tokens_per_s") for it in sides)))
            cells.append(pair_text(*(it.figure("itl_ms", "p50") for it in sides)))
        rows.append(cells)
    if not rows:
        return []
    columns = ("vLLM, tokens/s", "ITL p50, ms", "sparksched, tokens/s", "ITL p50, ms")
    return [
        Paragraph("Synchronous → asynchronous, of each scheduler:"),
        Table(("model, driver, streams", *columns), rows),
    ]


def workloads(pairs: Sequence[Pair]) -> list[Part]:
    """Return the workloads of mixed lengths and of shared prefixes."""
    chosen = [it for it in pairs if it.key.workload != DECODE]
    if not chosen:
        return []
    rows = [
        [
            f"{pair.key.workload}: {pair.key.label}",
            spread_text(pair.stock.each("tokens_per_s")),
            spread_text(pair.ours.each("tokens_per_s")),
            ratio_text(*pair.figures("tokens_per_s")),
            *(pair_text(*pair.figures("itl_ms", it)) for it in ("p50", "p99")),
            pair_text(*pair.figures("ttft_ms", "p50")),
            joined(*(_hit_share(side) for side in (pair.stock, pair.ours))),
        ]
        for pair in chosen
    ]
    columns = ("vLLM", "sparksched", "ratio", "ITL p50, ms", "p99", "TTFT p50, ms", "prefix hits")
    return [
        Paragraph(
            "Output tokens a second from the first request to the last token, median over rounds; "
            "latencies vLLM → sparksched. Prefix hits: of the prompts' tokens."
        ),
        Table((f"workload: {CASE}", *columns), rows),
    ]


def _hit_share(side: Side) -> str:
    hits = numbers(side.each("counters", "prefix_cache_hits"))
    queries = numbers(side.each("counters", "prefix_cache_queries"))
    if not hits or not sum(queries):
        return MISSING
    return f"{rounded(100 * sum(hits) / sum(queries))} %"


def few_cores(pairs: Sequence[Pair]) -> list[Part]:
    """Return what becomes of it on few processors."""
    confined = {it.key.cores for it in pairs} - {ALL}
    cases = {
        (it.key.model, it.key.mode, it.key.workload, it.key.driver, it.key.concurrency)
        for it in pairs
        if it.key.cores in confined
    }
    rows = []
    for pair in pairs:
        key = pair.key
        if (key.model, key.mode, key.workload, key.driver, key.concurrency) in cases:
            rows.append(
                [
                    f"{key.model}, {key.mode}, {key.workload}, {key.driver}, {key.concurrency:,}",
                    key.cores,
                    spread_text(pair.stock.each("tokens_per_s")),
                    spread_text(pair.ours.each("tokens_per_s")),
                    ratio_text(*pair.figures("tokens_per_s")),
                    *(pair_text(*pair.figures("itl_ms", it)) for it in ("p50", "p99")),
                ]
            )
    if not rows:
        return []
    rows.sort(key=lambda row: (row[0], by_processors(row[1])))
    columns = ("processors", "vLLM, tokens/s", "sparksched", "ratio", "ITL p50, ms", "p99")
    return [
        Paragraph("API server and engine together confined to a number of processors:"),
        Table(("model, mode, workload, driver, streams", *columns), rows),
    ]


# ---- the same tokens ----


def streams(results: Sequence[Row]) -> list[Part]:
    """Return how many greedy streams are equal."""
    rows = []
    for (model, mode), sides in servers_of(results, "streams").items():
        stock, ours = (_digests(sides.get(it)) for it in (STOCK, OURS))
        rows.append(
            [
                f"{model}, {mode}",
                _equal(stock[0], ours[0]),
                _equal(*stock),
                _equal(*ours),
                text_of(dig(sides.get(STOCK) or sides.get(OURS), "distinct_tokens_median")),
            ]
        )
    if not rows:
        return []
    columns = ("vLLM and sparksched", "vLLM twice", "sparksched twice", "different tokens a stream")
    return [
        Paragraph(
            "Greedy streams that are equal token for token. What a server brings twice shows what "
            "differs by itself; few different tokens a stream show little, as with random weights."
        ),
        Table(("model, mode", *columns), rows),
    ]


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
