"""`NativeScheduler`: vLLM's `SchedulerInterface` over the Rust core.

The policy is in `rust/core/src/scheduler/policy.rs`; this module only translates. It offers what
vLLM's `v1/core/sched/scheduler.py` and `async_scheduler.py` offer, both in one class.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from vllm.config import KVEventsConfig, VllmConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase
from vllm.distributed.kv_events import EventPublisherFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
from vllm.logger import init_logger
from vllm.multimodal import MULTIMODAL_REGISTRY, MultiModalRegistry
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.interface import PauseState, SchedulerInterface
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.perf import ModelMetrics, PerfStats
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus, StreamingUpdate
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.utils import strip_speculative_padding

from sparksched import __version__, compat
from sparksched._core import SchedulerCore
from sparksched.compat.pacing import StepKnobs, max_graph_tokens, unpaceable
from sparksched.engine import sessions
from sparksched.engine.aux_outputs import AuxOutputs
from sparksched.engine.block_observer import BlockObserver
from sparksched.engine.config import core_config
from sparksched.engine.encoder import PartEncoder
from sparksched.engine.encoder_inputs import EncoderInputs
from sparksched.engine.encoder_transfer import EncoderTransfer
from sparksched.engine.extra_keys import extra_keys_writer
from sparksched.engine.kv_transfer import KVTransfer
from sparksched.engine.request_errors import HINTS, WAIT_S, refuse_unsupported_inputs
from sparksched.engine.views import KVCacheManagerView, missing_attribute
from sparksched.environment import Order, Pacing, file_of_engine, queue_timeout_s
from sparksched.shared.order import hints_of

# Below vLLM's own logger, which is the one that vLLM configures.
logger = init_logger("vllm.sparksched")


class NativeScheduler(SchedulerInterface):  # type: ignore[misc]
    """Schedules as vLLM's `Scheduler` and `AsyncScheduler` do, in Rust.

    Takes their constructor's arguments and decides between synchronous and asynchronous scheduling
    by `vllm_config.scheduler_config.async_scheduling`. Whether the configuration is one that the
    core implements is the question of who builds it: see `sparksched.scheduler`.

    Not thread-safe, as vLLM's: one engine loop owns it.

    Raises:
        RuntimeError: after an internal error, from each method that schedules, adds or ends
            requests, but for `finish_requests(None, ...)`.

    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        structured_output_manager: StructuredOutputManager,
        block_size: int,
        hash_block_size: int | None = None,
        mm_registry: MultiModalRegistry = MULTIMODAL_REGISTRY,
        include_finished_set: bool = False,
        log_stats: bool = False,
    ) -> None:
        self.vllm_config = vllm_config
        self.cache_config = vllm_config.cache_config
        self.scheduler_config = vllm_config.scheduler_config
        self.max_model_len = vllm_config.model_config.max_model_len
        self.max_num_running_reqs = vllm_config.scheduler_config.max_num_seqs
        self.kv_cache_config = kv_cache_config
        self.structured_output_manager = structured_output_manager
        self.block_size = block_size
        self.hash_block_size = block_size if hash_block_size is None else hash_block_size
        self.log_stats = log_stats
        self.kv_cache_manager = KVCacheManagerView(self, kv_cache_config)
        self._kv_transfer = None
        if vllm_config.kv_transfer_config is not None:
            self._kv_transfer = KVTransfer(vllm_config, kv_cache_config, log_stats)
        self._encoder_transfer = None
        if vllm_config.ec_transfer_config is not None:
            self._encoder_transfer = EncoderTransfer(vllm_config)

        self._kv_event_publisher = EventPublisherFactory.create(
            vllm_config.kv_events_config, vllm_config.parallel_config.data_parallel_index
        )
        config = core_config(
            vllm_config,
            kv_cache_config,
            block_size,
            self.hash_block_size,
            log_stats,
            kv_transfer=None if self._kv_transfer is None else self._kv_transfer.core_config,
        )
        self._needs_none_hash = config["hash_algorithm"] is not None
        self.extra_keys = (
            extra_keys_writer(
                config["hash_algorithm"], self.hash_block_size, config["num_hash_lookahead_tokens"]
            )
            if self._needs_none_hash
            else None
        )
        self._encoder_inputs = None
        if vllm_config.model_config.supports_multimodal_inputs:
            self._encoder_inputs = EncoderInputs(vllm_config, mm_registry, self.ec_connector)
        self._aux_outputs = self._build_aux_outputs(config)
        connectors = (self._kv_transfer, self._encoder_transfer, self._aux_outputs)
        self._has_connectors = any(connector is not None for connector in connectors)
        self.queue_timeout_s = queue_timeout_s()
        """For how long the operator lets requests wait to be scheduled, in seconds, or None."""
        self._is_ordered = False
        self.core = SchedulerCore(
            config,
            # Functions that don't know this object: the core would keep it alive.
            accept_tokens=token_acceptor(structured_output_manager),
            # Looked up at each call: a recorder may wrap it.
            validate_tokens=lambda *it: structured_output_manager.validate_tokens(*it),  # noqa: PLW0108
            next_turn=sessions.next_turn,
            encoder_inputs=self._encoder_inputs,
            extra_keys=self.extra_keys,
            block_observer=self._block_observer(config),
            kv_transfer=self._kv_transfer,
            encoder_transfer=self._encoder_transfer,
            aux_outputs=self._aux_outputs,
            step_perf_stats=step_perf_stats(vllm_config) if log_stats else None,
            encode_part=PartEncoder().encode_part,
            include_finished_set=include_finished_set,
        )
        if self.connector is not None:
            self.connector.bind_kv_cache_manager(self.kv_cache_manager)
        logger.info(
            "sparksched %s: scheduling in Rust (%s, %s, prefix caching %s, %d KV cache groups)",
            __version__,
            "asynchronous" if config["async_scheduling"] else "synchronous",
            config["policy"],
            config["hash_algorithm"] or "off",
            len(config["groups"]),
        )

    def _block_observer(self, config: dict[str, Any]) -> BlockObserver | None:
        makes_events = config["enable_kv_cache_events"] or self._kv_transfer is not None
        if not (makes_events or config["kv_cache_metrics"]):
            return None
        return BlockObserver(self.vllm_config, self.kv_cache_config, self._kv_event_publisher)

    def _build_aux_outputs(self, config: dict[str, Any]) -> AuxOutputs | None:
        if not config["collects_aux_output"]:
            return None
        lookup_groups = config["lookup_groups"]
        return AuxOutputs(self.kv_cache_config, lookup_groups, self.hash_block_size, self.connector)

    # ---- the two calls of each step ----

    def schedule(
        self, throttle_prefills: bool = False, knobs: tuple[int, int, tuple[str, ...]] | None = None
    ) -> SchedulerOutput:
        """Decide what the next step computes. See `SchedulerInterface.schedule`.

        Args:
            throttle_prefills: As there.
            knobs: `max_num_scheduled_tokens`, `long_prefill_token_threshold` and the order of this
                step, as they were in another scheduler; None for what is configured or paces
                prompts.

        """
        if not self._has_connectors:
            return self.core.schedule(throttle_prefills, time.monotonic(), knobs)
        output = self.core.decide(throttle_prefills, time.monotonic(), knobs)
        # Connectors see requests as they are before the step.
        if self._kv_transfer is not None:
            self._kv_transfer.plan_step(output, self.core.block_ids)
        if self._aux_outputs is not None:
            metadata = self._aux_outputs.connector.build_connector_meta(output, self.requests)
            output.aux_output_connector_metadata = metadata
        if self.ec_connector is not None:
            output.ec_connector_metadata = self.ec_connector.build_connector_meta(output)
        # For connectors, not for the workers.
        output.kv_connector_block_state = None
        self.core.update_after_schedule(output)
        return output

    @property
    def knobs(self) -> StepKnobs:
        """What the last step was decided with."""
        return StepKnobs(*self.core.knobs())

    @property
    def chosen_knobs(self) -> StepKnobs | None:
        """The same, if they were chosen for this step; None for what is configured."""
        return self.knobs if self.core.are_knobs_chosen() else None

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Take in what a step brought. See `SchedulerInterface.update_from_output`.

        For the clients of `core.encode_outputs_for` it is `StepOutputs`, the same as a message.

        Raises:
            KeyError: if the model runner has no output for a request that was scheduled.
            OverflowError: if a sampled token id does not fit into 32 bits.

        """
        return self.core.update_from_output(scheduler_output, model_runner_output)

    def pace(self, settings: Pacing) -> None:
        """Keep long prompts from holding others up from now on, unless something is in the way.

        Raises:
            RuntimeError: if something is and `SPARKSCHED_STRICT=1`, or the log can't be created.

        """
        problem = unpaceable(self.vllm_config)
        if problem is not None:
            reason = f"long prompts are not paced: {problem.feature}: {problem.reason}"
            compat.warn_or_raise(warning=f"sparksched: {reason}", error=f"sparksched: {reason}")
            return
        index = self.vllm_config.parallel_config.data_parallel_index
        log = settings.log and str(file_of_engine(settings.log, index))
        self.core.pace(
            settings.max_stall_s,
            settings.max_slowdown,
            max_graph_tokens(self.vllm_config),
            log,
        )
        logger.info(
            "sparksched: long prompts are paced: while others generate, no step with prompts is to"
            " take longer than %g ms, unless a prompt's first token would come more than %g times"
            " as late as without pacing",
            settings.max_stall_s * 1e3,
            settings.max_slowdown,
        )

    def order_by(self, order: Order) -> None:
        """Give requests that arrive from now on the priorities of this order."""
        self.core.order_by(order.kind, weights=order.weights, seconds=order.seconds)
        self._is_ordered = True
        logger.info("sparksched: requests come in by %s", order.kind)

    def order_hints(self, request: Any) -> tuple[str, float | None]:
        """Return `hints_of` a request, or its message; nothing if none are ordered."""
        return hints_of(request) if self._is_ordered else ("", None)

    @contextlib.contextmanager
    def warming_up(self) -> Iterator[None]:
        """Let steps within this have the values that are configured; pacing learns their times."""
        self.core.warm_up_pacing(True)
        try:
            yield
        finally:
            self.core.warm_up_pacing(False)

    def pacing(self) -> dict[str, Any] | None:
        """Return what pacing has done so far; None if prompts aren't paced.

        Keys: as `SchedulerCore.pacing` has them.
        """
        return self.core.pacing()

    # ---- requests ----

    @property
    def requests(self) -> dict[str, Request]:
        """Requests that are not finished, by id. Their counters are not kept up to date."""
        return self.core.requests

    @property
    def running(self) -> list[Request]:
        """Requests that run, in their order: a new list."""
        return self.core.running_requests()

    @property
    def waiting(self) -> list[Request]:
        """Requests that wait, the next to be admitted first: a new list."""
        return self.core.waiting_requests()

    @property
    def finished_req_ids(self) -> set[str]:
        """Ids of requests that ended since the last step: a new set."""
        return set(self.core.finished_req_ids)

    def add_request(self, request: Request) -> None:
        """Put a request into the queue; or one that has the id of a session: continue that.

        Raises:
            ValueError: for an id that is in use, or inputs that are not supported; an engine
                refuses the latter before they get here.

        """
        self.refuse_unsupported_inputs(request)
        if self._needs_none_hash:
            self.set_none_hash(kv_cache_utils.NONE_HASH)
        session = self.requests.get(request.request_id)
        if session is None or session.streaming_queue is None:
            sessions.open_session(request)
            wait_s = getattr(request, WAIT_S, None)
            hints = getattr(request, HINTS, None) or self.order_hints(request)
            self.core.add_request(request, time.monotonic(), wait_s, *hints)
            if self.connector is not None:
                self.connector.on_new_request(request)
        else:
            self._continue_session(session, StreamingUpdate.from_request(request))

    def take_expired(self) -> list[Request]:
        """Return requests that have never been scheduled, and whose time for that is up.

        They are still in the queue: it is for the engine to end them.
        """
        return self.core.take_expired(time.monotonic())

    def refuse_unsupported_inputs(self, request: Any) -> None:
        """Raise `VLLMValidationError` for a request, or its message, that can't be served."""
        refuse_unsupported_inputs(
            request,
            takes_encoder_inputs=self._encoder_inputs is not None,
            takes_prompt_embeds=self.vllm_config.model_config.enable_prompt_embeds,
        )

    def _continue_session(self, session: Request, update: StreamingUpdate | None) -> None:
        """Give a session its next input, or None for its end, now or when its turn has ended."""
        if not self.core.is_waiting_for_input(session.request_id):
            session.streaming_queue.append(update)
        elif update is not None:
            self.core.continue_session(
                session.request_id,
                lambda request, num_kept_tokens: sessions.continue_session(
                    request, update, num_kept_tokens
                ),
            )
        else:
            self.core.finish_requests({session.request_id}, RequestStatus.FINISHED_ABORTED)

    def set_none_hash(self, none_hash: bytes) -> None:
        """Set what stands in for the parent of each first block: vLLM's `NONE_HASH`.

        vLLM decides it only after the scheduler is built, for some algorithms at random.
        """
        self.core.set_none_hash(none_hash)
        self._needs_none_hash = False

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        """End requests from outside, all of them for None. Returns those that were not yet."""
        if not RequestStatus.is_finished(finished_status):
            raise ValueError(f"requests can't be finished with the status {finished_status}")
        if isinstance(request_ids, str):
            request_ids = (request_ids,)
        elif request_ids is not None:
            # As vLLM: the set's order decides which blocks are free first.
            request_ids = set(request_ids)
        return self.core.finish_requests(request_ids, finished_status)

    def get_num_unfinished_requests(self) -> int:
        """Count the requests that have work to do in the current pause state, as vLLM does.

        Less than 0 if new requests are paused and sessions without input hold no blocks.
        """
        return self.core.num_unfinished_requests()

    def has_unfinished_requests(self) -> bool:
        """Return whether a request has work to do in the current pause state."""
        return self.core.has_unfinished_requests()

    def has_finished_requests(self) -> bool:
        """Return whether the model runner has not been told of the end of some requests.

        Or has been, but a KV connector keeps their blocks.
        """
        return self.core.has_finished_requests()

    def has_requests(self) -> bool:
        """Return whether there is anything for a step to do or to tell.

        Raises:
            RuntimeError: after an internal error: an engine that can't go on ends at once.

        """
        if self.core.has_requests():
            return True
        connectors = (self.connector, self.ec_connector)
        return any(it is not None and it.has_pending_push_work() for it in connectors)

    def get_request_counts(self) -> tuple[int, int]:
        """Count running and waiting requests."""
        return self.core.request_counts()

    def has_request(self, request_id: str) -> bool:
        """Return whether there is one: idle sessions and those kept by a connector count."""
        return request_id in self.requests

    # ---- structured output ----

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """Compute the bitmask for the requests of the step that a grammar restricts."""
        if not scheduler_output.has_structured_output_requests:
            return None
        request_ids = self.core.structured_output_request_ids(scheduler_output.num_scheduled_tokens)
        if not request_ids:
            return None
        drafts = scheduler_output.scheduled_spec_decode_tokens
        bitmask = self.structured_output_manager.grammar_bitmask(self.requests, request_ids, drafts)
        num_acceptable_drafts = [
            len(strip_speculative_padding(drafts.get(request_id, []))) for request_id in request_ids
        ]
        return GrammarOutput(request_ids, bitmask, num_acceptable_drafts)

    # ---- draft tokens ----

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Take the draft tokens for the next step, as far as grammars accept them."""
        self.core.update_draft_token_ids(draft_token_ids.req_ids, draft_token_ids.draft_token_ids)

    def update_draft_token_ids_in_output(
        self, draft_token_ids: DraftTokenIds, scheduler_output: SchedulerOutput
    ) -> None:
        """Put draft tokens in the place of a scheduled step's placeholders.

        What a request's grammar does not accept becomes -1, and is counted in
        `scheduler_output.num_invalid_spec_tokens`.
        """
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        num_invalid: dict[str, int] = {}
        for request_id, drafts in zip(
            draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=False
        ):
            placeholders = scheduled.get(request_id)
            request = self.requests.get(request_id)
            if not placeholders or request is None or request.is_finished():
                continue
            # A chunk of a prompt may have room for some of them only.
            del drafts[len(placeholders) :]
            valid = self.core.valid_drafts(request_id, drafts) or []
            num_missing = len(placeholders) - len(valid)
            if num_missing:
                valid.extend([-1] * num_missing)
                num_invalid[request_id] = num_missing
            scheduled[request_id] = valid
        scheduler_output.num_invalid_spec_tokens = num_invalid

    # ---- the cache, pauses, statistics ----

    def get_kv_cache_usage(self) -> float:
        """Return the share of KV blocks in use, 0 to 1."""
        return self.core.kv_cache_usage()

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget all cached prefixes; see `SchedulerInterface.reset_prefix_cache`.

        Raises:
            RuntimeError: if blocks are still held although all running requests were preempted.

        """
        if reset_running_requests:
            self.core.preempt_running(time.monotonic())
        is_reset = self.core.reset_prefix_cache()
        if is_reset:
            logger.info("The prefix cache is empty now.")
        else:
            num_used_blocks = self.core.num_used_blocks()
            if reset_running_requests:
                raise RuntimeError(
                    f"The prefix cache can't be reset: {num_used_blocks} blocks are in use although"
                    " no request runs. A KV connector may be filling or sending them."
                )
            logger.warning("The prefix cache is not reset: %d blocks are in use.", num_used_blocks)
        if reset_connector:
            is_reset = self.reset_connector_cache() and is_reset
        if is_reset and self._aux_outputs is not None:
            self._aux_outputs.connector.reset()
        return is_reset

    def reset_connector_cache(self) -> bool:
        """Have the KV connector, if there is one, forget what it has; return whether it did."""
        return self._kv_transfer is None or self._kv_transfer.reset_cache()

    def reset_encoder_cache(self) -> None:
        """Forget all encoder outputs, as after an update of the weights."""
        if self._encoder_inputs is not None:
            self._encoder_inputs.encoder_cache_manager.reset()

    @property
    def encoder_cache_manager(self) -> EncoderCacheManager | None:
        """The manager of the encoder's outputs; None for a model without encoder inputs."""
        return self._encoder_inputs and self._encoder_inputs.encoder_cache_manager

    @property
    def pause_state(self) -> PauseState:
        """Whether requests are scheduled."""
        return PauseState(self.core.pause_state())

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Stop or resume scheduling."""
        logger.info("Scheduling is %s now.", pause_state.name.lower().replace("_", " "))
        self.core.set_pause_state(int(pause_state))

    def make_stats(self) -> SchedulerStats | None:
        """Return the current statistics, or None if they are off; prefix cache counters restart."""
        return self.core.make_stats()

    def get_kv_event_publisher_config(self) -> KVEventsConfig | None:
        """Return how KV cache events are published, with the ports that were chosen."""
        return self._kv_event_publisher.get_publisher_config()

    @property
    def connector(self) -> KVConnectorBase_V1 | None:
        """The scheduler's side of the KV connector, if there is one."""
        return self._kv_transfer and self._kv_transfer.connector

    def get_kv_connector(self) -> KVConnectorBase_V1 | None:
        """Return the scheduler's side of the KV connector, if there is one."""
        return self.connector

    @property
    def ec_connector(self) -> ECConnectorBase | None:
        """The scheduler's side of the EC connector, if there is one."""
        return self._encoder_transfer and self._encoder_transfer.connector

    def get_ec_connector(self) -> ECConnectorBase | None:
        """Return the scheduler's side of the EC connector, if there is one."""
        return self.ec_connector

    def shutdown(self) -> None:
        """Stop publishing KV cache events, and the connectors."""
        self._kv_event_publisher.shutdown()
        if self.connector is not None:
            self.connector.shutdown()
        if self.ec_connector is not None:
            self.ec_connector.shutdown()

    def snapshot(self) -> dict[str, Any]:
        """Return the whole state as plain data, for tests and support.

        Keys: `requests` (by id: status, counters, `block_ids` a group), `running` and `waiting`
        (ids in order), `num_kv_holding` (how many of those that wait hold blocks: the first),
        `free_blocks` (ids in the order of reuse), `ref_counts` (by id of blocks in use),
        `cached_blocks` (by id: hash and group in hex, as vLLM's `BlockHashWithGroupId`),
        `further_keys` (by id: the others that a block is found by, sorted), `waiting_for` (by id
        of those that wait: the reason, as in docs/metrics.md).
        Takes time and memory in proportion to the number of blocks.
        """
        return self.core.snapshot()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):
                # A property's own code lacked something: its error says what.
                return object.__getattribute__(self, name)
            raise missing_attribute("the scheduler", self, name)


def step_perf_stats(vllm_config: VllmConfig) -> Callable[[SchedulerOutput], PerfStats] | None:
    """Return vLLM's own estimate of a step's work, if MFU metrics are on and know the model."""
    if not vllm_config.observability_config.enable_mfu_metrics:
        return None
    metrics = ModelMetrics(vllm_config)
    return metrics.get_step_perf_stats_per_gpu if metrics.is_enabled() else None


def token_acceptor(manager: StructuredOutputManager) -> Callable[[Request, list[int]], bool]:
    """Return a function that advances a request's grammar, or logs that it rejects the tokens."""

    def accept_tokens(request: Request, token_ids: list[int]) -> bool:
        accepted: bool = manager.accept_tokens(request, token_ids)
        if not accepted:
            logger.error(
                "The grammar of request %s rejects the sampled tokens %s: ending it with an error.",
                request.request_id,
                token_ids,
            )
        return accepted

    return accept_tokens
