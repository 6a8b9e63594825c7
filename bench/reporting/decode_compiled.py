"""The table about `bench.decode` that says in which rounds kernels were compiled."""

from collections.abc import Callable, Sequence

from bench.reporting.cells import CASE, OURS, STOCK, Pair, Side
from bench.reporting.document import Paragraph, Part, Table
from bench.reporting.values import MISSING, NONE, as_number, dig, rounded


def compiled(pairs: Sequence[Pair]) -> list[Part]:
    """Return the rounds in which a batch had to wait for kernels, if there are any."""
    rows = [
        [
            pair.label,
            scheduler,
            _each(side, "count", "{:,.0f}".format),
            _each(side, "seconds", rounded),
            _names(side),
        ]
        for pair in pairs
        for scheduler, side in ((STOCK, pair.stock), (OURS, pair.ours))
        if side.has_compiled
    ]
    if not rows:
        return []
    return [
        Paragraph(
            "Kernels that were compiled while requests waited, and for how many seconds, in each "
            "round; of several workers, that of the one that took longest. In such a round times "
            "to the first token say nothing of the scheduler:"
        ),
        Table((CASE, "scheduler", "kernels", "seconds", "which"), rows),
    ]


def _each(side: Side, name: str, text_of: Callable[[float], str]) -> str:
    found = [as_number(dig(entry, "compiled", name)) for entry in side.rounds()]
    return ", ".join(MISSING if it is None else text_of(it) for it in found)


def _names(side: Side) -> str:
    kernels = [dig(entry, "compiled", "kernels") for entry in side.rounds()]
    names = {name for it in kernels if isinstance(it, dict) for name in it}
    return ", ".join(sorted(names)) or NONE
