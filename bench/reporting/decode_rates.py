"""Tables about `bench.decode`: rates, latencies, workloads and processors."""

from collections.abc import Sequence
from typing import Any

from bench.reporting.cells import (
    ALL,
    CASE,
    COMPILED,
    DECODE,
    HELD,
    OTHER_RUN,
    OURS,
    STOCK,
    Pair,
    Side,
    by_processors,
    by_size,
    marked,
)
from bench.reporting.decode_compiled import compiled
from bench.reporting.document import Paragraph, Part, Table
from bench.reporting.engine import engine_rate
from bench.reporting.values import (
    MISSING,
    NONE,
    as_number,
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
            pair.label,
            spread_text(pair.stock.each("tokens_per_s")),
            spread_text(pair.ours.each("tokens_per_s")),
            ratio_text(*pair.figures("tokens_per_s")),
            joined(*(str(len(it.rounds()) or NONE) for it in (pair.stock, pair.ours))),
            pair_text(*(engine_rate(it, pair.key.concurrency) for it in (pair.stock, pair.ours))),
            pair_text(*pair.figures("merged_share"), unit=" %", scale=100),
            _load(pair),
        ]
        for pair in pairs
    ]
    latencies = [
        [
            pair.label,
            _spreads(pair, "itl_ms", "p50"),
            pair_text(*pair.figures("itl_ms", "p90")),
            _spreads(pair, "itl_ms", "p99"),
            pair_text(*pair.figures("itl_ms", "max")),
            ttft_text(pair, *(spread_text(it.each("ttft_ms", "p50")) for it in _sides(pair))),
            ttft_text(pair, *(text_of(it) for it in pair.figures("ttft_ms", "p99"))),
        ]
        for pair in pairs
    ]
    columns = ("vLLM", "sparksched", "ratio", "rounds", "by the engine's steps", "merged", "load")
    shares = ("ITL p50, ms", "p90", "p99", "max", "TTFT p50, ms", "p99")
    return [
        Paragraph(
            "Tokens a second at the client while all streams decode: median over rounds, and the "
            "least and most; with two rounds that is their mean, and both. By the engine's steps: "
            "streams by what a step takes in the engine, in the round with the probe; its mean, or "
            "its median where a result has no mean. Where that is more than the client gets, the "
            "engine may be ahead of the API server, or differ between rounds: see the findings. "
            "Merged: tokens that came with another one in the same output, because their reader "
            "was late. Load: CPU of the busiest process that drives over HTTP."
        ),
        Table((CASE, *columns), rates),
        Paragraph(
            "Latencies, vLLM → sparksched, each the median over rounds; in brackets the least and "
            "most of the rounds. TTFT is that of requests which are all sent at once: it differs "
            "widely between rounds, and says little."
        ),
        Table((CASE, *shares), latencies),
        *_merged(pairs),
        *compiled(pairs),
    ]


def _sides(pair: Pair) -> tuple[Side, Side]:
    return pair.stock, pair.ours


def _spreads(pair: Pair, *path: str) -> str:
    return joined(*(spread_text(side.each(*path)) for side in _sides(pair)))


def ttft_text(pair: Pair, *texts: str) -> str:
    """Return both sides' times, each with marks if requests were held or kernels compiled."""
    return joined(*map(_with_marks, _sides(pair), texts))


def _with_marks(side: Side, text: str) -> str:
    marks = ((HELD, side.is_held), (COMPILED, side.has_compiled))
    return text + "".join(f" {mark}" for mark, applies in marks if applies and text != MISSING)


def _merged(pairs: Sequence[Pair]) -> list[Part]:
    rows = []
    for pair in pairs:
        shares = numbers(pair.figures("merged_share"))
        if max(shares, default=0.0) < LEAST_MERGED_SHARE:
            continue
        rows.append(
            [
                pair.label,
                joined(*(tokens_per_output(it) for it in pair.figures("merged_share"))),
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


def tokens_per_output(merged_share: Any) -> str:
    """Return how many tokens an output has, given the share of those that came with another."""
    share = as_number(merged_share)
    return MISSING if share is None else rounded(1 / (1 - share))


def _load(pair: Pair) -> str:
    found = pair.figures("load", "busiest_percent")
    if pair.key.driver != "http":
        return NONE
    return pair_text(*found, unit=" %")


# ---- modes, workloads, processors ----


def modes(pairs: Sequence[Pair]) -> list[Part]:
    """Return what asynchronous scheduling changes, where both modes were measured."""
    rows = []
    for group in by_size(pairs, "model", "driver").values():
        modes = {pair.key.mode: pair for pair in group}
        if len(modes) < 2:
            continue
        key = group[0].key
        sources = [it for pair in group for it in (pair.stock.sources, pair.ours.sources)]
        are_separate = any(it != sources[0] for it in sources)
        cells = [marked(f"{key.model}, {key.driver}, {key.size}", are_separate)]
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
        Table(("model, driver, streams x tokens", *columns), rows),
    ]


def workloads(pairs: Sequence[Pair]) -> list[Part]:
    """Return the workloads of mixed lengths and of shared prefixes."""
    chosen = [it for it in pairs if it.key.workload != DECODE]
    if not chosen:
        return []
    rows = [
        [
            f"{pair.key.workload}: {pair.label}",
            spread_text(pair.stock.each("tokens_per_s")),
            spread_text(pair.ours.each("tokens_per_s")),
            ratio_text(*pair.figures("tokens_per_s")),
            *(pair_text(*pair.figures("itl_ms", it)) for it in ("p50", "p99")),
            ttft_text(pair, *(text_of(it) for it in pair.figures("ttft_ms", "p50"))),
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
        *compiled(chosen),
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
    rows = []
    for group in by_size(pairs, "model", "mode", "workload", "driver").values():
        if not any(pair.key.cores in confined for pair in group):
            continue
        for pair in group:
            key = pair.key
            name = f"{key.model}, {key.mode}, {key.workload}, {key.driver}, {key.size}"
            rows.append(
                [
                    marked(name, pair.is_of_separate_runs),
                    key.cores,
                    spread_text(pair.stock.each("tokens_per_s")),
                    spread_text(pair.ours.each("tokens_per_s")),
                    ratio_text(*pair.figures("tokens_per_s")),
                    _spreads(pair, "itl_ms", "p50"),
                    _spreads(pair, "itl_ms", "p99"),
                ]
            )
    if not rows:
        return []
    rows.sort(key=lambda row: (row[0].removesuffix(f" {OTHER_RUN}"), by_processors(row[1])))
    columns = ("processors", "vLLM, tokens/s", "sparksched", "ratio", "ITL p50, ms", "p99")
    return [
        Paragraph(
            "API server and engine together confined to a number of processors. Rows of other "
            "numbers of tokens a stream are not beside these, as they don't compare; rows may be "
            "from separate runs."
        ),
        Table(("model, mode, workload, driver, streams x tokens", *columns), rows),
    ]
