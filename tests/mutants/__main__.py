"""Change the Rust code in small ways, one at a time, and see whether tests notice: `make mutants`.

cargo-mutants lists the changes; of these, some are drawn. One that no test notices is an error,
unless `equivalent.toml` says why none can.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from .judge import COMPILER, QUICK_STAGES, ROOT, SLOW_STAGES, WORK, Judge, Mutant

EQUIVALENT = Path(__file__).with_name("equivalent.toml")
RESULTS = WORK / "results.json"
CRATES = ("sparksched-core", "sparksched-ring")
# What only tests call, what is only printed, and what is compiled for fuzzing alone.
NOT_MUTATED = ("check_invariants", "fmt::(Debug|Display)", "src/fuzzing.rs")
UNNOTICED = "unnoticed"


@dataclass(frozen=True)
class Result:
    mutant: Mutant
    verdict: str

    @property
    def is_noticed(self) -> bool:
        return self.verdict != UNNOTICED


def all_mutants(cargo_mutants: str) -> list[Mutant]:
    """Return every change that cargo-mutants would make to the two crates."""
    command = [cargo_mutants, "mutants", "--list", "--json", "--no-config", "--colors=never"]
    for crate in CRATES:
        command += ["--package", crate]
    for pattern in NOT_MUTATED:
        command += ["--exclude-re", pattern]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return [Mutant.from_listed(entry) for entry in json.loads(listed.stdout)]


def draw(mutants: list[Mutant], seed: int, count: int) -> list[Mutant]:
    """Return mutants at random, the same for the same code and seed.

    A larger count begins with those of a smaller one.
    """
    shuffled = sorted(mutants, key=lambda mutant: mutant.name)
    random.Random(seed).shuffle(shuffled)
    return shuffled[:count]


def known_equivalents() -> dict[str, str]:
    """Return why no test can notice a mutant, by the mutant's key."""
    entries = tomllib.loads(EQUIVALENT.read_text())["mutant"]
    return {entry["key"]: entry["reason"] for entry in entries}


def noticed_before() -> dict[str, str]:
    """Return the verdicts of an earlier run, by name, but for mutants that went unnoticed."""
    if not RESULTS.exists():
        return {}
    verdicts: dict[str, str] = json.loads(RESULTS.read_text())
    return {name: verdict for name, verdict in verdicts.items() if verdict != UNNOTICED}


def judge_all(mutants: list[Mutant], verdicts: dict[str, str]) -> list[Result]:
    """Judge each that has no verdict yet, and write down what is known after each."""
    judge = Judge()
    for stages in (QUICK_STAGES, SLOW_STAGES):
        for mutant in mutants:
            if verdicts.get(mutant.name, UNNOTICED) != UNNOTICED:
                continue
            start = time.monotonic()
            verdict = judge.noticed_by(mutant, stages[mutant.crate]) or UNNOTICED
            print(f"{time.monotonic() - start:4.0f} s  {verdict}: {mutant.name}", flush=True)
            verdicts[mutant.name] = verdict
            RESULTS.write_text(json.dumps(verdicts, indent=1))
    return [Result(mutant, verdicts[mutant.name]) for mutant in mutants]


def report(results: list[Result]) -> int:
    """Print what went unnoticed; return the process's exit status."""
    reasons = known_equivalents()
    counts = Counter(result.verdict for result in results)
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))
    # An entry that is wrong is as bad as one that is missing.
    wrong = [it for it in results if it.is_noticed == (it.mutant.key in reasons)]
    for result in wrong:
        print(f"\n{result.verdict}: {result.mutant.key}\n{result.mutant.diff}")
    num_built = len(results) - counts[COMPILER]
    print(f"{num_built} mutants were built, {len(wrong)} of them are not as they should be")
    return int(bool(wrong))


def main() -> int:
    """Draw, judge and report."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--cargo-mutants", required=True, metavar="PROGRAM")
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=28)
    parser.add_argument(
        "--go-on", action="store_true", help="judge only what no earlier run has seen noticed"
    )
    parser.add_argument(
        "--list", action="store_true", help="print what is drawn, and judge nothing"
    )
    arguments = parser.parse_args()
    mutants = draw(all_mutants(arguments.cargo_mutants), arguments.seed, arguments.count)
    if arguments.list:
        print(*(mutant.name for mutant in mutants), sep="\n")
        return 0
    WORK.mkdir(parents=True, exist_ok=True)
    return report(judge_all(mutants, noticed_before() if arguments.go_on else {}))


if __name__ == "__main__":
    sys.exit(main())
