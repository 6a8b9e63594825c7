"""Optional features of vLLM, as sets of hooks into the harness.

A configuration names its features by their settings, which adjust what both schedulers are built
from. When a scenario starts, settings become a `Feature`: it draws what the feature adds to the
trace, plays what stands around the scheduler, and says what else there is to compare. Everything
is drawn from random streams of the feature's own, so that it changes no other trace.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.kv_cache_interface import KVCacheGroupSpec
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request

from .configuration import Configuration
from .events import Event, RequestPlan, SchedulerView


def stats_of(outputs: Mapping[int, EngineCoreOutputs]) -> Iterator[SchedulerStats]:
    """Yield the statistics of a step, which go to one client at most."""
    for client_outputs in outputs.values():
        if client_outputs.scheduler_stats is not None:
            yield client_outputs.scheduler_stats


def with_extra_args(plan: RequestPlan, **extra: Any) -> RequestPlan:
    """Add to the `extra_args` of a request's sampling parameters."""
    sampling = dict(plan.sampling)
    sampling["extra_args"] = sampling.get("extra_args", {}) | extra
    return dataclasses.replace(plan, sampling=tuple(sampling.items()))


class FeatureSettings:
    """How a configuration uses one feature."""

    needs_block_hashes = False
    """Whether prompts are hashed even if there is no prefix cache."""

    def configure(self, vllm_config: Any) -> None:
        """Adjust one side's own copy of the configuration."""

    def adjust(self, configuration: Configuration) -> Configuration:
        """Return the configuration with the room that the feature needs."""
        return configuration

    def configure_groups(self, groups: list[KVCacheGroupSpec]) -> None:
        """Adjust one side's own copy of the KV cache groups."""

    def environment(self) -> dict[str, str]:
        """Return variables of the process that a scenario runs with."""
        return {}

    def start(self, configuration: Configuration, seed: int, coverage: Counter[str]) -> Feature:
        """Begin a scenario."""
        raise NotImplementedError


class Feature:
    """One feature in one scenario. Each hook does nothing unless the feature overrides it."""

    samples_tokens = True
    """Whether the model samples, so that the engine asks for grammar bitmasks."""

    def __init__(self, configuration: Configuration, seed: int, coverage: Counter[str]) -> None:
        self.configuration = configuration
        self.coverage = coverage
        self.rng = random.Random(f"{type(self).__name__}/{configuration.name}/{seed}")

    # Around the schedulers.

    def while_building(self, _side: int) -> AbstractContextManager[None]:
        """Replace what the scheduler of a side looks up when it is constructed."""
        return nullcontext()

    def while_running(self, _clock: Callable[[], float]) -> AbstractContextManager[None]:
        """Replace what both schedulers use throughout the scenario."""
        return nullcontext()

    def before_call(self, _side: int) -> None:
        """Prepare for an operation, which is performed on side 0 first."""

    # What happens.

    def plan_request(self, plan: RequestPlan) -> RequestPlan:
        """Add to a request that was drawn."""
        return plan

    def request_arguments(self, _plan: RequestPlan) -> dict[str, Any]:
        """Return further arguments of `Request`, new objects for each side."""
        return {}

    def events_before_step(self, _view: SchedulerView) -> Sequence[Event]:
        """Draw events of the feature's own."""
        return ()

    def allows(self, _event: Event) -> bool:
        """Return whether vLLM survives an event just now."""
        return True

    def complete_output(
        self,
        _step_number: int,
        _scheduler_output: SchedulerOutput,
        _requests: Mapping[str, Request],
        output: ModelRunnerOutput,
    ) -> ModelRunnerOutput:
        """Add to what the model runner returns for a step."""
        return output

    def throttles_prefills(self, _step_number: int) -> bool:
        """Return whether the engine puts off prefills in a step."""
        return False

    def before_schedule(self, requests: Mapping[str, Request]) -> None:
        """Look at the reference's requests before a step is scheduled."""

    def after_schedule(
        self, step_number: int, scheduler_outputs: Sequence[SchedulerOutput]
    ) -> None:
        """Change both sides' copies of a step, as the model runner that executes it may."""

    def after_sampling(
        self, step_number: int, scheduler_output: SchedulerOutput, request_ids: Sequence[str]
    ) -> None:
        """Go on from a step whose tokens have been sampled."""

    def before_update(
        self, outputs: Sequence[ModelRunnerOutput], requests: Mapping[str, Request]
    ) -> None:
        """Change both sides' copies of a step's output just before the schedulers see it."""

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Return what the model runner proposes for the steps to come."""
        return None

    # What is compared, and what was reached.

    def watch(self, _scheduler: Any) -> None:
        """Prepare to count what the reference goes through."""

    def told(self, _side: int) -> Any:
        """Return what a side told others than its caller since it was last asked."""
        return None

    def snapshot(self, _scheduler: Any) -> dict[str, Any]:
        """Return the part of a scheduler's state that the feature adds."""
        return {}

    def cover_schedule(self, output: SchedulerOutput, requests: Mapping[str, Request]) -> None:
        """Count the situations that a step of the reference has reached."""

    def cover_proposal(self, requests: Mapping[str, Request]) -> None:
        """Count the situations that draft tokens have met."""

    def cover_update(
        self,
        output: SchedulerOutput,
        runner_output: ModelRunnerOutput,
        requests: Mapping[str, Request],
    ) -> None:
        """Count the situations that the reference is about to learn of."""

    def cover_outputs(
        self, outputs: Mapping[int, EngineCoreOutputs], requests: Mapping[str, Request]
    ) -> None:
        """Count the situations that the outputs of a step show."""


class LoggedFeature(Feature):
    """A feature whose connectors note each call in a log, one for each side."""

    def __init__(self, configuration: Configuration, seed: int, coverage: Counter[str]) -> None:
        super().__init__(configuration, seed, coverage)
        self._logs: tuple[list[tuple[Any, ...]], ...] = ([], [])

    def told(self, side: int) -> Any:
        log = list(self._logs[side])
        self._logs[side].clear()
        if side == 0:
            for call, *details in log:
                self._cover(call, details)
        return log

    def _cover(self, call: str, details: list[Any]) -> None:
        """Count the situations that a call of the reference's has reached."""
        raise NotImplementedError


class Features(Feature):
    """All features of a configuration, as one."""

    def __init__(self, configuration: Configuration, seed: int, coverage: Counter[str]) -> None:
        super().__init__(configuration, seed, coverage)
        self._features = [
            settings.start(configuration, seed, coverage) for settings in configuration.features
        ]
        self.samples_tokens = all(feature.samples_tokens for feature in self._features)

    @contextmanager
    def while_building(self, side: int) -> Iterator[None]:
        with ExitStack() as stack:
            for feature in self._features:
                stack.enter_context(feature.while_building(side))
            yield

    @contextmanager
    def while_running(self, clock: Callable[[], float]) -> Iterator[None]:
        with ExitStack() as stack:
            for feature in self._features:
                stack.enter_context(feature.while_running(clock))
            yield

    def before_call(self, side: int) -> None:
        for feature in self._features:
            feature.before_call(side)

    def plan_request(self, plan: RequestPlan) -> RequestPlan:
        for feature in self._features:
            plan = feature.plan_request(plan)
        return plan

    def request_arguments(self, plan: RequestPlan) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        for feature in self._features:
            arguments |= feature.request_arguments(plan)
        return arguments

    def events_before_step(self, view: SchedulerView) -> Sequence[Event]:
        return [event for feature in self._features for event in feature.events_before_step(view)]

    def allows(self, event: Event) -> bool:
        return all(feature.allows(event) for feature in self._features)

    def complete_output(
        self,
        step_number: int,
        scheduler_output: SchedulerOutput,
        requests: Mapping[str, Request],
        output: ModelRunnerOutput,
    ) -> ModelRunnerOutput:
        for feature in self._features:
            output = feature.complete_output(step_number, scheduler_output, requests, output)
        return output

    def throttles_prefills(self, step_number: int) -> bool:
        return any(feature.throttles_prefills(step_number) for feature in self._features)

    def before_schedule(self, requests: Mapping[str, Request]) -> None:
        for feature in self._features:
            feature.before_schedule(requests)

    def after_schedule(
        self, step_number: int, scheduler_outputs: Sequence[SchedulerOutput]
    ) -> None:
        for feature in self._features:
            feature.after_schedule(step_number, scheduler_outputs)

    def after_sampling(
        self, step_number: int, scheduler_output: SchedulerOutput, request_ids: Sequence[str]
    ) -> None:
        for feature in self._features:
            feature.after_sampling(step_number, scheduler_output, request_ids)

    def before_update(
        self, outputs: Sequence[ModelRunnerOutput], requests: Mapping[str, Request]
    ) -> None:
        for feature in self._features:
            feature.before_update(outputs, requests)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        proposals = [feature.take_draft_token_ids() for feature in self._features]
        return next((proposal for proposal in proposals if proposal is not None), None)

    def watch(self, scheduler: Any) -> None:
        for feature in self._features:
            feature.watch(scheduler)

    def told(self, side: int) -> Any:
        return [feature.told(side) for feature in self._features]

    def snapshot(self, scheduler: Any) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for feature in self._features:
            state |= feature.snapshot(scheduler)
        return state

    def cover_schedule(self, output: SchedulerOutput, requests: Mapping[str, Request]) -> None:
        for feature in self._features:
            feature.cover_schedule(output, requests)

    def cover_proposal(self, requests: Mapping[str, Request]) -> None:
        for feature in self._features:
            feature.cover_proposal(requests)

    def cover_update(
        self,
        output: SchedulerOutput,
        runner_output: ModelRunnerOutput,
        requests: Mapping[str, Request],
    ) -> None:
        for feature in self._features:
            feature.cover_update(output, runner_output, requests)

    def cover_outputs(
        self, outputs: Mapping[int, EngineCoreOutputs], requests: Mapping[str, Request]
    ) -> None:
        for feature in self._features:
            feature.cover_outputs(outputs, requests)
