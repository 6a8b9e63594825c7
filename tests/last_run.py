"""Runs a command, and writes into docs/promises.md when that was, of what, and how it ended.

Its arguments are NAME COMMAND...: the page has a place for each name.
"""

import datetime
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/promises.md"


def main(name: str, command: list[str]) -> int:
    """Return the command's exit status."""
    commit = output_of("git", "describe", "--always", "--dirty")
    day = datetime.datetime.now(datetime.UTC).date()
    start = time.monotonic()
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    minutes = (time.monotonic() - start) / 60
    verdict = "passed" if status == 0 else "failed"
    line = f"The last run: {day}, commit {commit}, {verdict} after {minutes:.0f} minutes.\n"
    place = re.compile(rf"(?<=<!-- last run of make {name} -->\n).*\n")
    text, count = place.subn(line, PAGE.read_text())
    if count != 1:
        raise RuntimeError(f"{PAGE} has no place for the last run of {name}")
    PAGE.write_text(text)
    return status


def output_of(*command: str) -> str:
    """Return what a command prints."""
    return subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
