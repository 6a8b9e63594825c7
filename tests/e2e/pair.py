"""Two servers on the same model, one after the other: with vLLM's scheduler, and with ours."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from testkit.server import Server, serve

T = TypeVar("T")


@dataclass(frozen=True)
class Pair(Generic[T]):
    """What was observed of both."""

    stock: T
    ours: T
    log: str = field(repr=False)
    """Ours."""


def observe_pair(
    model_dir: Path,
    log_dir: Path,
    observe: Callable[[Server], T],
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
) -> Pair[T]:
    """Observe a server with vLLM's scheduler, then one that may not fall back to it."""
    environment = environment or {}
    with serve(
        model_dir,
        log_dir / "stock.log",
        is_preloaded=True,
        arguments=arguments,
        environment=environment,
    ) as server:
        stock = observe(server)
        assert not server.runs_sparksched
    with serve(
        model_dir,
        log_dir / "ours.log",
        scheduler="sparksched",
        is_preloaded=True,
        arguments=arguments,
        environment={"SPARKSCHED_STRICT": "1", **environment},
    ) as server:
        ours = observe(server)
        assert server.runs_sparksched
        return Pair(stock, ours, server.log)
