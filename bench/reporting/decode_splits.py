"""The table about `bench.decode` that says how requests were split over engines and stages."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bench.reporting.cells import CASE, DECODE, Pair, Side
from bench.reporting.document import Paragraph, Part, Table
from bench.reporting.values import MISSING, NONE, as_number, dig, joined, text_of

STAGES = "PP"

Cell = Callable[[Side], str]


def splits(pairs: Sequence[Pair]) -> list[Part]:
    """Return how the requests were split of models on several GPUs, as far as results tell."""
    chosen = [pair for pair in pairs if pair.key.layout]
    columns = [
        ("requests by engine", [_both(pair, _by_engine) for pair in chosen]),
        (
            "in batches that take turns",
            [_both(pair, _turns) if STAGES in pair.key.layout else NONE for pair in chosen],
        ),
        ("requests a step", [_timed(pair, "requests") for pair in chosen]),
        ("waiting for peers p50, µs", [_timed(pair, "peer_us", "p50") for pair in chosen]),
        ("p99", [_timed(pair, "peer_us", "p99") for pair in chosen]),
        ("batches of nothing p50, µs", [_timed(pair, "dummy_us", "p50") for pair in chosen]),
        ("p99", [_timed(pair, "dummy_us", "p99") for pair in chosen]),
    ]
    # Older results don't have them.
    known = [(heading, texts) for heading, texts in columns if set(texts) - {MISSING, NONE}]
    if not known:
        return []
    labels = [f"{pair.key.workload}: {pair.label}" for pair in chosen]
    return [
        Paragraph(
            "Over several engines, and over the batches that take turns in pipeline stages, "
            "vLLM → sparksched; rounds that differ stand one after the other. A round's speed "
            "depends on it. Of the engine with the most steps, in the round with the probe: the "
            "mean number of requests in a step, how long it waits in a step until its peers have "
            "agreed on it, and what it takes to run a batch of nothing for their experts."
        ),
        Table(
            (f"workload: {CASE}", *(heading for heading, _ in known)),
            list(zip(labels, *(texts for _, texts in known), strict=True)),
        ),
    ]


def _both(pair: Pair, cell: Cell) -> str:
    return joined(cell(pair.stock), cell(pair.ours))


def _timed(pair: Pair, *path: str) -> str:
    """Return a figure of the round with the probe, which only steady workloads have."""
    if pair.key.workload != DECODE:
        return NONE
    return _both(pair, lambda side: text_of(side.get("phases", *path)))


def _by_engine(side: Side) -> str:
    return _distinct(
        _slashed([counts[name] for name in sorted(counts, key=_by_number)])
        if isinstance(counts := dig(entry, "counters", "requests_by_engine"), dict)
        else MISSING
        for entry in side.rounds()
    )


def _by_number(engine: str) -> tuple[int, str]:
    return len(engine), engine


def _turns(side: Side) -> str:
    """Return the sizes of the batches of each engine, the largest first."""
    return _distinct(
        " + ".join(map(_slashed, engines))
        if isinstance(engines := dig(entry, "turns"), list) and engines
        else MISSING
        for entry in side.rounds()
    )


def _slashed(counts: Any) -> str:
    """Return numbers beside each other; missing if one of them is none."""
    found = [as_number(it) for it in counts] if isinstance(counts, list) else []
    if not found or None in found:
        return MISSING
    return "/".join(f"{number:,.10g}" for number in found)


def _distinct(texts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(texts)) or MISSING
