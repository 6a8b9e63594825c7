"""vLLM's own scheduler, kept in the same state as ours."""

import copy
import dataclasses
import weakref
from functools import cached_property
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
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
        self, vllm_config: VllmConfig, manager: AskedManager, hash_block_size: int, **arguments: Any
    ) -> None:
        self.grammars = RepeatingManager(manager)
        self.events = NotedEvents()
        self.scheduler = compat.stock_scheduler_cls(vllm_config)(
            vllm_config=_without_publisher(vllm_config),
            structured_output_manager=self.grammars,
            hash_block_size=hash_block_size,
            **arguments,
        )
        self.scheduler.kv_event_publisher = self.events
        self._vllm_config = vllm_config
        self._hash_block_size = hash_block_size
        self._steps: dict[int, tuple[weakref.ref[SchedulerOutput], SchedulerOutput]] = {}

    @cached_property
    def _block_hasher(self) -> BlockHasher | None:
        return block_hasher_of_vllm(self._vllm_config, self._hash_block_size)

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

    def update_from_output(
        self, output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Take in what a step brought; the runner's output is cut."""
        own = self.own(output)
        outputs: dict[int, EngineCoreOutputs] = self.scheduler.update_from_output(
            own, runner_output
        )
        return outputs

    def get_grammar_bitmask(self, output: SchedulerOutput) -> GrammarOutput | None:
        """Compute what grammars allow in a step."""
        return self.scheduler.get_grammar_bitmask(self.own(output))


def _without_publisher(vllm_config: VllmConfig) -> VllmConfig:
    """Return a configuration whose scheduler makes events as this one's, and opens no socket."""
    events_config = vllm_config.kv_events_config
    if events_config is None:
        return vllm_config
    own = copy.copy(vllm_config)
    own.kv_events_config = dataclasses.replace(events_config, publisher="null")
    return own
