"""Encoder inputs of multimodal requests: which of them a step computes, and how long they stay.

vLLM decides all of this: its encoder cache manager, and the functions of its `Scheduler` that drive
the manager. Those functions need no more of a scheduler than this class has. The core asks only
for requests that have encoder inputs.
"""

from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase
from vllm.multimodal import MultiModalRegistry, encoder_budget
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.output import NewRequestData, ScheduledEncoderInputStats
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request


class EncoderInputs:
    """The encoder's budget in a step, and its cache."""

    # What vLLM's functions below read of their scheduler besides the attributes set in __init__.
    is_encoder_decoder = False

    _try_schedule_encoder_inputs = Scheduler._try_schedule_encoder_inputs
    _reject_on_encoder_cache_embed_mismatch = Scheduler._reject_on_encoder_cache_embed_mismatch
    _allocate_encoder_inputs = Scheduler._allocate_encoder_inputs
    _free_encoder_inputs = Scheduler._free_encoder_inputs
    _free_encoder_input = Scheduler._free_encoder_input
    _make_scheduled_encoder_input_stats = Scheduler._make_scheduled_encoder_input_stats
    # Since vLLM 0.33.0; before, nobody asks for it.
    _get_encoder_input_updates: Any = getattr(Scheduler, "_get_encoder_input_updates", None)

    def __init__(
        self,
        vllm_config: VllmConfig,
        mm_registry: MultiModalRegistry,
        ec_connector: ECConnectorBase | None,
    ) -> None:
        budget = encoder_budget.MultiModalBudget(vllm_config, mm_registry)
        self.ec_connector = ec_connector
        self.scheduler_config = vllm_config.scheduler_config
        self.num_prefill_lookahead = vllm_config.num_prefill_lookahead_tokens
        manager_cls = vllm_config.ec_manager_config.get_encoder_cache_manager_obj()
        self.encoder_cache_manager = (manager_cls or EncoderCacheManager).create_manager(
            cache_size=budget.encoder_cache_size, vllm_config=vllm_config
        )
        self.encoder_cache_mismatch_reqs: set[str] = set()
        self.use_v2_model_runner = vllm_config.use_v2_model_runner
        self._pending_encoder_input_ids: dict[str, set[int]] = {}
        self.requests: dict[str, Request] = {}
        self._makes_stats = vllm_config.observability_config.enable_logging_iteration_details
        self._budget_of_a_step = budget.encoder_compute_budget
        self._budget = self._budget_of_a_step
        self._scheduled: dict[str, list[int]] = {}
        # What `plan` found: inputs to compute, those computed elsewhere, further uses of both, and
        # what would be left of the budget.
        self._plan: tuple[list[int], list[int], list[int], int] = ([], [], [], 0)

    # ---- called by the core ----

    def plan(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Look which inputs a request needs; return how many tokens it can have with them."""
        inputs, num_new_tokens, budget, external, duplicates = self._try_schedule_encoder_inputs(
            request,
            num_computed_tokens,
            num_new_tokens,
            self._budget,
            shift_computed_tokens=self.num_prefill_lookahead,
        )
        self._plan = (inputs, external, duplicates, budget)
        return int(num_new_tokens)

    def schedule(self, request: Request) -> None:
        """Make the inputs that `plan` found for this request part of the step."""
        inputs, external, duplicates, budget = self._plan
        if inputs:
            self._scheduled[request.request_id] = inputs
            self.requests[request.request_id] = request
            self._budget = budget
        if inputs or external:
            self._allocate_encoder_inputs(request, inputs + external, duplicates)

    def free_processed(self, request: Request, num_processed_tokens: int) -> None:
        """Free the inputs that lie in the first tokens of a request, all of them computed."""
        if self.ec_connector is None:
            request.num_computed_tokens = num_processed_tokens
            request.num_output_placeholders = 0
        # Else all counters are up to date, as the connector is shown the request.
        self._free_encoder_inputs(request)

    def free(self, request: Request) -> None:
        """Free all inputs of a request, and give back what it has taken of the step's budget."""
        for input_id in self._scheduled.pop(request.request_id, ()):
            self._budget += request.get_num_encoder_embeds(input_id)
        self.encoder_cache_manager.free(request)
        self._pending_encoder_input_ids.pop(request.request_id, None)

    def end_step(self, log_stats: bool) -> tuple[Any, ...]:
        """Return what `SchedulerOutput` tells of the step, and begin the next.

        These are `scheduled_encoder_inputs`, `free_encoder_mm_hashes`,
        `scheduled_encoder_input_stats` and `ec_manager_metadata`.
        """
        scheduled, self._scheduled = self._scheduled, {}
        stats: ScheduledEncoderInputStats | None = None
        if log_stats and self._makes_stats:
            stats = self._make_scheduled_encoder_input_stats(scheduled)
        self.requests.clear()
        self._budget = self._budget_of_a_step
        manager = self.encoder_cache_manager
        return scheduled, manager.get_freed_mm_hashes(), stats, manager.get_manager_metadata()

    def input_updates(
        self,
        scheduled: list[tuple[Request, int]],
        new_requests: list[NewRequestData],
        scheduled_inputs: dict[str, list[int]],
    ) -> dict[str, Any]:
        """Return `encoder_input_updates`: inputs that Model Runner V2 gets again or can forget.

        Args:
            scheduled: The step's requests with such inputs, in its order, and how many tokens of
                each were computed before it, without those of steps in flight.
            new_requests: The step's `scheduled_new_reqs`.
            scheduled_inputs: Its `scheduled_encoder_inputs`.

        """
        for request, num_confirmed_tokens in scheduled:
            request.num_computed_tokens = num_confirmed_tokens
            request.num_output_placeholders = request.num_in_flight_tokens = 0
            self.requests[request.request_id] = request
        updates: dict[str, Any] = self._get_encoder_input_updates(
            dict.fromkeys(self.requests), new_requests, scheduled_inputs
        )
        self.requests.clear()
        return updates

    def take_mismatches(self) -> set[str]:
        """Return the ids of requests whose items contradict the encoder cache."""
        mismatches, self.encoder_cache_mismatch_reqs = self.encoder_cache_mismatch_reqs, set()
        return mismatches
