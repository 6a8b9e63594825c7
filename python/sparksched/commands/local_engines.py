"""The metrics of this user's engines on this machine, whatever front end they have."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, generate_latest

from sparksched.api_server.metrics import EngineCollector, ShownEngine
from sparksched.api_server.shown_engines import shown_engine
from sparksched.shared.card import EngineCard, find


def _any(_: EngineCard) -> bool:
    return True


def registry(wanted: Callable[[EngineCard], bool] = _any) -> CollectorRegistry:
    """Return what looks for engines anew each time it is asked."""
    found = CollectorRegistry()
    found.register(EngineCollector(LocalEngines(wanted)))
    return found


def page(wanted: Callable[[EngineCard], bool] = _any) -> str:
    """Return all series of this moment as Prometheus reads them; empty if no engine runs."""
    return generate_latest(registry(wanted)).decode()


class LocalEngines:
    """The engines that run; keeps their pages open from one look to the next."""

    def __init__(self, wanted: Callable[[EngineCard], bool] = _any) -> None:
        self._wanted = wanted
        self._engines: dict[tuple[int, bytes], ShownEngine] = {}

    def __call__(self) -> list[ShownEngine]:
        """Return those that run now. Of several with the same labels the last one is shown."""
        cards = filter(self._wanted, find())
        engines = {key(card): self._engines.get(key(card)) or _shown(card) for card in cards}
        self._engines = engines
        by_labels = {engine.labels: engine for engine in engines.values()}
        return [by_labels[labels] for labels in sorted(by_labels)]


def key(card: EngineCard) -> tuple[int, bytes]:
    """Name an engine: a process id may come again."""
    meters = card.report.meters
    return card.pid, b"" if meters is None else meters.id


def _shown(card: EngineCard) -> ShownEngine:
    return shown_engine(
        card.report,
        card.model_name,
        card.engine,
        card.transport,
        version=card.version,
        vllm_version=card.vllm_version,
    )
