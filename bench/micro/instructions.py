"""Counts the instructions of a step of the core, and compares them with those stored.

Counts don't depend on the machine's mood, so 2 % are noticed. Callgrind counts what
`rust/wire/examples/steady_decode.rs` executes; `instructions.json` has the counts of this commit.
Whoever makes a step dearer on purpose stores the new counts with the change.

    python -m bench.micro.instructions [--store]
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

from bench.results import ROOT

PARTS = ("schedule", "update_from_output", "message")
REQUESTS = (1, 64, 256)
LIMIT_PERCENT = 2.0
STORED = Path(__file__).with_suffix(".json")
PROGRAM = ROOT / "target/release/examples/steady_decode"
BUILD = [
    *("cargo", "build", "--locked", "--release", "--quiet"),
    *("-p", "sparksched-wire", "--example", PROGRAM.name),
]


def main() -> int:
    """Count, show beside what is stored, and return the exit status: 1 if a part takes more."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--store", action="store_true", help="store the counts for later changes")
    options = parser.parse_args()
    subprocess.run(BUILD, cwd=ROOT, check=True)
    counts = {f"{part} {number}": _count(part, number) for part in PARTS for number in REQUESTS}
    compiler = subprocess.check_output(["rustc", "--version"], cwd=ROOT, text=True).strip()
    if options.store:
        STORED.write_text(json.dumps({"compiler": compiler, "counts": counts}, indent=2) + "\n")
    stored = json.loads(STORED.read_text())
    if stored["compiler"] != compiler:
        sys.exit(
            f"error: {STORED.name} was counted with {stored['compiler']}, this is {compiler}: "
            "store the counts of the commit before yours first (--store)"
        )
    return _compare(stored["counts"], counts)


def _count(part: str, num_requests: int) -> int:
    """Return the instructions that a function executes in a step, on average."""
    command = [
        "valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null",
        f"--toggle-collect=steady_decode::{part}*", str(PROGRAM), str(num_requests),
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        sys.exit("error: valgrind is not installed")
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: {' '.join(command)}: {error.stderr}")
    collected = re.search(r"Collected : (\d+)", done.stderr)
    if collected is None or collected[1] == "0":
        sys.exit(f"error: callgrind has found no function {part}: {done.stderr}")
    return int(collected[1]) // int(done.stdout)


def _compare(stored: dict[str, int], counts: dict[str, int]) -> int:
    print(f"{'instructions a step, requests':<30}{'stored':>10}{'now':>10}{'change':>10}")
    changes = {name: 100 * (count / stored[name] - 1) for name, count in counts.items()}
    for name, change in changes.items():
        print(f"{name:<30}{stored[name]:>10,}{counts[name]:>10,}{change:>+9.1f}%")
    dearer = [name for name, change in changes.items() if change > LIMIT_PERCENT]
    if dearer:
        print(f"error: over {LIMIT_PERCENT:g} % more than stored: {', '.join(dearer)}")
    elif min(changes.values()) < -LIMIT_PERCENT:
        print("Less than stored: keep it so with --store.")
    return 1 if dearer else 0


if __name__ == "__main__":
    sys.exit(main())
