"""Multimodal requests: prompts with images whose encoder's outputs are scheduled and cached."""

from __future__ import annotations

import copy
import dataclasses
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from vllm.config import MultiModalConfig
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)

from .configuration import Configuration
from .events import Call, Event, ItemPlan, RequestPlan, SchedulerView
from .feature import Feature, FeatureSettings

_PLACEHOLDER_TOKEN = 3


@dataclass(frozen=True)
class MultimodalSettings(FeatureSettings):
    """What the encoder and its cache can take."""

    most_item_tokens: int
    encoder_compute_budget: int
    encoder_cache_size: int
    disable_chunked_mm_input: bool
    enable_logging_iteration_details: bool
    uses_mrope: bool

    @classmethod
    def draw(
        cls, rng: random.Random, configuration: Configuration, _scenario: Mapping[str, Any]
    ) -> MultimodalSettings:
        most_item_tokens = rng.choice([2, 6, 12, 24])
        disable_chunked_mm_input = rng.random() < 0.4
        if disable_chunked_mm_input:
            most_item_tokens = min(most_item_tokens, configuration.max_num_batched_tokens)
        return cls(
            most_item_tokens=most_item_tokens,
            # vLLM makes sure that the largest item fits, and that is all it makes sure of.
            encoder_compute_budget=math.ceil(most_item_tokens * rng.choice([1, 1, 1.5, 2, 4])),
            encoder_cache_size=math.ceil(most_item_tokens * rng.choice([1, 1, 1.5, 2, 4])),
            disable_chunked_mm_input=disable_chunked_mm_input,
            enable_logging_iteration_details=rng.random() < 0.5,
            uses_mrope=rng.random() < 0.3,
        )

    def configure(self, vllm_config: Any) -> None:
        vllm_config.scheduler_config.disable_chunked_mm_input = self.disable_chunked_mm_input
        vllm_config.scheduler_config.is_multimodal_model = True
        vllm_config.observability_config.enable_logging_iteration_details = (
            self.enable_logging_iteration_details
        )
        model_config = vllm_config.model_config
        model_config.multimodal_config = MultiModalConfig()
        # Otherwise it would ask the model's class, which is one for text.
        model_config._cached_supports_multimodal_inputs = lambda: True
        assert model_config.supports_multimodal_inputs
        if self.uses_mrope:
            model_config.hf_config = copy.copy(model_config.hf_config)
            model_config.hf_config.rope_parameters = {"mrope_section": [1, 1, 1]}
        assert model_config.uses_mrope == self.uses_mrope

    def start(self, configuration: Configuration, seed: int) -> Feature:
        return Multimodal(configuration, seed, self)


class Multimodal(Feature):
    """Puts images into prompts: the same few, at the same places, again and again."""

    def __init__(
        self, configuration: Configuration, seed: int, settings: MultimodalSettings
    ) -> None:
        super().__init__(configuration, seed)
        self._settings = settings
        rng = self.rng
        self._share = rng.choice([0.3, 0.8, 1.0])
        self._mismatch_rate = rng.choice([0.0, 0.0, 0.02, 0.1])
        self._reset_rate = rng.choice([0.0, 0.0, 0.02])
        self._items = [self._draw_item(f"image-{index}") for index in range(rng.choice([3, 6, 20]))]
        self._layouts = [self._draw_layout() for _ in range(rng.choice([1, 2, 4]))]

    def _draw_item(self, identifier: str) -> ItemPlan:
        rng = self.rng
        length = rng.randint(1, self._settings.most_item_tokens)
        is_embed = None
        if rng.random() < 0.4:
            density = rng.choice([0.0, 0.3, 0.7, 0.9])
            is_embed = tuple(rng.random() < density for _ in range(length))
        return ItemPlan(identifier, 0, length, is_embed, "tensors")

    def _draw_layout(self) -> list[ItemPlan]:
        """Draw what a prompt of the greatest length would hold."""
        rng = self.rng
        layout: list[ItemPlan] = []
        longest_gap = rng.choice([0, 2, 30])
        offset = rng.choice([0, rng.randint(0, 20)])
        while offset < self.configuration.max_model_len:
            item = rng.choice(self._items)
            layout.append(dataclasses.replace(item, offset=offset))
            offset += item.length + rng.randint(0, longest_gap)
        return layout

    @contextmanager
    def while_building(self, _side: int) -> Iterator[None]:
        settings = self._settings

        class Budget:
            """What vLLM works out from the model's processor."""

            def __init__(self, *_arguments: Any, **_named: Any) -> None:
                self.encoder_compute_budget = settings.encoder_compute_budget
                self.encoder_cache_size = settings.encoder_cache_size
                self.mm_max_toks_per_item = {"image": settings.most_item_tokens}

        with (
            mock.patch("vllm.v1.core.sched.scheduler.MultiModalBudget", Budget),
            mock.patch("vllm.multimodal.encoder_budget.MultiModalBudget", Budget),
        ):
            yield

    # What happens.

    def plan_request(self, plan: RequestPlan) -> RequestPlan:
        rng = self.rng
        if rng.random() >= self._share:
            return plan
        prompt = list(plan.prompt_token_ids)
        items = []
        for place in rng.choice(self._layouts):
            if place.end > len(prompt):
                break
            item = place
            if rng.random() < self._mismatch_rate:
                # Another image under the same name.
                other = self._draw_item(place.identifier)
                if other.length <= place.length:
                    item = dataclasses.replace(other, offset=place.offset)
            data = rng.choice(["tensors", "tensors", "address", "nothing"])
            items.append(dataclasses.replace(item, data=data))
            prompt[item.offset : item.end] = [_PLACEHOLDER_TOKEN] * item.length
        return dataclasses.replace(plan, prompt_token_ids=tuple(prompt), items=tuple(items))

    def request_arguments(self, plan: RequestPlan) -> dict[str, Any]:
        return {"mm_features": [_build_feature(item) for item in plan.items]}

    def events_before_step(self, _view: SchedulerView) -> Sequence[Event]:
        if self.rng.random() >= self._reset_rate:
            return []
        return [Call("reset_encoder_cache()", lambda scheduler: scheduler.reset_encoder_cache())]

    # What is compared.

    def snapshot(self, scheduler: Any) -> dict[str, Any]:
        manager = scheduler.encoder_cache_manager
        return {
            "encoder cache": {
                "cached": {
                    identifier: sorted(request_ids)
                    for identifier, request_ids in sorted(manager.cached.items())
                },
                # The first to be evicted comes first.
                "freeable": list(manager.freeable.items()),
                "freed": list(manager.freed),
                "num_free_slots": manager.num_free_slots,
                "num_freeable_slots": manager.num_freeable_slots,
            }
        }


def _build_feature(plan: ItemPlan) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(
        data=_build_data(plan),
        modality="image",
        identifier=plan.identifier,
        mm_position=PlaceholderRange(
            offset=plan.offset,
            length=plan.length,
            is_embed=None if plan.is_embed is None else torch.tensor(plan.is_embed),
        ),
        mm_hash=plan.identifier,
    )


def _build_data(plan: ItemPlan) -> MultiModalKwargsItem | None:
    if plan.data == "nothing":
        return None
    names = ["address"] if plan.data == "address" else ["pixels", "grid"]
    return MultiModalKwargsItem(
        {
            name: MultiModalFieldElem(
                torch.full((plan.length,), len(plan.identifier)),
                MultiModalBatchedField(keep_on_cpu=name == "grid"),
            )
            for name in names
        }
    )
