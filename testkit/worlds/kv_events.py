"""KV cache events: what the schedulers publish about stored and removed blocks."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import (
    EventBatch,
    EventPublisher,
    EventPublisherFactory,
)

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

    def start(self, configuration: Configuration, seed: int) -> Feature:
        return KVEventsFeature(configuration, seed)


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

    def __init__(self, configuration: Configuration, seed: int) -> None:
        super().__init__(configuration, seed)
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
        return self._recorders[side].take()

    def snapshot(self, scheduler: Any) -> dict[str, Any]:
        return {"publisher config": scheduler.get_kv_event_publisher_config()}
