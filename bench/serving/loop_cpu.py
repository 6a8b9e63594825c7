"""What an engine takes of a processor without its waiting.

vLLM waits for its workers and for other engines by spinning: an engine that has nothing to do but
that takes a whole processor. What a scheduler costs only shows in what is left.
"""

import statistics
from collections.abc import Sequence
from typing import Any

from bench.serving.evaluate import missing
from bench.serving.phases import Noted, decoding_steps

Row = dict[str, Any]

ENGINE = "engine"


def evaluate_engine(noted: Noted, rounds: Sequence[Row]) -> Row:
    """Return the engine's CPU time in steps that decode, in µs a token.

    Args:
        noted: What `bench_stop` has returned of an engine: it tells of the loop's thread.
        rounds: The rounds of the cell, which had no probe: they tell of the other threads.

    """
    steps = decoding_steps(noted)
    tokens = sum(it.num_tokens for it in steps)
    if not tokens:
        return missing("no step was recorded that only decodes")
    others = [found for it in rounds if (found := _other_threads(it["cpu"])) is not None]
    if not others:
        return missing("the engine's other threads weren't measured")
    working_us = sum(it.cpu_us - it.wait_cpu_us for it in steps) / tokens
    return {"without_waiting_us_per_token": working_us + statistics.median(others)}


def _other_threads(cpu: Row) -> float | None:
    """Return what all threads of the engine but its loop have taken in a round, in µs a token."""
    if "us_per_token" not in cpu or not (percent := cpu["share"][ENGINE]["percent"]):
        return None
    us: float = cpu["us_per_token"][ENGINE] * (1 - cpu["share"][ENGINE]["main"] / percent)
    return us
