"""The table about `bench.decode` that says in which rounds kernels were compiled."""

from collections.abc import Sequence

from bench.reporting.cells import CASE, Pair, Side
from bench.reporting.document import Paragraph, Part, Table
from bench.reporting.values import NONE, as_number, count_text, dig, names_of, text_of


def compiled(pairs: Sequence[Pair]) -> list[Part]:
    """Return the rounds in which a batch had to wait for kernels, if there are any."""
    rows = [
        [
            pair.label,
            scheduler,
            *(
                ", ".join(as_text(dig(entry, "compiled", name)) for entry in side.rounds())
                for name, as_text in (("count", count_text), ("seconds", text_of))
            ),
            _names(side),
        ]
        for pair in pairs
        for scheduler, side in pair.sides()
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


def _names(side: Side) -> str:
    compiling = [it for it in side.rounds() if as_number(dig(it, "compiled", "count"))]
    names = {name for it in compiling for name in names_of(dig(it, "compiled", "kernels"))}
    return ", ".join(sorted(names)) or NONE
