"""KV cache events: what the schedulers publish about stored and removed blocks."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventPublisher,
    EventPublisherFactory,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from .configuration import Configuration
from .events import RequestPlan
from .feature import Feature, FeatureSettings, with_extra_args

_EPOCH = 1_700_000_000.0


@dataclass(frozen=True)
class KVEventsSettings(FeatureSettings):
    """Events are on; hashes are published as integers or as bytes."""

    integer_hashes: bool

    @classmethod
    def draw(
        cls, rng: random.Random, _configuration: Configuration, _scenario: Mapping[str, Any]
    ) -> KVEventsSettings:
        return cls(integer_hashes=rng.random() < 0.5)

    def configure(self, vllm_config: Any) -> None:
        vllm_config.kv_events_config = KVEventsConfig(
            enable_kv_cache_events=True, publisher="null", topic="differential"
        )

    def environment(self) -> dict[str, str]:
        return {"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": str(int(self.integer_hashes))}

    def start(self, configuration: Configuration, seed: int, coverage: Counter[str]) -> Feature:
        return KVEventsFeature(configuration, seed, coverage)


class EventRecorder(EventPublisher):  # type: ignore[misc]
    """Takes the place of a scheduler's publisher, and keeps what it is given."""

    def __init__(self, config: KVEventsConfig, data_parallel_rank: int) -> None:
        super().__init__(data_parallel_rank)
        self._config = config
        self._published: list[EventBatch] = []
        self._latest: list[EventBatch] = []
        self._was_shut_down = False

    def publish(self, events: EventBatch) -> None:
        assert not self._was_shut_down
        # As the publisher with a socket does.
        if events.data_parallel_rank is None:
            events.data_parallel_rank = self._data_parallel_rank
        self._published.append(events)

    def shutdown(self) -> None:
        self._was_shut_down = True

    def get_publisher_config(self) -> KVEventsConfig:
        return self._config

    def take(self) -> dict[str, Any]:
        """Return what was published since the last call, and what came before it.

        A publisher encodes batches in a thread, so the scheduler must not change them any more.
        """
        published, self._published = self._published, []
        before: list[EventBatch] = []
        if published:
            before, self._latest = self._latest, published
        return {
            "published": published,
            "published before": before,
            "shut down": self._was_shut_down,
        }


class KVEventsFeature(Feature):
    """Records what each side publishes; gives requests sessions and ways of reporting."""

    def __init__(self, configuration: Configuration, seed: int, coverage: Counter[str]) -> None:
        super().__init__(configuration, seed, coverage)
        self._recorders: dict[int, EventRecorder] = {}
        self._session_share = self.rng.choice([0.0, 0.5, 1.0])
        self._full_report_share = self.rng.choice([0.0, 0.3, 0.3, 1.0])

    @contextmanager
    def while_building(self, side: int) -> Iterator[None]:
        def create(config: KVEventsConfig, data_parallel_rank: int = 0) -> EventRecorder:
            assert config.topic == "differential"
            recorder = EventRecorder(config, data_parallel_rank)
            # A verifying scheduler's shadow makes one more, through which nothing is published.
            self._recorders.setdefault(side, recorder)
            return recorder

        with mock.patch.object(EventPublisherFactory, "create", create):
            yield
        assert side in self._recorders, "a scheduler makes its publisher when it is built"

    def while_running(self, clock: Callable[[], float]) -> AbstractContextManager[Any]:
        def time() -> float:
            return _EPOCH + clock()

        return mock.patch("time.time", time)

    def plan_request(self, plan: RequestPlan) -> RequestPlan:
        rng = self.rng
        session_id = None
        if rng.random() < self._session_share:
            session_id = f"session-{rng.randrange(3)}"
        plan = dataclasses.replace(plan, session_id=session_id)
        report_mode = rng.choice([None, None, "incremental"])
        if rng.random() < self._full_report_share:
            report_mode = "full"
        if report_mode is not None:
            plan = with_extra_args(plan, kv_cache_report_mode=report_mode)
        return plan

    def request_arguments(self, plan: RequestPlan) -> dict[str, Any]:
        return {"session_id": plan.session_id}

    def told(self, side: int) -> Any:
        told = self._recorders[side].take()
        if side == 0:
            for batch in told["published"]:
                self._cover_batch(batch)
        return told

    def snapshot(self, scheduler: Any) -> dict[str, Any]:
        return {"publisher config": scheduler.get_kv_event_publisher_config()}

    def cover_schedule(self, output: SchedulerOutput, requests: Mapping[str, Request]) -> None:
        for new_request in output.scheduled_new_reqs:
            request = requests[new_request.req_id]
            self.coverage["events: hits that are reported"] += (
                new_request.num_computed_tokens > 0
                and getattr(request, "kv_cache_report_mode", None) == "full"
            )

    def _cover_batch(self, batch: EventBatch) -> None:
        coverage = self.coverage
        coverage["events: batches"] += 1
        coverage[f"events: batches under {self.configuration.prefix_caching_hash_algo}"] += 1
        for event in batch.events:
            if isinstance(event, BlockStored):
                self._cover_stored(event)
            elif isinstance(event, BlockRemoved):
                coverage["events: removed"] += 1
            elif isinstance(event, AllBlocksCleared):
                coverage["events: all cleared"] += 1

    def _cover_stored(self, event: BlockStored) -> None:
        coverage = self.coverage
        coverage["events: stored"] += 1
        coverage["events: stored after a parent"] += event.parent_block_hash is not None
        coverage["events: stored with a salt"] += any(event.extra_keys or ())
        coverage["events: stored for a session"] += event.session_id is not None
        # Of a sliding window, the blocks that no hit can need are not stored.
        coverage["events: stored, but without any block"] += not event.block_hashes
        coverage["events: stored, but not all blocks"] += (
            0 < len(event.block_hashes) < (len(event.token_ids) // max(event.block_size, 1))
        )
        for block_hash in event.block_hashes[:1]:
            coverage[f"events: hashes of type {type(block_hash).__name__}"] += 1
