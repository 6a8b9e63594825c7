"""A KV connector that notes whatever a scheduler asks or tells it, and answers by a plan.

Each side has a connector of its own. Answers depend on the seed and on what the scheduler shows of
its requests, so both sides get the same ones for as long as they ask the same questions.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from vllm.distributed.kv_events import BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request


@dataclass(frozen=True)
class Behaviour:
    """How the connectors of a scenario answer."""

    match_share: float
    """Share of requests of which something is stored elsewhere."""
    async_share: float
    """Share of these whose blocks are loaded between steps, not within one."""
    unknown_share: float
    """Share of requests for which it takes a few steps to find out."""
    delay_share: float
    """Share of ends at which blocks are still to be sent."""
    requires_kv_delivery: bool | None
    """What the property of that name says; None leaves it to vLLM's base class."""
    waits_for_frees: bool
    """Whether requests are to wait for blocks being sent rather than be preempted."""
    pushes: bool
    """Whether the engine has to go on stepping after the last request has ended."""
    makes_events: bool
    has_stats: bool
    splits_sources: bool


@dataclass
class Load:
    """Blocks that are being filled from elsewhere."""

    request_id: str
    is_async: bool
    num_preemptions: int
    block_ids: list[int]
    """Those of the first KV cache group."""


@dataclass
class TransferMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler's side tells the worker's."""

    step: int
    loads: list[tuple[str, list[int]]]


@dataclass
class TransferStats(KVConnectorStats):  # type: ignore[misc]
    """A counter of transfers."""

    data: dict[str, int]

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.data = dict(Counter(self.data) + Counter(other.data))
        return self


@dataclass
class Partner:
    """What a side's connector shares with the harness."""

    seed: str
    behaviour: Behaviour
    log: list[tuple[Any, ...]] = field(default_factory=list)
    started_loads: list[Load] = field(default_factory=list)
    loading: set[str] = field(default_factory=set)
    sending: set[str] = field(default_factory=set)

    def take_log(self) -> list[tuple[Any, ...]]:
        log, self.log = self.log, []
        return log

    @contextmanager
    def connecting(self) -> Iterator[None]:
        """Have the connector that is built meanwhile be this one's."""
        RecordingConnector.next_partner = self
        try:
            yield
        finally:
            assert RecordingConnector.next_partner is None, "a scheduler builds its connector"


class RecordingConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """The scheduler's side, for a model with one KV cache group."""

    next_partner: ClassVar[Partner | None] = None

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        assert RecordingConnector.next_partner is not None
        self.partner = RecordingConnector.next_partner
        RecordingConnector.next_partner = None
        self._requests: dict[str, Request] = {}
        self._num_asked: Counter[str] = Counter()
        self._num_local: dict[str, int] = {}
        self._step_loads: list[Load] = []
        self._num_calls: Counter[str] = Counter()
        self._num_push_steps = 0
        self._note("__init__", role)

    def _note(self, call: str, *details: Any) -> None:
        self.partner.log.append((call, *details))

    def _rng(self, *parts: object) -> random.Random:
        return random.Random(repr((self.partner.seed, *parts)))

    def _rng_of_call(self, call: str) -> random.Random:
        self._num_calls[call] += 1
        return self._rng(call, self._num_calls[call])

    # What the worker's side would need.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def wait_for_layer_load(self, layer_name: str) -> None:
        raise NotImplementedError

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def wait_for_save(self) -> None:
        raise NotImplementedError

    # Questions that change nothing, so that a scheduler may ask them at any time.

    @property
    def requires_kv_delivery(self) -> bool:
        wanted = self.partner.behaviour.requires_kv_delivery
        return bool(super().requires_kv_delivery if wanted is None else wanted)

    def has_pending_block_frees(self) -> bool:
        return self.partner.behaviour.waits_for_frees and bool(self.partner.sending)

    def has_pending_push_work(self) -> bool:
        return self._num_push_steps > 0

    # The life of a request.

    def on_new_request(self, request: Request) -> None:
        # Set by vLLM's base class when the scheduler shows its KV cache manager.
        assert self._kv_cache_manager is not None
        self._requests[request.request_id] = request
        self._note("on_new_request", request_state(request))

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        answer = self._match(request, num_computed_tokens)
        self._num_local[request.request_id] = num_computed_tokens
        self._note(
            "get_num_new_matched_tokens", request_state(request), num_computed_tokens, answer
        )
        return answer

    def _match(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        behaviour = self.partner.behaviour
        rng = self._rng(request.request_id, request.arrival_time, request.num_preemptions)
        is_async = rng.random() < behaviour.async_share
        num_unknown = rng.randint(1, 3) if rng.random() < behaviour.unknown_share else 0
        num_tokens = request.num_tokens
        block_size = self._vllm_config.cache_config.block_size
        num_stored = rng.choice(
            [
                num_tokens,
                num_tokens - 1,
                rng.randint(0, num_tokens),
                rng.randint(0, num_tokens // block_size) * block_size,
            ]
        )
        if rng.random() >= behaviour.match_share:
            num_stored = 0
        if not is_async:
            # The last token is always computed here.
            num_stored = min(num_stored, num_tokens - 1)
        self._num_asked[request.request_id] += 1
        if self._num_asked[request.request_id] <= num_unknown:
            return None, False
        num_external = max(0, num_stored - num_computed_tokens)
        return num_external, is_async and num_external > 0

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        block_ids = blocks.get_block_ids()
        self._note(
            "update_state_after_alloc",
            request_state(request),
            type(blocks).__name__,
            block_ids,
            blocks.get_unhashed_block_ids_all_groups(),
            num_external_tokens,
        )
        self._num_asked.pop(request.request_id, None)
        if num_external_tokens == 0:
            return
        block_size = self._vllm_config.cache_config.block_size
        num_local = self._num_local[request.request_id]
        _, is_async = self._match(request, num_local)
        load = Load(
            request.request_id,
            is_async,
            request.num_preemptions,
            block_ids[0][
                num_local // block_size : -(-(num_local + num_external_tokens) // block_size)
            ],
        )
        self._step_loads.append(load)
        self.partner.started_loads.append(load)
        if is_async:
            self.partner.loading.add(request.request_id)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        sources = super().get_external_cache_hit_sources(request, num_external_tokens)
        if self.partner.behaviour.splits_sources:
            num_host = num_external_tokens // 2
            # Now and then they don't add up.
            num_disk = num_external_tokens - num_host - (num_external_tokens % 5 == 0)
            sources = {CacheHitSource.DISK: num_disk, CacheHitSource.HOST: num_host}
        self._note(
            "get_external_cache_hit_sources", request_state(request), num_external_tokens, sources
        )
        return dict(sources)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._finish("request_finished", request, block_ids)

    def _finish(
        self, call: str, request: Request, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        request_id, behaviour = request.request_id, self.partner.behaviour
        rng = self._rng("finish", request_id, request.arrival_time)
        # Blocks that are being filled can't be sent.
        delays = rng.random() < behaviour.delay_share and request_id not in self.partner.loading
        params = {"do_remote_prefill": True, "remote_block_ids": copy.deepcopy(block_ids)}
        answer = delays, rng.choice([None, params, {"note": request_id}])
        self._note(call, request_state(request), copy.deepcopy(block_ids), copy.deepcopy(answer))
        if delays:
            self.partner.sending.add(request_id)
        else:
            del self._requests[request_id]
        if behaviour.pushes:
            self._num_push_steps = rng.randint(0, 4)
        self._num_asked.pop(request_id, None)
        return answer

    # The calls of each step.

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> TransferMetadata:
        block_state = scheduler_output.kv_connector_block_state
        assert block_state is not None
        seen_output = copy.copy(scheduler_output)
        seen_output.kv_connector_block_state = None
        self._note(
            "build_connector_meta",
            seen_output,
            {
                request_id: block_state.get_block_ids(request_id)
                for request_id in sorted(block_state.req_ids)
            },
            block_state.get_block_ids("no-such-request"),
            block_state.boundary_state_offloads,
            # A connector looks at the requests that it has been shown.
            [_progress(request) for request in self._requests.values()],
        )
        self._num_push_steps = max(0, self._num_push_steps - 1)
        loads, self._step_loads = self._step_loads, []
        self._num_calls["step"] += 1
        return TransferMetadata(
            self._num_calls["step"], [(load.request_id, load.block_ids) for load in loads]
        )

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._note("update_connector_output", copy.deepcopy(connector_output))
        self.partner.loading -= connector_output.finished_recving or set()
        for request_id in connector_output.finished_sending or ():
            self.partner.sending.remove(request_id)
            del self._requests[request_id]

    def get_kv_connector_stats(self) -> TransferStats | None:
        rng = self._rng_of_call("get_kv_connector_stats")
        self._note("get_kv_connector_stats")
        if not self.partner.behaviour.has_stats or rng.random() < 0.5:
            return None
        return TransferStats(rng.choice([{}, {"asked": self._num_calls["step"]}]))

    def take_events(self) -> Iterable[BlockStored]:
        rng = self._rng_of_call("take_events")
        self._note("take_events")
        if not self.partner.behaviour.makes_events or rng.random() < 0.5:
            return ()
        events = [_stored_elsewhere(rng) for _ in range(rng.randint(0, 2))]
        return rng.choice([events, tuple(events), iter(events)])

    def reset_cache(self) -> bool | None:
        answer = self._rng_of_call("reset_cache").choice([None, True, False])
        self._note("reset_cache", answer)
        return answer

    def shutdown(self) -> None:
        self._note("shutdown")


class RecordingHybridConnector(RecordingConnector, SupportsHMA):  # type: ignore[misc]
    """The scheduler's side, for any number of KV cache groups."""

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        raise AssertionError("this connector is asked for all groups at once")

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._finish("request_finished_all_groups", request, block_ids)


def request_state(request: Request) -> dict[str, Any]:
    """Return what a connector may read of a request that it is given."""
    assert type(request) is Request
    return _progress(request) | {
        "prompt_token_ids": list(request.prompt_token_ids),
        "all_token_ids": list(request.all_token_ids),
        "block_hashes": list(request.block_hashes),
        "kv_transfer_params": copy.deepcopy(request.kv_transfer_params),
        "num_preemptions": request.num_preemptions,
        "num_output_placeholders": request.num_output_placeholders,
        "is_finished": request.is_finished(),
    }


def _progress(request: Request) -> dict[str, Any]:
    return {
        "request_id": request.request_id,
        "status": request.status.name,
        "num_computed_tokens": request.num_computed_tokens,
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_tokens": request.num_tokens,
        "num_output_tokens": request.num_output_tokens,
        "last block hash": request.block_hashes[-1] if request.block_hashes else None,
    }


def _stored_elsewhere(rng: random.Random) -> BlockStored:
    return BlockStored(
        block_hashes=[rng.randbytes(4)],
        parent_block_hash=None,
        token_ids=[],
        block_size=4,
        lora_id=None,
        medium="CPU",
        lora_name=None,
        group_idx=rng.choice([None, 0]),
    )
