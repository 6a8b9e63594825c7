"""vLLM's own scheduler, kept in the same state as ours."""

import copy
import dataclasses
import weakref
from functools import cached_property
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_events import NullEventPublisher
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from sparksched import compat
from sparksched.compat.pacing import StepKnobs, schedule_with
from sparksched.verify.copies import (
    BlockHasher,
    block_hasher_of_vllm,
    copy_of_request,
    take_over_changes,
)
from sparksched.verify.events import NotedEvents
from sparksched.verify.grammars import AskedManager, GrammarAsSeen, RepeatingManager


class CopyError(Exception):
    """What is to be copied for vLLM's scheduler couldn't be: that one wasn't asked."""


class Shadow:
    """vLLM's scheduler with requests and steps of its own.

    Takes what the engine gives to ours. A step's `SchedulerOutput` is found by that of ours, which
    the engine brings back, or doesn't: outputs may be lost.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        manager: AskedManager,
        *others: Any,
        **settings: Any,
    ) -> None:
        self.grammars = RepeatingManager(manager)
        self.scheduler = compat.stock_scheduler_cls(vllm_config)(
            _without_publisher(vllm_config), kv_cache_config, self.grammars, *others, **settings
        )
        self.scheduler.kv_event_publisher = NullEventPublisher()
        self.events = NotedEvents(self.scheduler.kv_event_publisher)
        self._vllm_config = vllm_config
        self._steps: dict[int, tuple[weakref.ref[SchedulerOutput], SchedulerOutput]] = {}

    @cached_property
    def _block_hasher(self) -> BlockHasher | None:
        return block_hasher_of_vllm(self._vllm_config, self.scheduler.hash_block_size)

    def copy_of_request(self, request: Request) -> Request:
        """Return this side's own request, hashed by vLLM."""
        own = copy_of_request(request, self._block_hasher)
        if request.use_structured_output:
            own.structured_output_request = GrammarAsSeen(request.structured_output_request)
        return own

    # ---- steps ----

    def schedule(self, throttle_prefills: bool, knobs: StepKnobs | None) -> SchedulerOutput:
        """Decide what the next step computes; `knobs` are those that ours was decided with."""
        if knobs is None:
            return self.scheduler.schedule(throttle_prefills)
        return schedule_with(self.scheduler, knobs)

    def pair(self, output: SchedulerOutput, own: SchedulerOutput) -> None:
        """Note that both are the same step."""
        steps, key = self._steps, id(output)

        def forget(_: object) -> None:
            steps.pop(key, None)

        self._steps[key] = (weakref.ref(output, forget), own)

    def own(self, output: SchedulerOutput) -> SchedulerOutput:
        """Return this side's output for the step: the same one if this side has made it."""
        _, own = self._steps.get(id(output), (None, output))
        if own is not output:
            try:
                take_over_changes(own, output)
            except Exception as error:
                raise CopyError("a step can't be copied") from error
        return own


def _without_publisher(vllm_config: VllmConfig) -> VllmConfig:
    """Return a configuration whose scheduler makes events as this one's, and opens no socket."""
    events_config = vllm_config.kv_events_config
    if events_config is None:
        return vllm_config
    own = copy.copy(vllm_config)
    own.kv_events_config = dataclasses.replace(events_config, publisher="null")
    return own
