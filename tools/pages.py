"""Writes the lists of docs/changes-in-vllm.md from the table of seams: `make tables` calls it.

The page says where they are to be: after a line `<!-- seams: GROUP -->`, and after
`<!-- seams: all -->` the table of all groups.
"""

import re
from typing import Final

from sparksched.compat import seams
from sparksched.compat.seams import Group
from sparksched.compat.source import dotted

from testkit.vllm_source import ROOT

PAGE: Final = ROOT / "docs/changes-in-vllm.md"
MARK: Final = re.compile(r"<!-- seams: (\w+) -->")


def with_seams(text: str) -> str:
    """Return a page's text with its lists anew; KeyError names a group that isn't one."""
    groups = {group.name: group for group in seams.GROUPS}
    written: list[str] = []
    is_replaced = False
    for line in text.splitlines():
        if is_replaced and line.startswith(("|", "- ")):
            continue
        is_replaced = False
        written.append(line)
        if found := MARK.fullmatch(line):
            written += overview() if found[1] == "all" else listed(groups[found[1]])
            is_replaced = True
    return "\n".join(written) + "\n"


def overview() -> list[str]:
    """Return the table of all groups."""
    rows = [
        "| group | functions | process | gain | turned off by |",
        "| --- | --- | --- | --- | --- |",
    ]
    for group in seams.GROUPS:
        number = str(len(group.functions))
        rows.append(f"| {' | '.join((group.name, number, group.process, group.gain, group.off))} |")
    total = sum(len(group.functions) for group in seams.GROUPS)
    return [*rows, f"| all | {total} | | | `VLLM_SCHEDULER=vllm` |"]


def listed(group: Group) -> list[str]:
    """Return the list of one group's functions, and of the values that it sets."""
    rows = []
    for seam in group.functions:
        gain = f" (gain: {seam.gain})" if seam.gain else ""
        rows.append(f"- `{dotted(seam.target)}`: {seam.purpose}{gain}")
    if group.values:
        names = ", ".join(f"`{dotted(seam.target)}`" for seam in group.values)
        rows.append(f"- Sets {names}")
    return rows


if __name__ == "__main__":
    PAGE.write_text(with_seams(PAGE.read_text()))
