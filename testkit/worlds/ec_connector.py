"""EC connectors: encoder outputs that come from elsewhere, or are sent there.

As with KV connectors, each side has one that notes what it is asked and answers by a plan.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from vllm.config import ECTransferConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata
from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorStats
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ECConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from .configuration import Configuration
from .connector import request_state
from .feature import Feature, FeatureSettings, LoggedFeature, Step


@dataclass(frozen=True)
class ECConnectorSettings(FeatureSettings):
    """How the connectors of a scenario answer."""

    ec_role: str
    stored_share: float
    """Share of images that are found elsewhere."""
    pending_share: float
    """Share of requests whose images are not there at once."""
    failure_share: float
    """Share of questions after which a waiting request is given up."""
    pushes: bool
    has_stats: bool
    delay_share: float
    """Share of ends at which the request is kept, for ever: no worker says that it may go."""

    @classmethod
    def draw(
        cls, rng: random.Random, _configuration: Configuration, _scenario: Mapping[str, Any]
    ) -> ECConnectorSettings:
        return cls(
            ec_role=rng.choice(["ec_both", "ec_consumer"]),
            stored_share=rng.choice([0.0, 0.4, 0.8]),
            pending_share=rng.choice([0.0, 0.3, 0.8]),
            failure_share=rng.choice([0.0, 0.1]),
            pushes=rng.random() < 0.5,
            has_stats=rng.random() < 0.5,
            delay_share=rng.choice([0.0, 0.0, 0.05]),
        )

    def configure(self, vllm_config: Any) -> None:
        vllm_config.ec_transfer_config = ECTransferConfig(
            ec_connector="RecordingECConnector",
            ec_connector_module_path=__name__,
            ec_role=self.ec_role,
            engine_id="differential",
        )

    def start(self, configuration: Configuration, seed: int) -> Feature:
        return ECConnector(configuration, seed, self)


@dataclass
class ECMetadata(ECConnectorMetadata):  # type: ignore[misc]
    """What the scheduler's side tells the worker's."""

    loads: list[tuple[str, int]]


@dataclass
class ECStats(ECConnectorStats):  # type: ignore[misc]
    """A counter of transfers."""

    data: dict[str, int]

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: ECConnectorStats) -> ECConnectorStats:
        self.data = dict(Counter(self.data) + Counter(other.data))
        return self


class RecordingECConnector(ECConnectorBase):  # type: ignore[misc]
    """The scheduler's side."""

    next_settings: ClassVar[tuple[ECConnectorSettings, str, list[tuple[Any, ...]]] | None] = None

    def __init__(self, vllm_config: Any, role: Any) -> None:
        super().__init__(vllm_config, role)
        assert RecordingECConnector.next_settings is not None
        self._settings, self._seed, self._log = RecordingECConnector.next_settings
        RecordingECConnector.next_settings = None
        self._num_asked: Counter[str] = Counter()
        self._unavailable: set[str] = set()
        self._step_loads: list[tuple[str, int]] = []
        self._num_steps = 0
        self._num_push_steps = 0

    def _note(self, call: str, *details: Any) -> None:
        self._log.append((call, *details))

    def _rng(self, *parts: object) -> random.Random:
        return random.Random(repr((self._seed, *parts)))

    def start_load_caches(self, encoder_cache: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def save_caches(self, encoder_cache: Any, mm_hash: str, **kwargs: Any) -> None:
        raise NotImplementedError

    def has_pending_push_work(self) -> bool:
        return self._num_push_steps > 0

    def has_cache_item(self, identifier: str) -> bool:
        answer = self._rng(identifier).random() < self._settings.stored_share
        self._note("has_cache_item", identifier, answer)
        return answer

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        rng = self._rng("ensure", request.request_id, request.num_preemptions)
        num_pending = rng.randint(1, 4) if rng.random() < self._settings.pending_share else 0
        self._num_asked[request.request_id] += 1
        num_asked = self._num_asked[request.request_id]
        rng = self._rng("asked", request.request_id, num_asked)
        # Images are asked for again when their turn comes.
        is_lost = rng.random() < self._settings.pending_share / 4
        answer = num_asked > num_pending and not is_lost
        if not answer and rng.random() < self._settings.failure_share:
            self._unavailable.add(request.request_id)
        self._note("ensure_cache_available", request_state(request), num_computed_tokens, answer)
        return answer

    def take_unavailable_requests(self) -> set[str]:
        unavailable, self._unavailable = self._unavailable, set()
        self._note("take_unavailable_requests", sorted(unavailable))
        return unavailable

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        self._note("update_state_after_alloc", request_state(request), index)
        self._step_loads.append((request.request_id, index))

    def update_state_after_free(self, request: Request, index: int) -> None:
        self._note("update_state_after_free", request_state(request), index)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ECMetadata:
        seen = copy.copy(scheduler_output)
        # A KV connector's log has what is in it.
        seen.kv_connector_block_state = bool(seen.kv_connector_block_state)
        self._note("build_connector_meta", seen)
        self._num_push_steps = max(0, self._num_push_steps - 1)
        self._num_steps += 1
        loads, self._step_loads = self._step_loads, []
        return ECMetadata(loads)

    def update_connector_output(self, connector_output: ECConnectorOutput) -> None:
        self._note("update_connector_output", copy.deepcopy(connector_output))

    def get_ec_connector_stats(self) -> ECStats | None:
        self._note("get_ec_connector_stats")
        if not self._settings.has_stats:
            return None
        return self._rng("stats", self._num_steps).choice(
            [None, ECStats({}), ECStats({"asked": 1})]
        )

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        rng = self._rng("end", request.request_id)
        params = rng.choice([None, {"peer": "somewhere"}])
        answer = rng.random() < self._settings.delay_share, params
        self._note("request_finished", request_state(request), copy.deepcopy(answer))
        if self._settings.pushes:
            self._num_push_steps = 2
        return answer

    def shutdown(self) -> None:
        self._note("shutdown")


class ECConnector(LoggedFeature):
    """The workers of both sides, which have little to say."""

    def __init__(
        self, configuration: Configuration, seed: int, settings: ECConnectorSettings
    ) -> None:
        super().__init__(configuration, seed)
        self._settings = settings
        self._seed = f"EC connector/{configuration.name}/{seed}"

    @contextmanager
    def while_building(self, side: int) -> Iterator[None]:
        RecordingECConnector.next_settings = (self._settings, self._seed, self._logs[side])
        yield
        assert RecordingECConnector.next_settings is None, "a scheduler builds its connector"

    def complete_output(self, step: Step, output: ModelRunnerOutput) -> ModelRunnerOutput:
        if self.rng.random() < 0.7:
            return output
        stats = ECStats({"transferred": step.number}) if self.rng.random() < 0.5 else None
        report = ECConnectorOutput(finished_recving={"image-0"}, ec_connector_stats=stats)
        return dataclasses.replace(output, ec_connector_output=report)

    # What is compared.

    def snapshot(self, scheduler: Any) -> dict[str, Any]:
        return {"EC connector": type(scheduler.get_ec_connector()).__name__}
