"""vLLM's OffloadingConnector: blocks are stored in the host's memory, and loaded from there.

The connector's scheduler side is vLLM's own, over its real manager of host memory. The worker's
side needs a GPU to copy from; this module only says when copies end.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from .configuration import Configuration
from .events import Arrive, Event, LoseInFlightSteps, RequestPlan, ResetPrefixCache
from .feature import Feature, FeatureSettings, Step

# What vLLM rounds a chunk of the tiny blocks here up to.
_CHUNK_BYTES = 4096


@dataclass(frozen=True)
class OffloadingSettings(FeatureSettings):
    """How much is offloaded, and when."""

    num_chunks: int
    blocks_per_chunk: int
    eviction_policy: str
    store_threshold: int
    offload_prompt_only: bool
    self_describing_kv_events: bool
    is_slow: bool
    """Whether copies take more than a step or two."""

    needs_block_hashes = True

    @classmethod
    def draw(
        cls, rng: random.Random, configuration: Configuration, _scenario: Mapping[str, Any]
    ) -> OffloadingSettings:
        blocks_per_chunk = rng.choice([1, 1, 2, 3])
        if (configuration.prefix_cache_retention_interval or 0) > 0:
            blocks_per_chunk = 1  # checkpoints must be ends of chunks
        return cls(
            num_chunks=rng.choice([8, 30, 200]),
            blocks_per_chunk=blocks_per_chunk,
            eviction_policy=rng.choice(["lru", "arc"]),
            store_threshold=rng.choice([0, 0, 2]),
            offload_prompt_only=rng.random() < 0.4,
            self_describing_kv_events=rng.random() < 0.5,
            is_slow=rng.random() < 0.5,
        )

    def configure(self, vllm_config: Any) -> None:
        vllm_config.kv_transfer_config = KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            engine_id="differential",
            kv_connector_extra_config={
                "cpu_bytes_to_use": self.num_chunks * _CHUNK_BYTES,
                "blocks_per_chunk": self.blocks_per_chunk,
                "eviction_policy": self.eviction_policy,
                "store_threshold": self.store_threshold,
                "offload_prompt_only": self.offload_prompt_only,
                "self_describing_kv_events": self.self_describing_kv_events,
            },
        )
        vllm_config.scheduler_config.disable_hybrid_kv_cache_manager = False

    def start(self, configuration: Configuration, seed: int) -> Feature:
        return Offloading(configuration, seed, self)


@dataclass
class _Job:
    """A copy between the GPU and the host."""

    job_id: int
    due_step: int
    loads_for: str | None
    """The request that waits for it, if it is a load."""


class Offloading(Feature):
    """The workers of both sides, which copy nothing, but take their time for it."""

    def __init__(
        self, configuration: Configuration, seed: int, settings: OffloadingSettings
    ) -> None:
        super().__init__(configuration, seed)
        self._slowest_step = 8 if settings.is_slow else 1
        self._jobs: list[_Job] = []
        self._request_ids: set[str] = set()

    def allows(self, event: Event) -> bool:
        match event:
            case LoseInFlightSteps():
                return False  # the reports of workers would be lost too
            # The connector ends in an exception if an id is used again before it has heard of the
            # first request's end, or if a request whose blocks a reset takes finds them again.
            case Arrive(plan):
                return plan.request_id not in self._request_ids
            case ResetPrefixCache(reset_running, reset_connector):
                return reset_connector or not reset_running
        return True

    def plan_request(self, plan: RequestPlan) -> RequestPlan:
        self._request_ids.add(plan.request_id)
        return plan

    def complete_output(self, step: Step, output: ModelRunnerOutput) -> ModelRunnerOutput:
        metadata = step.scheduled.kv_connector_metadata
        assert isinstance(metadata, OffloadingConnectorMetadata)
        for job_id, job in metadata.load_jobs.items():
            due_step = step.number + self.rng.randint(0, self._slowest_step)
            self._jobs.append(_Job(job_id, due_step, job.req_id))
        for job_id in metadata.store_jobs:
            # They are submitted with the next step.
            due_step = step.number + 1 + self.rng.randint(0, self._slowest_step)
            self._jobs.append(_Job(job_id, due_step, None))
        flushed = metadata.jobs_to_flush or set()
        done = [it for it in self._jobs if it.due_step <= step.number or it.job_id in flushed]
        self._jobs = [it for it in self._jobs if it not in done]
        if not done:
            return output
        report = KVConnectorOutput(
            finished_sending=set(),
            finished_recving={it.loads_for for it in done if it.loads_for is not None},
            kv_connector_worker_meta=OffloadingWorkerMetadata({it.job_id: 1 for it in done}),
        )
        return dataclasses.replace(output, kv_connector_output=report)
