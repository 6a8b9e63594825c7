"""The tables of docs/changes-in-vllm.md, from the table of seams.

A page says where they are to be: after a line `<!-- seams: GROUP -->`, and after
`<!-- seams: all -->` the one of all groups.
"""

import re

from sparksched.compat import seams
from sparksched.compat.seams import Group
from sparksched.compat.source import dotted

from bench.report.marks import tables_anew

MARK = re.compile(r"<!-- seams: (\w+) -->")


def with_seams(text: str) -> str:
    """Return a page's text with its tables of seams anew; KeyError names a group that isn't one."""
    groups = {group.name: group for group in seams.GROUPS}
    return tables_anew(
        text, MARK, lambda mark: overview() if mark[1] == "all" else table(groups[mark[1]])
    )


def overview() -> list[str]:
    """Return the table of all groups."""
    rows = [
        "| group | functions | process | what it gains | turned off by | without it |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for group in seams.GROUPS:
        number = str(len(group.functions))
        cells = (group.name, number, group.process, group.gain, group.off, group.instead)
        rows.append(f"| {' | '.join(cells)} |")
    total = sum(len(group.functions) for group in seams.GROUPS)
    return [*rows, f"| all | {total} | | | `VLLM_SCHEDULER=vllm` | |"]


def table(group: Group) -> list[str]:
    """Return the table of one group's functions, and of the values that it sets."""
    has_gain = any(seam.gain for seam in group.functions)
    head = ["function or value", "what for", *(["what it gains"] if has_gain else [])]
    rows = [f"| {' | '.join(head)} |", f"| {' | '.join(['---'] * len(head))} |"]
    for seam in (*group.functions, *group.values):
        name = f"`{dotted(seam.target)}`" + (" (set)" if seam in group.values else "")
        cells = [name, seam.purpose, *([seam.gain] if has_gain else [])]
        rows.append(f"| {' | '.join(cells)} |")
    return rows
