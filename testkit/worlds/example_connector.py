"""vLLM's ExampleConnector: prompts that are found on the disk are loaded within a step.

Its scheduler side looks for a folder for each prompt. Workers would fill it; here they make it.
"""

from __future__ import annotations

import functools
import random
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.config import KVTransferConfig
from vllm.v1.outputs import ModelRunnerOutput

from .configuration import Configuration
from .events import Arrive, Event, LoseInFlightSteps
from .feature import Feature, FeatureSettings, Step


@functools.cache
def _storage() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="differential-connector-")


@dataclass(frozen=True)
class ExampleConnectorSettings(FeatureSettings):
    """Where the prompts are."""

    folder: str
    kv_role: str

    needs_block_hashes = True

    @classmethod
    def draw(
        cls, rng: random.Random, _configuration: Configuration, _scenario: Mapping[str, Any]
    ) -> ExampleConnectorSettings:
        folder = Path(_storage().name) / f"{rng.getrandbits(64):x}"
        return cls(str(folder), rng.choice(["kv_both", "kv_consumer"]))

    def configure(self, vllm_config: Any) -> None:
        vllm_config.kv_transfer_config = KVTransferConfig(
            kv_connector="ExampleConnector",
            kv_role=self.kv_role,
            engine_id="differential",
            kv_connector_extra_config={"shared_storage_path": self.folder},
        )
        vllm_config.scheduler_config.disable_hybrid_kv_cache_manager = True

    def start(self, configuration: Configuration, seed: int) -> Feature:
        shutil.rmtree(self.folder, ignore_errors=True)
        return ExampleConnectorFeature(configuration, seed)


class ExampleConnectorFeature(Feature):
    """Makes the folders that both sides look for."""

    def watch(self, scheduler: Any) -> None:
        self._connector = scheduler.connector

    def allows(self, event: Event) -> bool:
        match event:
            case LoseInFlightSteps():
                return False  # blocks that wait for its end would never be free again
            case Arrive(plan):
                # The connector says of one token that it has less than none of it, and vLLM that a
                # negative number of tokens is computed.
                return len(plan.prompt_token_ids) > 1
        return True

    def complete_output(self, step: Step, output: ModelRunnerOutput) -> ModelRunnerOutput:
        assert step.scheduled.kv_connector_metadata is not None
        for request in step.scheduled.kv_connector_metadata.requests:
            if request.is_store:
                self._connector._generate_filename_debug(
                    "layer", request.token_ids, request.mm_hashes
                )
        return output
