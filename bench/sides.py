"""The servers that can be compared, by the names of `sides.toml`."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from testkit import vllm_rs

T = TypeVar("T")
SIDES = Path(__file__).with_suffix(".toml")
RUST = "-rust"
"""What the name ends with of one with vLLM's Rust front end."""


@dataclass(frozen=True)
class Side:
    """A server to be compared: its name, environment and arguments."""

    name: str
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()

    @property
    def is_ours(self) -> bool:
        """Whether its scheduler is sparksched's."""
        chosen = self.environment.get("VLLM_SCHEDULER") == "sparksched"
        return chosen or any("SparkScheduler" in it for it in self.arguments)


def find_side(name: str) -> Side:
    """Return a side of `bench/sides.toml`; its name may end with `-rust`.

    Raises:
        KeyError: if there is none.

    """
    found = tomllib.loads(SIDES.read_text())[name.removesuffix(RUST)]
    environment = dict(found.get("environment", {}))
    if name.endswith(RUST):
        environment["VLLM_USE_RUST_FRONTEND"] = "1"
        if binary := vllm_rs.binary():
            environment["VLLM_RUST_FRONTEND_PATH"] = str(binary)
    return Side(name, environment, tuple(found.get("arguments", ())))


def in_turn(sides: list[T], number: int) -> list[T]:
    """Return what takes turns in the order of a round: forth and back."""
    return sides if number % 2 == 0 else sides[::-1]
