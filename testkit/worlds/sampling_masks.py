"""Sampling masks: which tokens could have been in the place of each that was sampled."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.v1.outputs import ModelRunnerOutput, SamplingMaskLists

from .configuration import Configuration
from .feature import Feature, FeatureSettings, Step


@dataclass(frozen=True)
class SamplingMasksSettings(FeatureSettings):
    """They are returned."""

    def configure(self, vllm_config: Any) -> None:
        vllm_config.model_config.return_sampling_mask = True

    def start(self, configuration: Configuration, seed: int) -> Feature:
        return SamplingMasks(configuration, seed)


class SamplingMasks(Feature):
    """Plays the sampler that tells them."""

    def complete_output(self, step: Step, output: ModelRunnerOutput) -> ModelRunnerOutput:
        counts = [len(it) for it in output.sampled_token_ids]
        # A sampler without drafts tells one mask a row, also of rows that get no token.
        has_one_a_row = all(it <= 1 for it in counts) and step.number % 2 == 0
        num_masks = len(counts) if has_one_a_row else sum(counts)
        sizes = [(step.number + position) % 4 + 1 for position in range(num_masks)]
        offsets = np.array([0, *itertools.accumulate(sizes)])
        masks = SamplingMaskLists(
            np.arange(offsets[-1], dtype=np.int32) + step.number,
            offsets,
            None if has_one_a_row else [0, *itertools.accumulate(counts)],
        )
        return dataclasses.replace(output, sampling_masks=masks)
