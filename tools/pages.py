"""Writes the lists of docs/changes-in-vllm.md from the table of seams: `make tables` calls it.

The page says where they are to be: after a line `<!-- seams: GROUP -->`.
"""

import re
from typing import Final

from sparksched.compat import seams
from sparksched.compat.seams import Group
from sparksched.compat.source import dotted

from testkit.vllm_source import ROOT

PAGE: Final = ROOT / "docs/changes-in-vllm.md"
LIST: Final = re.compile(r"<!-- seams: (\w+) -->\n(?:In .*\n\n)?(?:- .*\n)*")


def with_seams(text: str) -> str:
    """Return a page's text with its lists anew; KeyError names a group that isn't one."""
    groups = {group.name: group for group in seams.GROUPS}

    def anew(found: re.Match[str]) -> str:
        return "\n".join([f"<!-- seams: {found[1]} -->", *listed(groups[found[1]]), ""])

    return LIST.sub(anew, text)


def listed(group: Group) -> list[str]:
    """Return what a group is good for, its functions, and the values that it sets."""
    rows = [f"In {group.process}. Gain: {group.gain}. Turned off by: {group.off}.", ""]
    rows += (f"- `{dotted(seam.target)}`: {seam.purpose}" for seam in group.functions)
    if group.values:
        names = ", ".join(f"`{dotted(target)}`" for target in group.values)
        rows.append(f"- Sets {names}")
    return rows


if __name__ == "__main__":
    PAGE.write_text(with_seams(PAGE.read_text()))
