"""Optional features of vLLM, as sets of hooks into the harness.

A configuration names its features by their settings, which adjust what both schedulers are built
from. When a scenario starts, settings become a `Feature`: it draws what the feature adds to the
trace, plays what stands around the scheduler, and says what else there is to compare. Everything
is drawn from random streams of the feature's own, so that it changes no other trace.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request

from .configuration import Configuration
from .events import Event, RequestPlan, SchedulerView


def with_extra_args(plan: RequestPlan, **extra: Any) -> RequestPlan:
    """Add to the `extra_args` of a request's sampling parameters."""
    sampling = dict(plan.sampling)
    sampling["extra_args"] = sampling.get("extra_args", {}) | extra
    return dataclasses.replace(plan, sampling=tuple(sampling.items()))


@dataclass(frozen=True)
class Step:
    """A step that the model runner has executed, and the reference's requests by then."""

    number: int
    scheduled: SchedulerOutput
    requests: Mapping[str, Request]


class FeatureSettings:
    """How a configuration uses one feature."""

    needs_block_hashes = False
    """Whether prompts are hashed even if there is no prefix cache."""

    @classmethod
    def draw(cls, _rng: random.Random, _configuration: Configuration, _scenario: Any) -> Any:
        """Return settings for a scenario."""
        return cls()

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

    def start(self, configuration: Configuration, seed: int) -> Feature:
        """Begin a scenario."""
        return Feature(configuration, seed)


class Feature:
    """One feature in one scenario. Each hook does nothing unless the feature overrides it."""

    samples_tokens = True
    """Whether the model samples, so that the engine asks for grammar bitmasks."""

    def __init__(self, configuration: Configuration, seed: int) -> None:
        self.configuration = configuration
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

    def complete_output(self, step: Step, output: ModelRunnerOutput) -> ModelRunnerOutput:
        """Add to what the model runner returns for a step."""
        return output

    def throttles_prefills(self, _step_number: int) -> bool:
        """Return whether the engine puts off prefills in a step."""
        return False

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

    # What is compared.

    def watch(self, _scheduler: Any) -> None:
        """Look at the reference when it is built."""

    def told(self, _side: int) -> Any:
        """Return what a side told others than its caller since it was last asked."""
        return None

    def snapshot(self, _scheduler: Any) -> dict[str, Any]:
        """Return the part of a scheduler's state that the feature adds."""
        return {}


class LoggedFeature(Feature):
    """A feature whose connectors note each call in a log, one for each side."""

    def __init__(self, configuration: Configuration, seed: int) -> None:
        super().__init__(configuration, seed)
        self._logs: tuple[list[tuple[Any, ...]], ...] = ([], [])

    def told(self, side: int) -> Any:
        log = list(self._logs[side])
        self._logs[side].clear()
        return log


def _each(name: str) -> Any:
    """Return a hook that calls the one of each feature, and ignores what they return."""

    def call(self: Features, *arguments: Any) -> None:
        for feature in self._features:
            getattr(feature, name)(*arguments)

    return call


def _each_entered(name: str) -> Any:
    """Return a hook that enters what the one of each feature returns."""

    @contextmanager
    def enter(self: Features, argument: Any) -> Iterator[None]:
        with ExitStack() as stack:
            for feature in self._features:
                stack.enter_context(getattr(feature, name)(argument))
            yield

    return enter


class Features(Feature):
    """All features of a configuration, as one."""

    def __init__(self, configuration: Configuration, seed: int) -> None:
        super().__init__(configuration, seed)
        self._features = [
            settings.start(configuration, seed) for settings in configuration.features
        ]
        self.samples_tokens = all(feature.samples_tokens for feature in self._features)

    while_building = _each_entered("while_building")
    while_running = _each_entered("while_running")
    before_call = _each("before_call")
    after_schedule = _each("after_schedule")
    after_sampling = _each("after_sampling")
    before_update = _each("before_update")

    def plan_request(self, plan: RequestPlan) -> RequestPlan:
        for feature in self._features:
            plan = feature.plan_request(plan)
        return plan

    def request_arguments(self, plan: RequestPlan) -> dict[str, Any]:
        found = (feature.request_arguments(plan) for feature in self._features)
        return {name: value for arguments in found for name, value in arguments.items()}

    def events_before_step(self, view: SchedulerView) -> Sequence[Event]:
        return [event for feature in self._features for event in feature.events_before_step(view)]

    def allows(self, event: Event) -> bool:
        return all(feature.allows(event) for feature in self._features)

    def complete_output(self, step: Step, output: ModelRunnerOutput) -> ModelRunnerOutput:
        for feature in self._features:
            output = feature.complete_output(step, output)
        return output

    def throttles_prefills(self, step_number: int) -> bool:
        return any(feature.throttles_prefills(step_number) for feature in self._features)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        proposals = [feature.take_draft_token_ids() for feature in self._features]
        return next((proposal for proposal in proposals if proposal is not None), None)

    def watch(self, scheduler: Any) -> None:
        for feature in self._features:
            feature.watch(scheduler)

    def told(self, side: int) -> Any:
        return [feature.told(side) for feature in self._features]

    def snapshot(self, scheduler: Any) -> dict[str, Any]:
        states = (feature.snapshot(scheduler) for feature in self._features)
        return {name: value for state in states for name, value in state.items()}
