"""What the engine's loop takes of a processor, with and without its waiting.

vLLM waits for its workers and for other engines by spinning: an engine that has nothing to do but
that takes a whole processor. What a scheduler costs only shows in what is left.
"""

import statistics
from collections.abc import Sequence
from typing import Any

from bench.serving.evaluate import missing
from bench.serving.phases import decoding_range, split_steps

Row = dict[str, Any]

ENGINE, LOOP = "engine", "MainThread"


def evaluate_loop(recorded: Row) -> Row:
    """Return the CPU time of the loop's thread in steps that decode, in µs a token.

    Args:
        recorded: What `bench_stop` has returned of an engine.

    """
    steps = split_steps(recorded)
    chosen = decoding_range(recorded["sizes"])
    tokens = sum(steps[index].num_tokens for index in chosen[:-1])
    if not tokens:
        return missing("no step was recorded that only decodes")
    cpu_ns = recorded["cpu_ns"]
    spent_us = (cpu_ns[chosen[-1]] - cpu_ns[chosen[0]]) / 1000
    waiting_us = sum(steps[index].wait_cpu_us for index in chosen[:-1])
    return {
        "loop_us_per_token": spent_us / tokens,
        "waiting_us_per_token": waiting_us / tokens,
        "working_us_per_token": (spent_us - waiting_us) / tokens,
    }


def evaluate_engine(loop: Row, rounds: Sequence[Row]) -> Row:
    """Return the same, and what the whole engine takes without waiting, in µs a token.

    The other threads' part is from rounds without a probe.

    Args:
        loop: What `evaluate_loop` has returned.
        rounds: The rounds of the cell.

    """
    others = [found for it in rounds if (found := _other_threads(it["cpu"])) is not None]
    if "missing" in loop or not others:
        return loop
    others_us = statistics.median(others)
    total_us = loop["working_us_per_token"] + others_us
    return loop | {
        "other_threads_us_per_token": others_us,
        "without_waiting_us_per_token": total_us,
    }


def _other_threads(cpu: Row) -> float | None:
    """Return what all threads of the engine but its loop have taken in a round, in µs a token."""
    if "us_per_token" not in cpu or not (percent := cpu["share"][ENGINE]["percent"]):
        return None
    of_loop = cpu["share"][ENGINE]["threads"].get(LOOP, 0.0)
    us: float = cpu["us_per_token"][ENGINE] * (1 - of_loop / percent)
    return us
