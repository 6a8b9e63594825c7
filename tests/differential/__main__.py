"""Command line: `python -m tests.differential --seeds 0:1000 --steps 200`."""

from __future__ import annotations

import argparse
import os
import sys
import time


def main() -> int:
    """Run scenarios until the first difference; return the process's exit status."""
    from .runner import Coverage, SchedulersDiffer, run_scenario
    from .world import ALL_SETTINGS, CANDIDATES, NAMED_SETTINGS

    parser = argparse.ArgumentParser(prog="python -m tests.differential", description=__doc__)
    parser.add_argument("--seeds", type=_seed_range, default=range(10), metavar="FIRST:END")
    parser.add_argument("--steps", type=int, default=200, help="engine steps of each scenario")
    parser.add_argument(
        "--config", choices=sorted(ALL_SETTINGS), help="default: all that sparksched has"
    )
    parser.add_argument("--candidate", choices=sorted(CANDIDATES), default="sparksched")
    parser.add_argument(
        "--snapshot-interval", type=int, default=1, help="steps between comparisons of all state"
    )
    parser.add_argument(
        "--encoded", action="store_true", help="compare outputs as messages, byte for byte"
    )
    arguments = parser.parse_args()
    names = [arguments.config] if arguments.config else list(NAMED_SETTINGS)
    coverage = Coverage()
    start = time.perf_counter()
    for seed in arguments.seeds:
        for name in names:
            try:
                run_scenario(
                    name,
                    seed,
                    arguments.steps,
                    CANDIDATES[arguments.candidate],
                    coverage=coverage,
                    snapshot_interval=arguments.snapshot_interval,
                    encoded=arguments.encoded,
                )
            except SchedulersDiffer as difference:
                print(difference)
                return 1
            except Exception:
                print(f"configuration {name}, seed {seed}: the scenario itself failed")
                raise
    for situation, count in sorted(coverage.items()):
        print(f"{count:9d}  {situation}")
    num_scenarios = len(names) * len(arguments.seeds)
    print(f"{num_scenarios} scenarios without a difference, {time.perf_counter() - start:.1f} s")
    return 0


def _seed_range(text: str) -> range:
    first, _, end = text.partition(":")
    return range(int(first), int(end) if end else int(first) + 1)


if __name__ == "__main__":
    if "PYTHONHASHSEED" not in os.environ:
        # vLLM iterates over sets of request ids, so a seed means one trace only if strings hash
        # alike in every process.
        environment = os.environ | {"PYTHONHASHSEED": "0"}
        os.execve(sys.executable, sys.orig_argv, environment)
    sys.exit(main())
