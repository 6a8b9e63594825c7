"""With requests in an order of its own, each decision is still vLLM's with the same priorities."""

from __future__ import annotations

from typing import Any

import pytest
from scale import FULL
from sparksched.environment import Order

from testkit.worlds.candidates import sparksched_scheduler_class, verifying_scheduler_class
from testkit.worlds.configuration import Configuration
from testkit.worlds.scenarios import NAMED_SETTINGS, is_verifiable

from .runner import run_scenario

ORDERS = (
    Order("fair", {"adapter-1": 4.0}, 0.0),
    Order("deadline", {}, 0.5),
    Order("aging", {}, 0.25),
)
NAMES = [name for name, settings in NAMED_SETTINGS.items() if settings.get("policy") == "priority"]


@pytest.mark.release
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.kind)
def test_decides_as_vllm_does_with_the_same_priorities(name: str, order: Order) -> None:
    def ordered_scheduler_class(configuration: Configuration) -> type[Any]:
        verified = order.kind == "fair" and is_verifiable(name)
        choose = verifying_scheduler_class if verified else sparksched_scheduler_class

        class OrderedScheduler(choose(configuration)):  # type: ignore[misc]
            def __init__(self, *arguments: Any, **settings: Any) -> None:
                super().__init__(*arguments, **settings)
                self.order_by(order)

        return OrderedScheduler

    for seed in range(20 if FULL else 2):
        run_scenario(name, seed, 150, ordered_scheduler_class, ordered=True)
