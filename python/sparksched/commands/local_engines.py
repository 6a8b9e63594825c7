"""The metrics of this user's engines on this machine, whatever front end they have."""

import functools
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, generate_latest

from sparksched.api_server.metrics import EngineCollector, ShownEngine
from sparksched.api_server.shown_engines import shown_engine
from sparksched.shared.card import EngineCard, find


def registry(cards: Callable[[], Sequence[EngineCard]] = find) -> CollectorRegistry:
    """Return what looks for engines anew each time it is asked."""
    found = CollectorRegistry()
    found.register(EngineCollector(functools.partial(shown_engines, cards)))
    return found


def page(cards: Callable[[], Sequence[EngineCard]] = find) -> str:
    """Return all series of this moment as Prometheus reads them; empty if no engine runs."""
    return generate_latest(registry(cards)).decode()


def shown_engines(cards: Callable[[], Sequence[EngineCard]] = find) -> list[ShownEngine]:
    """Return the engines that run now."""
    return [
        shown_engine(card.report, card.model_name, card.engine, card.transport) for card in cards()
    ]
