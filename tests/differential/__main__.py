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

    from .runner import Reached, SchedulersDiffer, run_scenario

    parser = argparse.ArgumentParser(prog="python -m tests.differential", description=__doc__)
    parser.add_argument("--seeds", type=_seed_range, default=range(10), metavar="FIRST:END")
    parser.add_argument("--steps", type=int, default=200, help="engine steps of each scenario")
    parser.add_argument("--config", choices=sorted(NAMED_SETTINGS), help="default: all of them")
    parser.add_argument("--candidate", choices=sorted(CANDIDATES), default="sparksched")
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
    _add_vllm_argument(parser)
    arguments = parser.parse_args()
    names = [arguments.config] if arguments.config else list(NAMED_SETTINGS)
    reached = Reached()
    start = time.perf_counter()
    for seed in arguments.seeds:
        for name in names:
            try:
                run_scenario(
                    name,
                    seed,
                    arguments.steps,
                    CANDIDATES[arguments.candidate],
                    reached=reached,
                    broadcast=arguments.broadcast,
                    encoded=arguments.encoded,
                    with_knobs=arguments.knobs,
                )
            except SchedulersDiffer as difference:
                print(difference)
                return 1
            except Exception:
                print(f"configuration {name}, seed {seed}: the scenario itself failed")
                raise
    for what, count in sorted(reached.items()):
        print(f"{count:9d}  {what}")
    num_scenarios = len(names) * len(arguments.seeds)
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
