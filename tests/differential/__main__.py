"""Command line: `python -m tests.differential --seeds 0:1000 --steps 200`."""

from __future__ import annotations

import argparse
import os
import sys
import time

from testkit import vllm_overlay


def main() -> int:
    """Run scenarios until the first difference; return the process's exit status."""
    from testkit.worlds.candidates import CANDIDATES
    from testkit.worlds.scenarios import NAMED_SETTINGS

    from .runner import Coverage, ReferenceFailedError, SchedulersDiffer, run_scenario

    parser = argparse.ArgumentParser(prog="python -m tests.differential", description=__doc__)
    parser.add_argument("--seeds", type=_seed_range, default=range(10), metavar="FIRST:END")
    parser.add_argument("--steps", type=int, default=200, help="engine steps of each scenario")
    parser.add_argument("--config", choices=sorted(NAMED_SETTINGS), help="default: all of them")
    parser.add_argument("--candidate", choices=sorted(CANDIDATES), default="sparksched")
    parser.add_argument(
        "--snapshot-interval", type=int, default=1, help="steps between comparisons of all state"
    )
    parser.add_argument(
        "--broadcast",
        action="store_true",
        help="compare steps as other processes get them",
    )
    parser.add_argument(
        "--encoded", action="store_true", help="compare outputs as messages, byte for byte"
    )
    parser.add_argument(
        "--knobs",
        action="store_true",
        help="decide each step with a budget and a threshold of its own",
    )
    parser.add_argument(
        "--pass-over-failures",
        action="store_true",
        help="go on with the next scenario where vLLM itself fails, and count these",
    )
    _add_vllm_argument(parser)
    arguments = parser.parse_args()
    names = [arguments.config] if arguments.config else list(NAMED_SETTINGS)
    coverage = Coverage()
    num_failures = 0
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
                    broadcast=arguments.broadcast,
                    encoded=arguments.encoded,
                    with_knobs=arguments.knobs,
                )
            except SchedulersDiffer as difference:
                print(difference)
                return 1
            except ReferenceFailedError as failure:
                if not arguments.pass_over_failures:
                    raise
                num_failures += 1
                print(f"configuration {name}, seed {seed}: vLLM fails: {failure.__cause__!r}")
            except Exception:
                print(f"configuration {name}, seed {seed}: the scenario itself failed")
                raise
    for situation, count in sorted(coverage.items()):
        print(f"{count:9d}  {situation}")
    num_scenarios = len(names) * len(arguments.seeds) - num_failures
    print(f"{num_scenarios} scenarios without a difference, {time.perf_counter() - start:.1f} s")
    return 0


def _seed_range(text: str) -> range:
    first, _, end = text.partition(":")
    return range(int(first), int(end) if end else int(first) + 1)


def _missing_variables() -> dict[str, str]:
    """Return what the environment lacks, and what must be there before vLLM is imported."""
    variables = {}
    if "PYTHONHASHSEED" not in os.environ:
        # vLLM iterates over sets of request ids, so a seed means one trace only if strings hash
        # alike in every process.
        variables["PYTHONHASHSEED"] = "0"
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    _add_vllm_argument(parser)
    version = parser.parse_known_args()[0].vllm
    if version is not None:
        variables |= vllm_overlay.variables(version)
    return variables


def _add_vllm_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--vllm", metavar="VERSION", help="compare with this vLLM instead of the installed one"
    )


if __name__ == "__main__":
    missing = _missing_variables()
    if missing:
        os.execve(sys.executable, sys.orig_argv, os.environ | missing)
    sys.exit(main())
