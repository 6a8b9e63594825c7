"""KV connectors: blocks that are loaded from elsewhere, and sent there when requests end.

The connector of each side is a `RecordingConnector`. This module plays the workers, which load and
send for some steps, fail now and then, and report it with the model's output.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from vllm.config import KVTransferConfig
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from . import connector
from .configuration import Configuration
from .connector import Behaviour, Load, Partner, TransferStats
from .events import Event, Finish, LoseInFlightSteps, RequestPlan, SchedulerView
from .feature import Feature, FeatureSettings, Step, with_extra_args


@dataclass(frozen=True)
class KVTransferSettings(FeatureSettings):
    """A connector, and what may go wrong with it."""

    supports_hybrid: bool
    kv_role: str
    kv_load_failure_policy: str
    failure_share: float
    """Share of loads that fail."""
    behaviour: Behaviour

    needs_block_hashes = True

    @classmethod
    def draw(
        cls, rng: random.Random, configuration: Configuration, scenario: Mapping[str, Any]
    ) -> KVTransferSettings:
        fixed = scenario["connector"]

        def choose(setting: str, *values: Any) -> Any:
            # Drawn even when fixed, so that fixing one setting leaves the others as they were.
            drawn = rng.choice(values)
            return fixed.get(setting, drawn)

        has_one_group = len(configuration.sliding_windows) == 1
        return cls(
            supports_hybrid=choose("supports_hybrid", True, False) or not has_one_group,
            kv_role=choose("kv_role", "kv_both", "kv_both", "kv_consumer", "kv_producer"),
            kv_load_failure_policy=choose("policy", "recompute", "fail"),
            failure_share=choose("failure_share", 0.0, 0.0),
            behaviour=Behaviour(
                match_share=choose("match_share", 0.3, 0.7, 1.0),
                async_share=choose("async_share", 0.0, 0.5, 0.5, 1.0),
                unknown_share=choose("unknown_share", 0.0, 0.2),
                delay_share=choose("delay_share", 0.0, 0.3, 0.9),
                requires_kv_delivery=choose("requires_kv_delivery", None, None, False, True),
                waits_for_frees=choose("waits_for_frees", False, False, True),
                pushes=choose("pushes", False, True),
                makes_events=choose("makes_events", False, True),
                has_stats=choose("has_stats", False, True),
                splits_sources=choose("splits_sources", False, True),
            ),
        )

    def configure(self, vllm_config: Any) -> None:
        name = "RecordingHybridConnector" if self.supports_hybrid else "RecordingConnector"
        vllm_config.kv_transfer_config = KVTransferConfig(
            kv_connector=name,
            kv_connector_module_path=connector.__name__,
            kv_role=self.kv_role,
            engine_id="differential",
            kv_load_failure_policy=self.kv_load_failure_policy,
        )
        vllm_config.scheduler_config.disable_hybrid_kv_cache_manager = not self.supports_hybrid

    def start(self, configuration: Configuration, seed: int) -> Feature:
        return KVTransfer(configuration, seed, self)


@dataclass
class _Transfer:
    """A load or a save that a worker is busy with."""

    request_id: str
    due_step: int
    fails: bool = False
    bad_block_ids: tuple[int, ...] = ()


class KVTransfer(Feature):
    """The workers of both sides, which do the same."""

    def __init__(
        self, configuration: Configuration, seed: int, settings: KVTransferSettings
    ) -> None:
        super().__init__(configuration, seed)
        self._settings = settings
        partner_seed = f"connector/{configuration.name}/{seed}"
        self._partners = [Partner(partner_seed, settings.behaviour) for _ in range(2)]
        self._loads: list[_Transfer] = []
        self._sends: list[_Transfer] = []
        self._slowest_step = self.rng.choice([0, 2, 8])
        self._abort_rate = self.rng.choice([0.0, 0.05, 0.2])

    def while_building(self, side: int) -> AbstractContextManager[None]:
        return self._partners[side].connecting()

    # What happens.

    def allows(self, event: Event) -> bool:
        # A worker's reports would be lost too, and what they are about would wait for ever.
        return not isinstance(event, LoseInFlightSteps)

    def plan_request(self, plan: RequestPlan) -> RequestPlan:
        params = self.rng.choice(
            [None, None, {"do_remote_prefill": True}, {"do_remote_decode": True}]
        )
        return plan if params is None else with_extra_args(plan, kv_transfer_params=dict(params))

    def events_before_step(self, view: SchedulerView) -> Sequence[Event]:
        loading = view.request_ids_with_status(RequestStatus.WAITING_FOR_REMOTE_KVS)
        if not loading or self.rng.random() >= self._abort_rate:
            return []
        return [Finish((self.rng.choice(loading),), RequestStatus.FINISHED_ABORTED)]

    def complete_output(self, step: Step, output: ModelRunnerOutput) -> ModelRunnerOutput:
        report = KVConnectorOutput(finished_sending=set(), finished_recving=set())
        self._start_loads(step.number, step.requests, report)
        self._start_sends(step.number, step.scheduled.finished_req_ids)
        for load in _take_due(self._loads, step.number):
            self._finish_load(load, step.requests, report)
        for send in _take_due(self._sends, step.number):
            report.finished_sending.add(send.request_id)
        if self._settings.behaviour.has_stats and self.rng.random() < 0.5:
            report.kv_connector_stats = TransferStats({"transferred": step.number})
        if report.is_empty() and self.rng.random() < 0.7:
            report = self.rng.choice([None, KVConnectorOutput()])
        # A step without tokens has an output that all such steps share.
        return dataclasses.replace(output, kv_connector_output=report)

    def _start_loads(
        self, step_number: int, requests: Mapping[str, Request], report: KVConnectorOutput
    ) -> None:
        for partner in self._partners[1:]:
            partner.started_loads.clear()
        started, self._partners[0].started_loads = self._partners[0].started_loads, []
        for load in started:
            fails = self.rng.random() < self._settings.failure_share
            bad_block_ids = self._draw_bad_blocks(load) if fails else ()
            if load.is_async:
                due_step = step_number + self.rng.randint(0, self._slowest_step)
                self._loads.append(_Transfer(load.request_id, due_step, fails, bad_block_ids))
            elif bad_block_ids and requests[load.request_id].status == RequestStatus.RUNNING:
                report.invalid_block_ids.update(bad_block_ids)

    def _draw_bad_blocks(self, load: Load) -> tuple[int, ...]:
        """Draw the blocks by which a failure is reported; none of them if it is by request."""
        # Numbers of blocks say nothing where there are several groups, and 0 is no block.
        block_ids = [block_id for block_id in load.block_ids if block_id]
        if len(self.configuration.sliding_windows) > 1 or not block_ids:
            return ()
        if load.is_async and self.rng.random() < 0.4:
            return ()
        return tuple(self.rng.sample(block_ids, self.rng.randint(1, len(block_ids))))

    def _start_sends(self, step_number: int, finished_ids: Iterable[str]) -> None:
        # A worker hears of a request's end with a step, and reports on it with that or a later one.
        for request_id in sorted(finished_ids):
            if request_id in self._partners[0].sending:
                due_step = step_number + self.rng.randint(0, self._slowest_step)
                self._sends.append(_Transfer(request_id, due_step))

    def _finish_load(
        self, load: _Transfer, requests: Mapping[str, Request], report: KVConnectorOutput
    ) -> None:
        report.finished_recving.add(load.request_id)
        if not load.fails:
            return
        is_waiting = requests[load.request_id].status == RequestStatus.WAITING_FOR_REMOTE_KVS
        if load.bad_block_ids and is_waiting:
            report.invalid_block_ids.update(load.bad_block_ids)
        elif not load.bad_block_ids:
            report.failed_recving.add(load.request_id)

    # What is compared.

    def told(self, side: int) -> Any:
        return self._partners[side].take_log()

    def snapshot(self, scheduler: Any) -> dict[str, Any]:
        assert scheduler.connector is scheduler.get_kv_connector()
        return {"connector": type(scheduler.connector).__name__}


def _take_due(transfers: list[_Transfer], step_number: int) -> list[_Transfer]:
    due = [transfer for transfer in transfers if transfer.due_step <= step_number]
    transfers[:] = [transfer for transfer in transfers if transfer.due_step > step_number]
    return due


def copy_output(output: ModelRunnerOutput) -> ModelRunnerOutput:
    """Return a copy for the other side, which shares the sets of a worker's report.

    Schedulers free blocks in the order of these sets, and a copy may have another one.
    """
    report = output.kv_connector_output
    fields = [] if report is None else dataclasses.fields(report)
    members = [getattr(report, it.name) for it in fields]
    return copy.deepcopy(output, {id(it): it for it in members if isinstance(it, set)})
