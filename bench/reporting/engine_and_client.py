"""Findings where the engine's steps and the client's tokens a second disagree, and who limits."""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.reporting.cells import DECODE, SYNC, Pair, Side
from bench.reporting.engine import (
    BUSY_THREAD,
    ROLES,
    busiest_thread,
    engine_rate,
    processors,
    spun_share,
    step_us,
)
from bench.reporting.values import as_number, listed, numbers, rounded

NOTABLE_SHARE = 0.05
SOON_STEPS = 2
"""Within so many steps the API server processes most of a step's outputs if it keeps up."""


@dataclass(frozen=True)
class Difference:
    """Tokens a second by the engine's steps and at the client, and the busiest threads' percent."""

    pair: Pair
    engine: float
    client: float
    engine_thread: float | None
    api_thread: float | None
    taken: float | None
    """What engine and API server take with all of their threads."""
    spun: float
    """What of the engine's thread is spinning while it waits, which is no work."""

    @property
    def engine_work(self) -> float | None:
        """The engine's thread without what it spins."""
        return None if self.engine_thread is None else self.engine_thread - self.spun

    @property
    def limit(self) -> str:
        """Which side limits, by the rounds that the client's rate is from."""
        if self.engine_thread is None or self.engine_work is None or self.api_thread is None:
            return "who limits isn't told, for want of threads' CPU time"
        busy = [
            name
            for name, share in (
                ("the engine's thread", self.engine_work),
                ("the API server's thread", self.api_thread),
            )
            if share > BUSY_THREAD
        ]
        if not busy and self.is_shared:
            return "engine and API server share the processors, which are the limit"
        if not busy and self.engine_thread > BUSY_THREAD:
            return "no thread is the limit, as the engine's spins while it waits"
        if not busy and self.pair.key.mode == SYNC:
            return "host and GPU work in turns, and neither thread is the limit"
        if not busy:
            return "neither thread is the limit"
        return f"the limit is {' and '.join(busy)}"

    @property
    def is_shared(self) -> bool:
        """Whether engine and API server are confined to processors and take all of them."""
        cores = self.pair.key.cores
        if self.taken is None or not cores.isdecimal():
            return False
        return self.taken > BUSY_THREAD * int(cores)

    @property
    def is_ahead(self) -> bool:
        """Whether the engine gets ahead of what clients have, as it isn't what limits."""
        api, engine = self.api_thread, self.engine_work
        return (
            self.engine > self.client
            and api is not None
            and engine is not None
            and api > BUSY_THREAD >= engine
        )

    @property
    def ahead_s(self) -> float | None:
        """By how many seconds, when the engine has made its last token, if both rates are kept up.

        It is an estimate: rates are those of the time in which all streams decode, and each of
        another round, so single messages may have been on their way for longer.
        """
        tokens = set(self.pair.key.output_tokens)
        if len(tokens) != 1:
            return None
        made = tokens.pop() * self.pair.key.concurrency
        return made * (1 / self.client - 1 / self.engine)


def engine_against_client(pairs: Sequence[Pair]) -> list[str]:
    """Say where the two rates differ by more than 5 %, and which side limits."""
    return [
        _said(pair, name, found)
        for pair in pairs
        if pair.key.workload == DECODE
        for name, side in (("vLLM", pair.stock), ("sparksched", pair.ours))
        if (found := _difference(pair, side)) is not None
    ]


def keeps_up(side: Side, streams: int) -> bool:
    """Return whether clients are known to get what the engine makes by its steps, soon after it.

    An engine never waits for an API server, which may have all of a processor and still keep up: it
    gives a stream several tokens at once. The rates are of separate rounds, so that they may agree
    by chance; how old messages get is known from the round that the engine's is from.
    """
    rates = _rates(side, streams)
    if rates is None or _differ(*rates):
        return False
    age_us = as_number(side.get("messages", "handed_us", "p50"))
    step = as_number(step_us(side, streams))
    return age_us is None or step is None or age_us <= SOON_STEPS * step


def _rates(side: Side, streams: int) -> tuple[float, float] | None:
    """Return the tokens a second of engine and client, if both are known."""
    engine = as_number(engine_rate(side, streams))
    client = as_number(side.figure("tokens_per_s"))
    return (engine, client) if engine and client else None


def _differ(engine: float, client: float) -> bool:
    return abs(engine / client - 1) > NOTABLE_SHARE


def _difference(pair: Pair, side: Side) -> Difference | None:
    rates = _rates(side, pair.key.concurrency)
    if rates is None or not _differ(*rates):
        return None
    engine_thread, api_thread = (busiest_thread(side, it) for it in ROLES)
    shares = numbers(processors(side, it) for it in ROLES)
    taken = sum(shares) if len(shares) == len(ROLES) else None
    return Difference(pair, *rates, engine_thread, api_thread, taken, spun_share(side))


def _said(pair: Pair, name: str, found: Difference) -> str:
    rates = (
        f"{rounded(found.engine)} tokens a second by the engine's steps, {rounded(found.client)} "
        "at the client"
    )
    shares = [
        f"{who} {share:.0f} %"
        for who, share in (("engine", found.engine_thread), ("API server", found.api_thread))
        if share is not None
    ]
    about = f" (busiest threads: {listed(shares)} of a processor)" if shares else ""
    if found.is_ahead:
        end = "so the engine is ahead of what clients have"
        if found.ahead_s is not None:
            end += f", by both rates {rounded(found.ahead_s)} s when it has made its last token"
    elif found.is_shared:
        end = "the engine may be ahead of what clients have, or differ between rounds"
    else:
        speed = "faster" if found.engine > found.client else "slower"
        end = f"the engine was {speed} in the round with the probe than in the others"
    return f"{pair.label}, {name}: {rates}: {found.limit}{about}; {end}."
