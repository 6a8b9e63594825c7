"""The names under which vLLM's tests find the schedulers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# The diffusion schedulers derive from the others: they must do so before the names change.
from vllm.v1.core.sched import async_scheduler, diffusion_scheduler, scheduler  # noqa: F401

Scheduler = scheduler.Scheduler
AsyncScheduler = async_scheduler.AsyncScheduler


def bind(sync_class: type[Any], async_class: type[Any]) -> None:
    """Let the names of `Scheduler` and `AsyncScheduler` stand for these classes."""
    scheduler.Scheduler = sync_class
    async_scheduler.AsyncScheduler = async_class


@contextmanager
def bound_to_vllms_own() -> Iterator[None]:
    """Give the names back for a moment: sparksched, too, finds vLLM's schedulers by them."""
    bound = scheduler.Scheduler, async_scheduler.AsyncScheduler
    bind(Scheduler, AsyncScheduler)
    try:
        yield
    finally:
        bind(*bound)
