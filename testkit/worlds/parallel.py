"""Engines of several ranks: pipeline stages, and data-parallel replicas."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from .configuration import Configuration
from .feature import Feature, FeatureSettings


@dataclass(frozen=True)
class PipelineSettings(FeatureSettings):
    """The model's layers are spread over several stages, each busy with another step."""

    num_stages: int

    @classmethod
    def draw(
        cls, rng: random.Random, _configuration: Configuration, _scenario: Mapping[str, Any]
    ) -> PipelineSettings:
        return cls(num_stages=rng.choice([2, 2, 3]))

    def adjust(self, configuration: Configuration) -> Configuration:
        is_ahead = configuration.async_scheduling and configuration.use_v2_model_runner
        num_batches = self.num_stages + is_ahead
        in_flight_tokens = min(
            num_batches * configuration.max_num_batched_tokens, configuration.max_model_len
        )
        num_windows = sum(window is not None for window in configuration.sliding_windows)
        more_blocks = num_windows * -(-in_flight_tokens // configuration.block_size)
        return dataclasses.replace(
            configuration,
            batch_queue_size=num_batches,
            num_blocks=configuration.num_blocks + more_blocks,
        )

    def configure(self, vllm_config: Any) -> None:
        vllm_config.parallel_config.pipeline_parallel_size = self.num_stages

    def start(self, configuration: Configuration, seed: int, coverage: Counter[str]) -> Feature:
        return Pipeline(configuration, seed, coverage)


class Pipeline(Feature):
    """Counts what only happens with several steps in flight."""

    def __init__(self, configuration: Configuration, seed: int, coverage: Counter[str]) -> None:
        super().__init__(configuration, seed, coverage)
        self._step_number = 0

    def cover_schedule(self, output: SchedulerOutput, requests: Mapping[str, Request]) -> None:
        coverage = self.coverage
        self._step_number += 1
        new_token_ids = output.scheduled_cached_reqs.new_token_ids
        coverage["pipeline: steps that bring tokens to the first stage"] += any(new_token_ids)
        coverage["pipeline: steps that bring parts of a prompt"] += any(
            len(token_ids) > 1 for token_ids in new_token_ids
        )
        for request_id, request in requests.items():
            was_scheduled = request_id in output.num_scheduled_tokens
            in_flight_tokens = request.num_in_flight_tokens
            in_flight_tokens -= output.num_scheduled_tokens.get(request_id, 0)
            coverage["pipeline: scheduled again while in flight"] += (
                was_scheduled and in_flight_tokens > 0
            )
            coverage["pipeline: not scheduled while in flight"] += (
                not was_scheduled and in_flight_tokens > 0
            )
            # Decodes of a request keep a distance of as many steps as there are stages.
            coverage["pipeline: decodes that wait for their turn"] += (
                not was_scheduled and self._step_number < request.next_decode_eligible_step
            )


@dataclass(frozen=True)
class DataParallelSettings(FeatureSettings):
    """One of several engines that execute a mixture of experts in step."""

    prefill_schedule_interval: int

    @classmethod
    def draw(
        cls, rng: random.Random, _configuration: Configuration, _scenario: Mapping[str, Any]
    ) -> DataParallelSettings:
        return cls(prefill_schedule_interval=rng.choice([1, 2, 3, 5]))

    def adjust(self, configuration: Configuration) -> Configuration:
        return dataclasses.replace(
            configuration,
            include_finished_set=True,
            throttles_prefills=False,
            prefill_schedule_interval=self.prefill_schedule_interval,
        )

    def configure(self, vllm_config: Any) -> None:
        parallel_config = vllm_config.parallel_config
        parallel_config.data_parallel_size = 2
        parallel_config.data_parallel_rank = parallel_config.data_parallel_index = 1
        parallel_config.is_moe_model = True
        architecture = copy.copy(vllm_config.model_config.model_arch_config)
        architecture.num_experts = 8
        vllm_config.model_config.model_arch_config = architecture
        assert vllm_config.model_config.is_moe

    def start(self, configuration: Configuration, seed: int, coverage: Counter[str]) -> Feature:
        return DataParallel(configuration, seed, coverage, self.prefill_schedule_interval)


class DataParallel(Feature):
    """Lets prefills begin in some steps only, which all engines count alike."""

    def __init__(
        self, configuration: Configuration, seed: int, coverage: Counter[str], interval: int
    ) -> None:
        super().__init__(configuration, seed, coverage)
        self._interval = interval
        self._throttles = False

    def throttles_prefills(self, step_number: int) -> bool:
        self._throttles = step_number % self._interval != 0
        return self._throttles

    def cover_schedule(self, output: SchedulerOutput, requests: Mapping[str, Request]) -> None:
        has_new_request = bool(output.scheduled_new_reqs)
        self.coverage["data parallel: throttled steps"] += self._throttles
        self.coverage["data parallel: new requests in spite of that"] += (
            self._throttles and has_new_request
        )
        self.coverage["data parallel: new requests in their steps"] += (
            self._interval > 1 and not self._throttles and has_new_request
        )
        self.coverage["data parallel: chunks that are put off"] += sum(
            self._throttles and request.is_prefill_chunk and request.num_in_flight_tokens == 0
            for request in requests.values()
            if request.request_id not in output.num_scheduled_tokens
        )
