"""Sampling masks: which tokens could have been in the place of each that was sampled."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput, SamplingMaskLists
from vllm.v1.request import Request

from .configuration import Configuration
from .feature import Feature, FeatureSettings


@dataclass(frozen=True)
class SamplingMasksSettings(FeatureSettings):
    """They are returned."""

    @classmethod
    def draw(
        cls, _rng: random.Random, _configuration: Configuration, _scenario: Mapping[str, Any]
    ) -> SamplingMasksSettings:
        return cls()

    def configure(self, vllm_config: Any) -> None:
        vllm_config.model_config.return_sampling_mask = True

    def start(self, configuration: Configuration, seed: int, coverage: Counter[str]) -> Feature:
        return SamplingMasks(configuration, seed, coverage)


class SamplingMasks(Feature):
    """Plays the sampler that tells them."""

    def complete_output(
        self,
        step_number: int,
        _scheduler_output: SchedulerOutput,
        _requests: Mapping[str, Request],
        output: ModelRunnerOutput,
    ) -> ModelRunnerOutput:
        counts = [len(it) for it in output.sampled_token_ids]
        # A sampler without drafts tells one mask a row, also of rows that get no token.
        has_one_a_row = all(it <= 1 for it in counts) and step_number % 2 == 0
        num_masks = len(counts) if has_one_a_row else sum(counts)
        sizes = [(step_number + position) % 4 + 1 for position in range(num_masks)]
        offsets = np.array([0, *itertools.accumulate(sizes)])
        masks = SamplingMaskLists(
            np.arange(offsets[-1], dtype=np.int32) + step_number,
            offsets,
            None if has_one_a_row else [0, *itertools.accumulate(counts)],
        )
        return dataclasses.replace(output, sampling_masks=masks)

    def cover_outputs(
        self, outputs: Mapping[int, EngineCoreOutputs], requests: Mapping[str, Request]
    ) -> None:
        for output in (it for client in outputs.values() for it in client.outputs):
            mask = output.new_sampling_mask
            if mask is not None:
                self.coverage["masks: of one token"] += mask.offsets is None
                self.coverage["masks: of several tokens"] += mask.offsets is not None
