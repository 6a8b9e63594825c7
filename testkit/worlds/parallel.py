"""Engines of several ranks: pipeline stages, and data-parallel replicas."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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

    def start(self, configuration: Configuration, seed: int) -> Feature:
        return DataParallel(configuration, seed, self.prefill_schedule_interval)


class DataParallel(Feature):
    """Lets prefills begin in some steps only, which all engines count alike."""

    def __init__(self, configuration: Configuration, seed: int, interval: int) -> None:
        super().__init__(configuration, seed)
        self._interval = interval

    def throttles_prefills(self, step_number: int) -> bool:
        return step_number % self._interval != 0
