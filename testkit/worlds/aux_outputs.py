"""Auxiliary output: the experts that a model routes tokens to, for those who repeat the routing.

Each side has vLLM's own connector, which also notes what it is shown. This module plays the worker
that collects the experts of each computed token and hands them out with the tokens.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
from vllm.distributed.aux_output_connector.connector import (
    AuxOutputConnectorMetadata,
    AuxOutputSchedulerConnector,
    AuxRequestOutput,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from .configuration import Configuration
from .connector import request_state
from .events import RequestPlan
from .feature import Feature, FeatureSettings, LoggedFeature, Step

_BUILDERS = ("vllm.v1.core.sched.scheduler", "sparksched.engine.aux_outputs")
"""Modules that construct the connector, by the name that they have it under."""


@dataclass(frozen=True)
class AuxOutputsSettings(FeatureSettings):
    """They are collected."""

    def configure(self, vllm_config: Any) -> None:
        vllm_config.aux_output_config.enable_return_routed_experts = True

    def start(self, configuration: Configuration, seed: int) -> Feature:
        return AuxOutputs(configuration, seed)


class RecordingAuxConnector(AuxOutputSchedulerConnector):  # type: ignore[misc]
    """vLLM's scheduler side, with a log."""

    def __init__(self, log: list[tuple[Any, ...]], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._log = log

    def build_connector_meta(
        self, scheduler_output: SchedulerOutput, requests: dict[str, Request]
    ) -> AuxOutputConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output, requests)
        states = [request_state(request) for request in requests.values()]
        seen = copy.copy(scheduler_output)
        # A KV connector's log has what is in it.
        seen.kv_connector_block_state = bool(seen.kv_connector_block_state)
        self._log.append(("build_connector_meta", seen, states, copy.deepcopy(metadata)))
        return metadata

    def take_output(
        self, request: Request, output: dict[str, AuxRequestOutput] | None
    ) -> np.ndarray | None:
        rows: np.ndarray | None = super().take_output(request, output)
        self._log.append(("take_output", request_state(request), list(output or ()), rows))
        return rows

    def request_finished(self, request: Request) -> None:
        self._log.append(("request_finished", request_state(request)))
        super().request_finished(request)

    def reset(self) -> None:
        self._log.append(("reset",))
        super().reset()


class RecordingCappingConnector(RecordingAuxConnector):
    """The same with what vLLM's has since 0.33.0."""

    def max_cache_hit(self, request: Request) -> int:
        num_tokens: int = super().max_cache_hit(request)
        self._log.append(("max_cache_hit", request_state(request), num_tokens))
        return num_tokens

    def cap_external_hit(self, request: Request, num_local: int, num_external: int) -> int:
        num_tokens: int = super().cap_external_hit(request, num_local, num_external)
        state = request_state(request)
        self._log.append(("cap_external_hit", state, num_local, num_external, num_tokens))
        return num_tokens

    def request_loading(self, request: Request, num_tokens: int) -> None:
        self._log.append(("request_loading", request_state(request), num_tokens))
        super().request_loading(request, num_tokens)


class AuxOutputs(LoggedFeature):
    """The worker of both sides."""

    def __init__(self, configuration: Configuration, seed: int) -> None:
        super().__init__(configuration, seed)
        # By a number that a request gets each time that it is admitted: how many tokens' experts
        # have been told.
        self._num_told: list[int] = []
        self._numbers: dict[str, int] = {}
        self._generation = 0

    @contextmanager
    def while_building(self, side: int) -> Iterator[None]:
        logs = [self._logs[side]]
        caps_hits = hasattr(AuxOutputSchedulerConnector, "max_cache_hit")

        base = RecordingCappingConnector if caps_hits else RecordingAuxConnector

        class Connector(base):  # type: ignore[misc, valid-type]
            def __init__(self, *arguments: Any) -> None:
                # With verification, the second one is that of vLLM's scheduler behind ours.
                super().__init__(logs.pop() if logs else [], *arguments)

        with ExitStack() as stack:
            for module in _BUILDERS:
                name = f"{module}.AuxOutputSchedulerConnector"
                stack.enter_context(mock.patch(name, Connector))
            yield

    # What happens.

    def plan_request(self, plan: RequestPlan) -> RequestPlan:
        start = self.rng.choice([0, 0, self.rng.randint(0, len(plan.prompt_token_ids))])
        sampling = dict(plan.sampling) | {"routed_experts_prompt_start": start}
        return dataclasses.replace(plan, sampling=tuple(sampling.items()))

    def complete_output(self, step: Step, output: ModelRunnerOutput) -> ModelRunnerOutput:
        metadata = step.scheduled.aux_output_connector_metadata
        assert metadata is not None
        self._begin_step(metadata)
        if not output.req_ids:
            return output
        # Which tokens these are is known when they are sampled.
        numbers = {it: self._numbers[it] for it in step.scheduled.num_scheduled_tokens}
        return dataclasses.replace(output, aux_output_connector_output=numbers)

    def _begin_step(self, metadata: AuxOutputConnectorMetadata) -> None:
        if metadata.generation > self._generation:
            self._generation = metadata.generation
            self._numbers.clear()
        for request_id in metadata.finished_requests:
            self._numbers.pop(request_id, None)
        for request_id, start in metadata.requests.items():
            if request_id not in self._numbers:
                self._numbers[request_id] = len(self._num_told)
                self._num_told.append(start)

    def before_update(
        self, outputs: Sequence[ModelRunnerOutput], requests: Mapping[str, Request]
    ) -> None:
        numbers: dict[str, int] = outputs[0].aux_output_connector_output or {}
        collected: dict[str, AuxRequestOutput] = {}
        for request_id, number in numbers.items():
            row = outputs[0].req_id_to_index[request_id]
            num_sampled = len(outputs[0].sampled_token_ids[row])
            if num_sampled == 0 or request_id not in requests:
                continue
            # Nothing is computed of the last one yet.
            start, end = self._num_told[number], requests[request_id].num_tokens + num_sampled - 1
            if start <= end:
                rows = np.arange(2 * start, 2 * end, dtype=np.int32) + 1000 * number
                collected[request_id] = AuxRequestOutput(start, rows.reshape(-1, 2, 1))
                self._num_told[number] = end
        for output in outputs:
            if output.req_ids:
                output.aux_output_connector_output = copy.deepcopy(collected)

    # What is compared.
